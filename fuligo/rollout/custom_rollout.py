"""User's functions `(args, rollout_id, data_source, evaluation)`, plain or async: --rollout-function-path and --eval-function-path."""

import asyncio
import inspect
from collections.abc import Callable, Sequence
from copy import deepcopy
from dataclasses import KW_ONLY, dataclass
from typing import Any

from fuligo.config.hooks import reraised
from fuligo.engines.generation import SamplingParams
from fuligo.errors import RewardError, RolloutError
from fuligo.quantities import count
from fuligo.rollout.custom_generate import complete, default_generate
from fuligo.rollout.custom_source import NO_ROW
from fuligo.rollout.evaluate import EvalSet, Evaluation, eval_metrics
from fuligo.rollout.protocol import GenerateFn, Rollout, RolloutState, is_group_list
from fuligo.rollout.rewards.runner import finite
from fuligo.rollout.runner import RunnerParts
from fuligo.rollout.sampler import failed, malformation
from fuligo.rollout.source import DataSource, new_group
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

    `version` is for tokens without one; `rows`: dataset row by group index. Without `reward_key`, dict rewards are not checked.
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


class EvalData:
    """`data_source` of an evaluation function: fresh samples of the evaluation data."""

    def __init__(self, sets: Sequence[EvalSet]) -> None:
        self._sets = {eval_set.name: eval_set for eval_set in sets}

    @property
    def names(self) -> list[str]:
        return list(self._sets)

    def get_samples(self, name: str) -> list[list[Sample]]:
        """Return a group of pending samples for each prompt of a dataset."""
        eval_set = self._sets[name]
        return [new_group(deepcopy(prompt), i, eval_set.num_samples).samples for i, prompt in enumerate(eval_set.prompts)]


@dataclass(eq=False)
class CustomEvaluator:
    """Evaluator that calls the user's function, which returns finished samples with rewards by dataset. Implements `Evaluates`."""

    hook: Callable[..., Any]
    args: Any
    sets: Sequence[EvalSet]
    generate: GenerateFn
    params: SamplingParams
    _: KW_ONLY
    policy_version: Callable[[], int]
    reward_key: str | None
    """Key of dict rewards to report for datasets that the function adds to `sets`; None if rewards are numbers."""
    vocab_size: int | None
    """Number of token ids that the model has; None: ids are not checked."""

    async def evaluate(self, rollout_id: int) -> Evaluation:
        """Call the function and compute the metrics of its samples. Raises RolloutError if it raised or its samples are unusable."""
        text = f"--eval-function-path: the function raised after {count(rollout_id, 'rollout')}:"
        with reraised(text, self.hook), default_generate(self.generate, self.params):
            result = await call(self.hook, self.args, rollout_id, EvalData(self.sets), evaluation=True)
        evaluation, version = Evaluation({}, {}), self.policy_version()
        own_keys = {eval_set.name: eval_set.reward_key for eval_set in self.sets}
        fits = isinstance(result, dict) and result and all(isinstance(name, str) and "/" not in name for name in result)
        if not fits or not is_group_list(list(result.values())):
            raise RolloutError(
                "--eval-function-path must return a dict from dataset names (without '/') to non-empty lists of Sample; "
                f"it returned {result!r:.200}"
            )
        for name, samples in result.items():
            reward_key = own_keys.get(name, self.reward_key)
            members: dict[int, list[Sample]] = {}
            for sample in samples:
                members.setdefault(sample.group_index, []).append(sample)
            groups = [
                completed_group(group, version, dict.fromkeys(members, NO_ROW), self.vocab_size, reward_key) for group in members.values()
            ]
            evaluation.groups[name] = groups
            evaluation.reward_keys[name] = reward_key
            evaluation.metrics |= eval_metrics(name, max(map(len, members.values())), reward_key, groups)
        return evaluation

    async def close(self) -> None:
        """Do nothing: the function judges its samples itself."""
