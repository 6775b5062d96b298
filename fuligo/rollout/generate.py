"""Default GenerateFn: one response to one prompt, continued from the tokens that it already has."""

from __future__ import annotations

import asyncio
import itertools
import time
from collections.abc import Callable
from copy import copy
from dataclasses import KW_ONLY, dataclass, field, replace

import numpy as np

from fuligo.config.groups import RolloutFlags
from fuligo.data.template import response_decoder
from fuligo.engines.engine import Engine
from fuligo.engines.generation import FinishReason, Generation, RoutingQuery, SamplingParams, Tokenizer, trim
from fuligo.errors import DataError, EngineError
from fuligo.models.routing import RoutingShape
from fuligo.models.vision.processor import ResizedImages
from fuligo.rollout.sampler import append_tokens
from fuligo.types import IntArray, PromptImage, Sample, SampleStatus, Span

MAX_TOKENS_DECODED_INLINE = 1024
"""Longest response, in tokens, that is decoded on the event loop: a thread would take longer. More tokens would block the loop."""
STATUS_BY_FINISH_REASON: dict[FinishReason, SampleStatus] = {
    "stop": SampleStatus.COMPLETED,
    "length": SampleStatus.TRUNCATED,
    "abort": SampleStatus.ABORTED,
}


@dataclass(eq=False)
class SingleTurn:
    """Generator that sends prompt and response so far to the engine and appends the new tokens."""

    engine: Engine
    tokenizer: Tokenizer
    _: KW_ONLY
    timeout_s: float
    """Timeout of a request, retries included."""
    max_context_len: int | None = None
    """Longest prompt + response, in tokens; None: no limit."""
    routing: RoutingShape | None = None
    """Shape of the routed experts to request for every token; None: do not request them."""
    images: ResizedImages | None = None
    """Resizer for engines whose image processor differs from the trainer's; None: send images unchanged."""
    writes_text: bool = True
    """True to decode the response after every request; False: only with stop strings, and callers use `text`."""
    _num_requests: itertools.count = field(default_factory=itertools.count, init=False)
    _text_of: Callable[[list[int]], str] = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._text_of = response_decoder(self.tokenizer)

    def without_routing(self) -> SingleTurn:
        """Return a copy for responses that are not trained on; request ids come from the same counter."""
        other = copy(self)
        other.routing = None
        return other

    def without_text(self) -> SingleTurn:
        """Return a copy that leaves the text of responses to its caller; request ids come from the same counter."""
        other = copy(self)
        other.writes_text = False
        return other

    async def text(self, sample: Sample) -> str:
        """Return the text of the whole response."""
        return await self._decode(sample.response_ids)

    async def __call__(self, sample: Sample, params: SamplingParams) -> Sample:
        """Generate the rest of a response. If the request fails after its retries, the sample is marked failed and keeps its tokens.

        `params.max_new_tokens` limits the whole response: a continued response gets only the remaining tokens, and is truncated
        without a request if none remain.
        """
        num_left = self._num_tokens_left(sample, params)
        if num_left <= 0:
            sample.status, sample.finish_reason = SampleStatus.TRUNCATED, "length"
            return sample
        span = Span("generate", time.time(), 0.0, first_token=sample.response_length)
        rest = replace(params, max_new_tokens=num_left, min_new_tokens=max(0, params.min_new_tokens - sample.response_length))
        try:
            generation = await self.engine.generate(
                sample.tokens,
                rest,
                rid=f"{sample.index}-{next(self._num_requests)}",
                priority=-sample.index,
                timeout_s=self.timeout_s,
                routing=self._routing_query(sample),
                images=await self._images(sample),
            )
        except (EngineError, DataError) as error:
            sample.status, sample.error = SampleStatus.FAILED, str(error)
        else:
            append(sample, generation)
            span.engine, span.num_tokens = generation.engine, len(generation.output_ids)
            if self.writes_text or params.stop:
                sample.response = await self._text(sample, params.stop)
        span.end_s = time.time()
        sample.spans.append(span)
        return sample

    async def _images(self, sample: Sample) -> tuple[PromptImage, ...]:
        """Return the images to send. Raises DataError if one cannot be decoded."""
        if self.images is None or not sample.images:
            return sample.images
        return tuple([await asyncio.to_thread(self.images.of, image) for image in sample.images])

    def _routing_query(self, sample: Sample) -> RoutingQuery | None:
        """Return a query for the experts of the tokens that have none recorded; None without `routing`.

        Recorded experts stay, even if newer weights would route differently.
        """
        if self.routing is None:
            return None
        num_known = 0 if sample.routed_experts is None else len(sample.routed_experts)
        return RoutingQuery(self.routing, num_known, affinity=sample.group_index)

    def _num_tokens_left(self, sample: Sample, params: SamplingParams) -> int:
        left = params.max_new_tokens - sample.response_length
        if self.max_context_len is None:
            return left
        return min(left, self.max_context_len - len(sample.prompt_ids) - sample.response_length)

    async def _text(self, sample: Sample, stop: tuple[str, ...]) -> str:
        """Decode the whole response and cut the stop string that ended it; the ids keep the stop string."""
        text = await self._decode(sample.response_ids)
        if not stop or sample.finish_reason != "stop":
            return text
        # The last token completed the stop string; earlier stop strings ended earlier turns and stay. Without the last token, a character
        # that it completes decodes to a replacement character.
        before = (await self._decode(sample.response_ids[:-1])).rstrip("\ufffd")
        return trim(text, stop, len(before))

    async def _decode(self, ids: IntArray) -> str:
        if len(ids) <= MAX_TOKENS_DECODED_INLINE:
            return self._text_of(ids.tolist())
        return await asyncio.to_thread(self._text_of, ids.tolist())


def append(sample: Sample, generation: Generation) -> None:
    """Append an engine's new tokens with their log-probabilities, versions and experts; set the finish reason and status."""
    append_tokens(sample, generation.output_ids, generation.logprobs, generation.versions, trained=True)
    if generation.routed_experts is not None:
        known = [] if sample.routed_experts is None else [sample.routed_experts]
        sample.routed_experts = np.concatenate([*known, generation.routed_experts])
    sample.finish_reason = generation.finish_reason
    sample.status = STATUS_BY_FINISH_REASON[generation.finish_reason]


def sampling_params(flags: RolloutFlags) -> SamplingParams:
    """Return the sampling parameters that the rollout flags set."""
    return SamplingParams(
        max_new_tokens=flags.rollout_max_response_len,
        temperature=flags.rollout_temperature,
        top_p=flags.rollout_top_p,
        top_k=flags.rollout_top_k,
        min_p=flags.rollout_min_p,
        stop=tuple(flags.rollout_stop),
        stop_token_ids=tuple(flags.rollout_stop_token_ids),
    )
