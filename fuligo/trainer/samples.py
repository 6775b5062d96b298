"""Conversion of rollout groups to training samples, and the hooks that may change these before a step."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from fuligo.errors import RewardError, RolloutError, TrainerError
from fuligo.quantities import count
from fuligo.rollout.judging import TOO_FEW_USABLE, usable
from fuligo.types import Sample, SampleGroup, TrainBatch, TrainSample, TurnReward

RewardPostProcess = Callable[[list[Sample]], tuple[Sequence[float], Sequence[float]]]
"""Hook: samples -> (raw rewards, rewards to learn from), one of each for every sample."""


@dataclass(slots=True, frozen=True)
class SampleSettings:
    """Settings for the conversion of samples to training samples."""

    has_rewards: bool = True
    """False: rewards are ignored (SFT), and a group is trained even if only one of its samples is usable."""
    reward_key: str | None = None
    """Key of the value to learn from if a reward is a dict; None if rewards are numbers."""
    post_process: RewardPostProcess | None = None
    """Hook whose second list replaces the rewards. The estimator does not normalize that list; whitening of advantages still applies.
    None: no hook."""
    needs_routing: bool = False
    """True to require the recorded experts of every token that a trained token depends on."""
    needs_teacher: bool = False
    """True to require the teacher's log-probabilities, computed by an engine, of every response token."""


def train_samples(groups: list[SampleGroup], settings: SampleSettings) -> list[TrainSample]:
    """Convert the usable samples of these groups to training samples, in order.

    A usable sample is completed or truncated, and has response tokens and, if rewards are used, a reward. Truncated samples are
    kept even if all their tokens are masked, because they count in their group's statistics. If rewards are used, a group with fewer than
    two usable samples (one if the group has only one) is marked as dropped, because there is nothing to compare. Samples split from one
    trajectory (equal `index`) count as one there and share one `mask_sum`.

    Raises:
        RewardError: a reward lacks `reward_key` or is not a finite number, or `post_process` does not return one number for each sample.
        RolloutError: required experts or teacher log-probabilities of a sample are missing.
        TrainerError: `post_process` raised.
    """
    samples = [sample for group in groups for sample in _kept(group, settings)]
    rewards = _rewards(samples, settings) if settings.has_rewards else [0.0] * len(samples)
    by_turn = _rewards_by_turn(groups)
    mask_sums: dict[int, float] = defaultdict(float)
    for sample in samples:
        if settings.needs_routing:
            _require_routing(sample)
        if settings.needs_teacher and sample.teacher_logprobs is None:
            raise RolloutError(
                f"cannot train on sample {sample.index}: it has no teacher_logprobs, which --use-opd with a teacher on an engine needs; "
                "use a rollout that was generated with the teacher"
            )
        mask_sums[sample.index] += float(np.count_nonzero(sample.loss_mask))
    return [
        TrainSample(
            index=sample.index,
            group_index=sample.group_index,
            tokens=sample.tokens,
            prompt_length=len(sample.prompt_ids),
            loss_mask=sample.loss_mask,
            reward=reward,
            engine_logprobs=sample.engine_logprobs,
            versions=sample.versions,
            mask_sum=mask_sums[sample.index],
            status=sample.status,
            teacher_logprobs=sample.teacher_logprobs if settings.needs_teacher else None,
            routed_experts=sample.routed_experts if settings.needs_routing else None,
            images=sample.images,
            turn_rewards=by_turn.get(id(sample)),
        )
        for sample, reward in zip(samples, rewards)
    ]


def _rewards_by_turn(groups: list[SampleGroup]) -> dict[int, tuple[TurnReward, ...]]:
    """Return the turn rewards of each sample by `id(sample)`, for episodes in which every turn has a reward.

    The last sample of an episode lists the turns of all its samples.
    """
    episodes: dict[int, list[Sample]] = defaultdict(list)
    for sample in (sample for group in groups for sample in group.samples):
        episodes[sample.index].append(sample)
    found: dict[int, tuple[TurnReward, ...]] = {}
    for parts in episodes.values():
        turns = parts[-1].episode.turns if parts[-1].episode is not None else []
        if not turns or any(turn.reward is None for turn in turns):
            continue
        for number, part in enumerate(parts):
            held = [turn for turn in turns if turn.sample == number]
            found[id(part)] = tuple(TurnReward(turn.first_token + turn.num_tokens, turn.reward or 0.0) for turn in held)
    return found


def _require_routing(sample: Sample) -> None:
    """Raise RolloutError if the experts of a token before the last trained one are not recorded."""
    trained = np.flatnonzero(sample.loss_mask)
    num_needed = len(sample.prompt_ids) + int(trained[-1]) if len(trained) else 0
    num_known = 0 if sample.routed_experts is None else len(sample.routed_experts)
    if num_known < num_needed:
        raise RolloutError(
            f"cannot replay the routing of sample {sample.index}: --use-rollout-routing-replay needs the experts of its first {num_needed} "
            f"tokens, but only {num_known} are recorded; in a custom generate function, sample with continue_sample or set routed_experts"
        )


