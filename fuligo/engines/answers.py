"""Bodies and answers of SGLang's HTTP API: answers checked and converted to the types of `generation`, and images as base64."""

from __future__ import annotations

import base64
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fuligo.engines.generation import EngineLoad, Generation, RoutingQuery
from fuligo.types import FloatArray, IntArray, PromptImage, RoutedExperts

_FIRST, _SECOND = itemgetter(0), itemgetter(1)
MAX_LOGPROB = 1e-3
"""Largest log-probability that is accepted; rounding can make that of a near-certain token slightly positive."""


MAX_IMAGES = 64
_PREFIX = "data:image;base64,"


class Retryable(Exception):
    """Raised if a request fails but may succeed when sent again: no connection, a server error, or a malformed answer."""


@dataclass(slots=True, frozen=True)
class WeightLabel:
    """Text that engines behind a router report as `weight_version`: `40@2` is version 40 on engine 2, `40@2#DIGEST` with an adapter.

    SGLang returns any text with every answer, and the router does not tell which engine answered.
    """

    version: int
    engine: int | None = None
    adapter: str | None = None
    """Digest of the LoRA adapter that the engine loaded as this version; None if it received whole weights."""

    def __str__(self) -> str:
        engine = "" if self.engine is None else f"@{self.engine}"
        return f"{self.version}{engine}" + ("" if self.adapter is None else f"#{self.adapter}")

    @classmethod
    def parse(cls, value: Any) -> WeightLabel:
        """Parse a reported `weight_version`. Raises Retryable if it is not a label."""
        if value == "default":  # SGLang's label before the first update
            return cls(0)
        label, _, adapter = str(value).partition("#")
        version, _, engine = label.partition("@")
        try:
            return cls(int(version), int(engine) if engine else None, adapter or None)
        except ValueError as error:
            raise Retryable(f"weight_version is {value!r}; it must be VERSION, VERSION@ENGINE or VERSION@ENGINE#DIGEST") from error


def parse_generation(answer: Any) -> Generation:
    """Check and convert an answer from `/generate`. Raises Retryable if it is malformed."""
    try:
        meta = answer["meta_info"]
        ids = np.asarray(answer["output_ids"], np.int64).reshape(-1)
        logprobs, scored_ids = _columns(meta["output_token_logprobs"])
        reason = meta["finish_reason"]["type"]
        prompt_tokens, cached_tokens = int(meta["prompt_tokens"]), int(meta.get("cached_tokens", 0))
        num_verifications = int(meta.get("spec_verify_ct", 0))
        text = answer.get("text") or ""
        versions = None if (listed := meta.get("token_versions")) is None else np.array(listed, np.int32)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError) as error:
        raise Retryable(f"malformed answer ({type(error).__name__}: {error}): {answer!r:.200}") from error
    if reason not in ("stop", "length", "abort"):
        raise Retryable(f"unknown finish reason {reason!r}")
    if len(ids) != len(logprobs):
        raise Retryable(f"{len(ids)} output_ids but {len(logprobs)} output_token_logprobs")
    if versions is not None and len(versions) != len(ids):
        raise Retryable(f"{len(ids)} output_ids but {len(versions)} token_versions")
    if not np.array_equal(ids, scored_ids):
        raise Retryable("output_token_logprobs and output_ids have different tokens")
    if ids.size:
        if (lowest := ids.min()) < 0 or ids.max() >= 2**31:
            raise Retryable(f"a token id is out of range: {lowest} .. {ids.max()}")
        if not (-np.inf < logprobs.min() and logprobs.max() <= MAX_LOGPROB):  # comparisons with NaN, which min() keeps, are false
            raise Retryable("a log-probability is not a finite number <= 0")
    label = WeightLabel.parse(meta.get("weight_version", "default"))
    return Generation(
        output_ids=ids.astype(np.int32),
        logprobs=logprobs,
        finish_reason=reason,
        weight_version=label.version,
        prompt_tokens=prompt_tokens,
        cached_tokens=cached_tokens,
        text=str(text),
        num_verifications=num_verifications,
        engine=label.engine,
        token_versions=versions,
    )


def _columns(scored: Sequence[Sequence[Any]]) -> tuple[FloatArray, NDArray[np.int64]]:
    """Return the log-probabilities and token ids of entries (log-probability, id, text or None)."""
    count = len(scored)
    return np.fromiter(map(_FIRST, scored), np.float32, count), np.fromiter(map(_SECOND, scored), np.int64, count)


