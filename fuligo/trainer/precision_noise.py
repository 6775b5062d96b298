"""Precision noise of a policy: samples on which it is measured, their mean difference, and the result of a failed measurement."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from fuligo.types import FloatArray, TrainSample

MAX_TOKENS = 4096
"""Maximum number of tokens on which log-probabilities are compared: enough for a mean, but only a small part of a step's work."""


@dataclass(slots=True, frozen=True)
class Unmeasured:
    """Failed measurement."""

    reason: str


def noise_samples(samples: Sequence[TrainSample], max_tokens: int) -> list[TrainSample]:
    """Return samples of at most `max_tokens` tokens in total; the first sample of every prompt comes before any second one.

    A sample that does not fit is cut, which does not change the log-probabilities of its remaining tokens. Samples without trained tokens
    are left out, so the result may be empty.
    """
    drawn: Counter[int] = Counter()
    rounds: list[int] = []
    for sample in samples:
        rounds.append(drawn[sample.group_index])
        drawn[sample.group_index] += 1
    chosen: list[TrainSample] = []
    for position in np.argsort(rounds, kind="stable"):
        cut = _cut(samples[position], max_tokens)
        if cut.loss_mask.any():
            chosen.append(cut)
            max_tokens -= len(cut.tokens) - 1
    return chosen


def mean_difference(samples: Sequence[TrainSample], first: FloatArray, second: FloatArray, *, per_token: bool) -> float:
    """Return the mean absolute difference of log-probabilities, both [N] for all response tokens, over the trained tokens.

    Tokens are weighted as in the loss (`LossSettings.per_token`). At least one token must be trained.
    """
    trained = np.concatenate([sample.loss_mask for sample in samples]) != 0  # the engine's values of others may be NaN
    weights = np.concatenate([np.full(len(sample.loss_mask), 1.0 if per_token else 1 / sample.mask_sum) for sample in samples])
    return float(np.average(np.abs(first - second)[trained], weights=weights[trained]))


def _cut(sample: TrainSample, max_tokens: int) -> TrainSample:
    """Return the first part of a sample, with the fields that a forward pass needs, so that its row has at most `max_tokens` tokens.

    The row of a sample does not contain its last token.
    """
    length = max(0, min(len(sample.tokens), max_tokens + 1) - sample.prompt_length)
    return replace(
        sample,
        tokens=sample.tokens[: sample.prompt_length + length],
        loss_mask=sample.loss_mask[:length],
        engine_logprobs=sample.engine_logprobs[:length],
        versions=sample.versions[:length],
        advantages=sample.advantages[:length],
        old_logprobs=None,
        ref_logprobs=None,
        teacher_logprobs=None,
        values=None,
        returns=None,
        routed_experts=None,
        turn_rewards=None,
    )
