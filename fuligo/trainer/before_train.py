"""Hook --before-train-step-path: the user's function may change a batch before training; the result is checked."""

from collections.abc import Callable
from dataclasses import dataclass

from fuligo.errors import TrainerError
from fuligo.types import TrainBatch, TrainSample

_PER_TOKEN = ("loss_mask", "advantages", "engine_logprobs", "old_logprobs", "ref_logprobs")


@dataclass(slots=True, frozen=True)
class BeforeTrainStep:
    """The run's hook with the checks of its result."""

    hook: Callable[[int, TrainBatch], object]
    num_replicas: int
    """Data-parallel ranks, each of which needs a sample of every optimizer step."""

    def __call__(self, rollout_id: int, batch: TrainBatch) -> None:
        """Call the hook and check the batch that it leaves.

        Raises:
            TrainerError: the hook raised, or left a batch that cannot be trained on.
        """
        num_before = len(batch.samples)
        self.hook(rollout_id, batch)
        problem = self._problem(batch, num_before)
        if problem is not None:
            raise TrainerError(f"--before-train-step-path left a batch that cannot be trained on: {problem}")

    def _problem(self, batch: TrainBatch, num_before: int) -> str | None:
        num_samples = len(batch.samples)
        if num_samples == 0:
            return f"it has no samples, there were {num_before}; to leave one out, set its loss_mask to 0"
        if sorted(position for step in batch.steps for position in step) != list(range(num_samples)):
            return (
                f"its steps must name each of its {num_samples} samples once (there were {num_before}); to leave one out, set its "
                "loss_mask to 0, or take it out of batch.samples and batch.steps alike"
            )
        if len(batch.num_rollouts_per_step) != len(batch.steps) or min(batch.num_rollouts_per_step) < 1:
            return f"num_rollouts_per_step is {batch.num_rollouts_per_step} for {len(batch.steps)} steps: each needs a number above 0"
        smallest = min(len(step) for step in batch.steps)
        if smallest < self.num_replicas and num_samples < num_before:
            return f"a step has {smallest} samples for {self.num_replicas} data-parallel ranks, each needs one (of {num_before} in all)"
        return next((problem for sample in batch.samples if (problem := _wrong_shape(sample))), None)


def _wrong_shape(sample: TrainSample) -> str | None:
    for name in _PER_TOKEN:
        values = getattr(sample, name)
        if values is not None and values.shape != (sample.response_length,):
            return f"sample {sample.index} has {sample.response_length} response tokens, its {name} the shape {values.shape}"
    return None
