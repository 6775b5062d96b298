"""Generation by `--custom-generate-function-path`: `async (args, sample, sampling_params) -> Sample | list[Sample]`, and its helpers."""

from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import KW_ONLY, dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike

from fuligo.engines.generation import SamplingParams
from fuligo.rollout.metrics import metrics_problem
from fuligo.rollout.protocol import GenerateFn
from fuligo.rollout.sampler import append_tokens
from fuligo.types import Sample, SampleStatus

GenerateHook = Callable[[Any, Sample, dict[str, Any]], Awaitable[Sample | list[Sample]]]

_ROUNDING = 1e-3
"""Largest positive log-probability, in nats, that is accepted as a rounding error."""
_default: ContextVar[tuple[GenerateFn, SamplingParams]] = ContextVar("default_generate")


@contextmanager
def default_generate(generate: GenerateFn, params: SamplingParams) -> Iterator[None]:
    """Make `continue_sample` use `generate` within the block and in tasks started there."""
    token = _default.set((generate, params))
    try:
        yield
    finally:
        _default.reset(token)


async def continue_sample(sample: Sample, sampling_params: dict[str, Any]) -> Sample:
    """Continue the response of a sample with the default generation; `max_new_tokens` limits the whole response.

    For use inside a custom generate function, which should return the sample if its status is not `completed` afterwards: it is
    truncated, failed, or aborted. With --partial-rollout or --async-mode full, the function is called again with an aborted sample.
    """
    generate, params = _default.get()
    known: dict[str, Any] = {name: tuple(value) if isinstance(value, list) else value for name, value in sampling_params.items()}
    result = await generate(sample, replace(params, **known))
    assert isinstance(result, Sample)
    return result


def append_observation(sample: Sample, token_ids: ArrayLike) -> None:
    """Append tokens that the policy did not sample (a tool's answer, the next user turn) and that are not trained on."""
    append_tokens(sample, token_ids, 0.0, sample.versions[-1] if len(sample.versions) else 0, trained=False)


@dataclass(eq=False)
class CustomGenerate:
    """`GenerateFn` that calls the user's function, then completes and checks its samples."""

    hook: GenerateHook
    args: Any
    default: GenerateFn
    """Generation that `continue_sample` uses inside the function."""
    policy_version: Callable[[], int]
    """Version of the weights in the engines, for tokens without a version."""
    _: KW_ONLY
    vocab_size: int | None = None
    """Number of token ids that the model has; None: ids are not checked."""

    async def __call__(self, sample: Sample, params: SamplingParams) -> list[Sample]:
        """Call the function and return its samples, completed. Raises TypeError or ValueError if they are invalid (see `complete`)."""
        version = self.policy_version()
        with default_generate(self.default, params):
            result = await self.hook(self.args, sample, params.to_json())
        samples = result if isinstance(result, list) else [result]
        for part in samples:
            if not isinstance(part, Sample):
                raise TypeError(f"the custom generate function returned {type(part).__name__}; return a Sample or a list of them")
            part.index, part.group_index = sample.index, sample.group_index
            complete(part, version, vocab_size=self.vocab_size)
        return samples


def complete(sample: Sample, version: int, *, vocab_size: int | None = None) -> None:
    """Complete a sample: lists become arrays, a missing loss mask becomes ones, and missing versions become `version`.

    Raises ValueError if ids, log-probabilities, mask, status or metrics are invalid.
    """
    ids = np.asarray(sample.response_ids)
    if len(ids) and not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(f"response_ids has the type {ids.dtype}; token ids are integers")
    if len(ids) and vocab_size is not None and not 0 <= ids.min() <= ids.max() < vocab_size:
        raise ValueError(f"response_ids has values from {ids.min()} to {ids.max()}; the vocabulary has ids 0 to {vocab_size - 1}")
    sample.response_ids = ids.astype(np.int32)
    num_tokens = len(sample.response_ids)
    if num_tokens and not len(sample.engine_logprobs):
        raise ValueError(
            f"the sample has {num_tokens} response_ids without engine_logprobs; set the log-probability of each sampled token, and 0 for "
            "tokens that were not sampled and have loss_mask 0"
        )
    sample.engine_logprobs = np.asarray(sample.engine_logprobs, np.float32)
    mask = np.asarray(sample.loss_mask) if len(sample.loss_mask) else np.ones(num_tokens, np.int8)
    if not np.isin(mask, (0, 1)).all():
        raise ValueError(f"loss_mask has the value {mask[~np.isin(mask, (0, 1))][0]}; only 0 and 1 are valid")
    sample.loss_mask = mask.astype(np.int8)
    trained = sample.engine_logprobs[sample.loss_mask != 0] if len(mask) == len(sample.engine_logprobs) else np.empty(0)
    if len(trained) and trained.max() > _ROUNDING:
        raise ValueError(f"engine_logprobs has the value {trained.max():g}; a log-probability is never positive")
    if (problem := metrics_problem(sample.metrics)) is not None:
        raise ValueError(problem)
    sample.status = SampleStatus(sample.status)
    sample.versions = np.asarray(sample.versions, np.int32) if len(sample.versions) else np.full(num_tokens, version, np.int32)
