"""Rollouts of `--rollout-function-path`: `(args, rollout_id, data_source, evaluation=False)`, plain or async."""

import asyncio
import inspect
from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from typing import Any

from fuligo.config.hooks import reraised
from fuligo.errors import RewardError, RolloutError
from fuligo.rollout.custom_generate import complete, default_generate
from fuligo.rollout.protocol import Rollout, RolloutState, is_group_list
from fuligo.rollout.rewards.runner import finite
from fuligo.rollout.runner import RunnerParts
from fuligo.rollout.sampler import failed, malformation
from fuligo.rollout.source import DataSource
from fuligo.rollout.teacher import ServedTeacher
from fuligo.types import Sample, SampleGroup, SampleStatus


@dataclass(eq=False)
class CustomRollout:
    """Rollout method that calls the user's function, which returns groups of finished samples with rewards. Implements `RolloutMethod`."""

    hook: Callable[..., Any]
    args: Any
    parts: RunnerParts
    """Parts of the run; the function replaces `engines`, `reward` and the filters."""
    _: KW_ONLY
    vocab_size: int | None = None
    """Number of token ids that the model has; None: ids are not checked."""
    teacher: ServedTeacher | None = None
    """Teacher that scores the returned samples; None without one."""

    def restore(self, state: RolloutState) -> None:
        self.parts.source.restore(state)

    async def rollout(self, step: int) -> Rollout:
        """Call the function and check its samples. Raises RolloutError if the function raised, or did not return groups of samples."""
        parts, version = self.parts, self.parts.policy_version()
        data_source = DataSource(parts.source, step, version)
        text = f"--rollout-function-path: the function raised in rollout {step}:"
        with reraised(text, self.hook), default_generate(parts.sampler.generate, parts.params):
            result = await call(self.hook, self.args, step, data_source, evaluation=False)
        if not is_group_list(result) or not result:
            raise RolloutError(
                f"--rollout-function-path must return a non-empty list of groups, each a non-empty list of Sample; got {result!r:.200}"
            )
        groups = [completed_group(samples, version, data_source.rows, self.vocab_size, parts.reward_key) for samples in result]
        groups.sort(key=lambda group: group.index)
        if self.teacher is not None:
            await asyncio.gather(*(self.teacher(group) for group in groups))
        return parts.rollout(step, groups, version)


async def call(hook: Callable[..., Any], args: Any, rollout_id: int, data_source: Any, *, evaluation: bool) -> Any:
    """Call a rollout or evaluation function: on the event loop if it is async, else in a thread."""
    if inspect.iscoroutinefunction(hook):
        return await hook(args, rollout_id, data_source, evaluation=evaluation)
    return await asyncio.to_thread(hook, args, rollout_id, data_source, evaluation=evaluation)


def completed_group(
    samples: list[Sample], version: int, rows: dict[int, int], vocab_size: int | None, reward_key: str | None
) -> SampleGroup:
    """Return the group of samples that a user's function returned, completed. Samples that cannot be trained on are marked failed.

    `version` is for tokens without one; `rows` maps group indices to the dataset. Without `reward_key`, dict rewards are not checked.
    """
    for sample in samples:
        try:
            complete(sample, version, vocab_size=vocab_size)
            problem = malformation(sample)
        except ValueError as error:
            problem = str(error)
        if problem is None and sample.status in (SampleStatus.PENDING, SampleStatus.ABORTED):
            problem = f"the function returned the sample as {sample.status}; finish it, or set its status to failed"
        if problem is None and sample.status is not SampleStatus.FAILED:
            problem = _reward_problem(sample, reward_key)
        if problem is not None:
            failed(sample, problem)
    index = samples[0].group_index
    return SampleGroup(index, rows.get(index, -1), samples)


def _reward_problem(sample: Sample, reward_key: str | None) -> str | None:
    """Return why a sample cannot be trained on with its reward; None if it can. NaN and infinity fail their sample, not the run."""
    if sample.reward is None:
        return "the function returned the sample without a reward; set sample.reward"
    value = sample.reward
    if isinstance(value, dict):
        if reward_key is None:
            return None  # --custom-reward-post-process-path computes the scalar
        value = value.get(reward_key)
    try:
        finite(value, "the reward that the function set")
    except RewardError as failure:
        return str(failure)
    return None
