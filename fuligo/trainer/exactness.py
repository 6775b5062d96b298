"""Check of --exact-on-policy: the trainer's log-probabilities must equal the engine's bit for bit."""

from itertools import chain

import numpy as np

from fuligo.errors import TrainerError
from fuligo.types import StepResult, TrainBatch, TrainSample


def require_exact(batch: TrainBatch, result: StepResult, version: int) -> None:
    """Compare trainer and engine: log-probabilities of trained tokens sampled with `version`, the weights before the first optimizer step.

    Tokens of older versions (--partial-rollout) are skipped, because they were sampled with other weights. Raises TrainerError, naming the
    first token whose log-probabilities differ, if there is one.
    """
    differing: list[tuple[TrainSample, int, float]] = []
    num_compared = 0
    for position in chain.from_iterable(batch.steps):
        sample = batch.samples[position]
        if sample.old_logprobs is not None:
            own = sample.old_logprobs
        elif position in batch.steps[0] and position in result.scores:  # no scores if only the value model was trained
            own = result.scores[position].logprobs
        else:
            continue
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