def _kept(group: SampleGroup, settings: SampleSettings) -> list[Sample]:
    samples = usable(group.samples, rewarded=settings.has_rewards)
    num_drawn, num_left = len({sample.index for sample in group.samples}), len({sample.index for sample in samples})
    if settings.has_rewards and num_left < min(2, num_drawn):
        group.kept, group.drop_reason = False, TOO_FEW_USABLE
        return []
    return samples


def _rewards(samples: list[Sample], settings: SampleSettings) -> list[float]:
    if settings.post_process is not None:
        rewards = _post_processed(settings.post_process(samples), len(samples))
    else:
        try:
            rewards = [sample.reward_value(settings.reward_key) for sample in samples]
        except ValueError as error:
            raise RewardError(str(error)) from error
    for sample, reward in zip(samples, rewards):
        if not np.isfinite(reward):
            raise RewardError(f"cannot train on sample {sample.index}: its reward is {reward}; return a finite number")
    return rewards


def _post_processed(result: tuple[Sequence[float], Sequence[float]], num_samples: int) -> list[float]:
    if not isinstance(result, tuple) or len(result) != 2:
        raise RewardError(
            f"--custom-reward-post-process-path must return (raw, rewards); it returned a value of type {type(result).__name__}"
        )
    try:
        rewards = [float(reward) for reward in result[1]]
    except (TypeError, ValueError) as error:
        raise RewardError(f"--custom-reward-post-process-path must return (raw, rewards), numbers for every sample: {error}") from error
    if len(rewards) != num_samples:
        raise RewardError(
            f"--custom-reward-post-process-path returned {count(len(rewards), 'reward')} for {count(num_samples, 'sample')}; "
            "return one for each"
        )
    return rewards


@dataclass(slots=True, frozen=True)
class DataPostProcess:
    """Hook --rollout-data-postprocess-path, followed by checks of the samples it leaves."""

    hook: Callable[[list[list[TrainSample]]], object]

    def __call__(self, samples: list[TrainSample]) -> None:
        """Call the hook with the samples of each prompt, which it may change in place, and recompute `mask_sum` from the loss masks.

        Raises TrainerError if the hook raised, or left samples that cannot be trained on.
        """
        groups: dict[int, list[TrainSample]] = defaultdict(list)
        for sample in samples:
            groups[sample.group_index].append(sample)
        self.hook(list(groups.values()))
        for sample in samples:
            if (problem := _misshapen(sample)) is not None:
                raise TrainerError(f"--rollout-data-postprocess-path left samples that cannot be trained on: {problem}")
        mask_sums: dict[int, float] = defaultdict(float)
        for sample in samples:
            mask_sums[sample.index] += float(np.count_nonzero(sample.loss_mask))
        for sample in samples:
            sample.mask_sum = mask_sums[sample.index]


_PER_TOKEN = ("loss_mask", "advantages", "engine_logprobs", "old_logprobs", "ref_logprobs")


@dataclass(slots=True, frozen=True)
class BeforeTrainStep:
    """Hook --before-train-step-path, followed by checks of the batch it leaves."""

    hook: Callable[[int, TrainBatch], object]
    num_replicas: int
    """Number of data-parallel ranks, each of which needs at least one sample of every optimizer step."""

    def __call__(self, rollout_id: int, batch: TrainBatch) -> None:
        """Call the hook and check the batch that it leaves.

        Raises TrainerError if the hook raised, or left a batch that cannot be trained on.
        """
        num_before = len(batch.samples)
        self.hook(rollout_id, batch)
        if (problem := self._problem(batch, num_before)) is not None:
            raise TrainerError(f"--before-train-step-path left a batch that cannot be trained on: {problem}")

    def _problem(self, batch: TrainBatch, num_before: int) -> str | None:
        """Return why the batch cannot be trained on; None if it can."""
        num_samples = len(batch.samples)
        if num_samples == 0:
            return f"it has no samples ({num_before} before the hook); to leave a sample out, set its loss_mask to 0"
        if sorted(position for step in batch.steps for position in step) != list(range(num_samples)):
            return (
                f"its steps must name each sample ({num_samples} in all, {num_before} before the hook) exactly once; to leave a sample "
                "out, set its loss_mask to 0, or remove it from both batch.samples and batch.steps"
            )
        if len(batch.num_rollouts_per_step) != len(batch.steps) or min(batch.num_rollouts_per_step) < 1:
            return (
                f"num_rollouts_per_step is {batch.num_rollouts_per_step} for {count(len(batch.steps), 'step')}: each needs a number above 0"
            )
        smallest = min(len(step) for step in batch.steps)
        if smallest < self.num_replicas and num_samples < num_before:
            return (
                f"a step has {count(smallest, 'sample')}, fewer than the {self.num_replicas} data-parallel ranks, which need one each; set "
                "the loss_mask of samples to 0 instead of removing them"
            )
        return next((problem for sample in batch.samples if (problem := _misshapen(sample)) is not None), None)


def _misshapen(sample: TrainSample) -> str | None:
    """Return a message about the first array whose shape does not match the sample's response; None if all match."""
    length = sample.response_length
    for name in _PER_TOKEN:
        values = getattr(sample, name)
        if values is not None and np.shape(values) != (length,) and not (name == "advantages" and np.size(values) == 0):
            return f"sample {sample.index} has {count(length, 'response token')}, but the shape of its {name} is {np.shape(values)}"
    return None