def parse_routing(answer: Any, query: RoutingQuery, num_prompt_tokens: int) -> RoutedExperts:
    """Return the experts [n, M, K] of the queried tokens from a checked answer from `/generate`.

    Raises ValueError if they are missing, or the model's routers cannot choose them.
    """
    num_new_tokens = len(answer["output_ids"])
    num_tokens = num_prompt_tokens + num_new_tokens - 1 - query.num_known if num_new_tokens else 0  # the last token went through no layer
    return query.shape.decode(answer["meta_info"].get("routed_experts"), num_tokens) if num_tokens else query.shape.empty()


def parse_load(ranks: Sequence[Mapping[str, Any]]) -> EngineLoad:
    """Return the load summed over the data-parallel ranks in an answer from `/v1/loads`."""
    arrived = [rank["num_arrived_reqs"] for rank in ranks if "num_arrived_reqs" in rank]
    capacity = sum(rank.get("max_total_num_tokens", 0) for rank in ranks)
    return EngineLoad(
        num_running=sum(rank["num_running_reqs"] for rank in ranks),
        num_waiting=sum(rank["num_waiting_reqs"] for rank in ranks),
        num_arrived=sum(arrived) if len(arrived) == len(ranks) else None,
        kv_usage=sum(rank.get("num_used_tokens", 0) for rank in ranks) / capacity if capacity else None,
        tokens_per_s=sum(rank.get("gen_throughput", 0.0) for rank in ranks) or None,
    )


def scoring_body(input_ids: Sequence[int] | IntArray, num_given: int) -> dict[str, Any]:
    """Return the body of `/generate` for the log-probabilities of all tokens after the first `num_given`.

    SGLang reports none for the token at `logprob_start_len`, because its predecessor may come from the cache, which has no logits.
    """
    return {
        "input_ids": np.ascontiguousarray(input_ids, np.int32),
        "sampling_params": {"max_new_tokens": 0},
        "return_logprob": True,
        "logprob_start_len": num_given - 1,
    }


def parse_scores(answer: Any, scored_ids: IntArray) -> FloatArray:
    """Return [R] log softmax(logits), always at temperature 1, of a request's last tokens `scored_ids` [R].

    Raises Retryable if the answer lacks them, has other tokens, or has a value that is positive or not finite.
    """
    try:
        entries = answer["meta_info"]["input_token_logprobs"][-len(scored_ids) :]
        logprobs, ids = _columns(entries)
    except (KeyError, TypeError, ValueError, IndexError) as error:
        raise Retryable(f"the answer has no log-probabilities of the input ({type(error).__name__}: {error}): {answer!r:.200}") from error
    # SGLang 0.5.15 reports the last id of the vocabulary as 0, with the right log-probability.
    if len(ids) != len(scored_ids) or ((ids != scored_ids) & (ids != 0)).any():
        raise Retryable("input_token_logprobs and input_ids have different tokens")
    if not np.isfinite(logprobs).all() or (logprobs > MAX_LOGPROB).any():
        raise Retryable("an input log-probability is positive or not finite")
    return logprobs


def encoded_images(images: Sequence[PromptImage]) -> list[str]:
    """Return the images as base64 data URIs: the value of `image_data`, in the order of the images' tokens."""
    return [_PREFIX + base64.b64encode(image.data).decode() for image in images]


def decoded_images(value: Any) -> list[bytes]:
    """Return the images' bytes. Paths and URLs, which SGLang would open, are rejected, so that clients cannot read files through an engine.

    Raises ValueError if the value is malformed.
    """
    given = [value] if isinstance(value, str) else value
    if not isinstance(given, list) or not all(isinstance(each, str) for each in given):
        raise ValueError("image_data must be a base64 string or data URI, or a list of them")
    if len(given) > MAX_IMAGES:
        raise ValueError(f"image_data has {len(given)} images, but a request may have at most {MAX_IMAGES}")
    return [_decoded(each, number) for number, each in enumerate(given)]


def _decoded(text: str, number: int) -> bytes:
    encoded = text.partition(",")[2] if text.startswith("data:") else text
    try:
        return base64.b64decode(encoded, validate=True)
    except ValueError as error:
        raise ValueError(
            f"image_data[{number}] is not base64 or a base64 data URI; send the image itself, since paths and URLs are not read"
        ) from error
