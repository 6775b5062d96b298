"""Check of --exact-on-policy: the trainer's log-probabilities must equal the engine's bit for bit."""

from collections.abc import Iterator

import numpy as np

from fuligo.errors import TrainerError
from fuligo.types import StepResult, TrainBatch, TrainSample


def require_exact(batch: TrainBatch, result: StepResult, version: int) -> None:
    """Compare the log-probabilities of trained tokens that were sampled with the weights before the rollout's first optimizer step.

    Tokens of older versions (--partial-rollout) are skipped, because they were sampled with other weights.

    Args:
        batch: trained batch, with old log-probabilities if there was more than one optimizer step.
        result: result of training on the batch.
        version: version of the weights before the first optimizer step.

    Raises:
        TrainerError: a log-probability differs; the message names the first one.
    """
    differing: list[tuple[TrainSample, int, float]] = []
    num_compared = 0
    for sample, own in _before_first_step(batch, result):
        compared = (sample.loss_mask != 0) & (sample.versions == version)
        num_compared += int(compared.sum())
        different = np.flatnonzero(compared & ~(own == sample.engine_logprobs))  # NaN differs from everything
        differing += [(sample, int(token), float(own[token])) for token in different]
    if not differing:
        return
    sample, token, own = differing[0]
    raise TrainerError(
        f"cannot keep --exact-on-policy: sample {sample.index} (prompt {sample.group_index}), response token {token}: the "
        f"engine's log-probability is {sample.engine_logprobs[token]:.9g}, the trainer's {own:.9g}; {len(differing):,} of {num_compared:,} "
        f"tokens of policy version {version} differ. Make sure that hooks and agents also sample at "
        "--rollout-temperature, or drop --exact-on-policy to accept the difference"
    )


def _before_first_step(batch: TrainBatch, result: StepResult) -> Iterator[tuple[TrainSample, np.ndarray]]:
    """Yield samples with the trainer's [R] log-probabilities before the rollout's first optimizer step, if they were computed."""
    for position in [position for step in batch.steps for position in step]:
        sample = batch.samples[position]
        if sample.old_logprobs is not None:
            yield sample, sample.old_logprobs
        elif position in batch.steps[0] and position in result.scores:  # no scores if only the value model was trained
            yield sample, result.scores[position].logprobs
