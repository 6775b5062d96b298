"""Runner of rewards: judges groups of samples. An error in a reward fails its sample, never the run."""

import asyncio
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any, Self

from fuligo.config.groups import RewardFlags
from fuligo.errors import ConfigError, RewardError
from fuligo.quantities import count
from fuligo.rollout.metrics import is_finite, metrics_problem
from fuligo.rollout.rewards.check import check_reward
from fuligo.rollout.rewards.custom import CustomReward
from fuligo.rollout.rewards.remote import RemoteReward
from fuligo.rollout.rewards.rules import Services, find_rule
from fuligo.rollout.rewards.symbolic import SymbolicComparison
from fuligo.rollout.rewards.worker_pool import NoVerdictError, WorkerPool
from fuligo.types import MAIN_REWARD, Sample, SampleGroup, SampleStatus, Span


@dataclass(slots=True, frozen=True)
class ExtraReward:
    """Additional reward (`--extra-rm-path`), added to the reward of a sample."""

    name: str
    """Name of the function; the sample's metric is `reward_<name>`."""
    function: CustomReward
    weight: float


class RewardRunner:
    """Implementation of `RewardFn`; groups may be judged concurrently.

    Samples that are unfinished, failed, or already have a reward (from an environment, an agent or a custom generate function) are not
    judged. An existing reward is checked like any other, and extra rewards are added to it.
    """

    def __init__(
        self, flags: RewardFlags, custom: CustomReward | None = None, extra: Sequence[ExtraReward] = (), *, optional: bool = False
    ) -> None:
        """Check the flags and prepare the services; nothing starts before the first sample.

        `custom` is the function of `--custom-rm-path`. With `optional`, samples without a reward type get the reward 0, because they are
        trained on a teacher's log-probabilities (--use-opd). Raises ConfigError like `check_reward`.
        """
        if custom is None:
            check_reward(flags)
        self._flags = flags
        self._optional = optional
        self._custom = custom
        self._extra = extra
        judges = ("symbolic_judge.py", "instructions.py")
        self._pools = symbolic, instructions = [WorkerPool(judge, flags.rm_num_workers, flags.rm_timeout_s) for judge in judges]
        remote = RemoteReward(flags.rm_url, timeout_s=flags.rm_timeout_s, retries=flags.rm_retries)
        self._services = Services(SymbolicComparison(symbolic), instructions, remote)

    async def __call__(self, group: SampleGroup) -> None:
        judged = [sample for sample in group.samples if sample.finished and sample.status is not SampleStatus.FAILED]
        if self._flags.group_rm:
            await self._judge_together([sample for sample in judged if sample.reward is None])
            judged = [sample for sample in judged if sample.status is not SampleStatus.FAILED]
        await asyncio.gather(*(self._judge(sample) for sample in judged))

    async def close(self) -> None:
        """Stop the worker processes and close the connections."""
        await self._services.remote.close()
        for pool in self._pools:
            await pool.close()

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def _judge(self, sample: Sample) -> None:
        start_s = time.time()
        try:
            reward = await self._reward(sample) if sample.reward is None else sample.reward
            sample.reward = self._checked(reward)
            if self._extra:
                await self._add_extra(sample, sample.reward)
            if (problem := metrics_problem(sample.metrics)) is not None:
                raise RewardError(problem)
        except NoVerdictError as error:
            sample.reward, sample.judge_error = 0.0, str(error)
        except RewardError as error:
            _fail(sample, error)
        if not self._flags.group_rm:
            sample.spans.append(Span("reward", start_s, time.time()))

    async def _reward(self, sample: Sample) -> Any:
        if self._custom is not None:
            return await self._custom(sample)
        name = sample.metadata.get("rm_type") or self._flags.rm_type
        if name is None and self._optional:
            return 0.0
        if name is None:
            raise RewardError('no reward is configured for the sample; set --rm-type, --custom-rm-path or metadata["rm_type"]')
        try:
            rule = find_rule(name, 'metadata["rm_type"]')  # --rm-type was checked at the start
        except ConfigError as error:
            raise RewardError(str(error)) from error
        return await rule.judge(rule.extract(sample.response), sample, self._services)

    async def _add_extra(self, sample: Sample, reward: float | dict[str, Any]) -> None:
        """Add the weighted extra rewards to the reward, and record the reward and each extra one as metrics of the sample."""
        parts = await asyncio.gather(*(extra.function(sample) for extra in self._extra))
        key = self._flags.reward_key
        total = main = reward_number(reward, key)
        sample.metrics[MAIN_REWARD] = main
        for extra, part in zip(self._extra, parts, strict=True):
            value = finite(part, f"the reward of {extra.name}")
            sample.metrics[f"reward_{extra.name}"] = value
            total += extra.weight * value
        sample.reward = {**reward, str(key): total} if isinstance(reward, dict) else total

    async def _judge_together(self, samples: list[Sample]) -> None:
        assert self._custom is not None
        if not samples:
            return
        start_s = time.time()
        try:
            rewards = await self._custom(samples)
            if not isinstance(rewards, list | tuple) or len(rewards) != len(samples):
                given = count(len(rewards), "reward") if isinstance(rewards, list | tuple) else f"{rewards!r:.80}"
                raise RewardError(f"{self._custom.name} must return a list of {count(len(samples), 'reward')}, not {given}")
            for sample, reward in zip(samples, rewards, strict=True):
                sample.reward = reward
        except RewardError as failure:
            for sample in samples:
                _fail(sample, failure)
        end_s = time.time()
        for sample in samples:
            sample.spans.append(Span("reward", start_s, end_s))

    def _checked(self, reward: Any) -> float | dict[str, Any]:
        if not isinstance(reward, dict):
            return finite(reward, "the reward")
        for name, part in reward.items():
            if isinstance(part, int) and not is_finite(part):  # metrics average all numbers
                raise RewardError(f"the reward's {name!r:.80} is an integer too large for a float")
        key = self._flags.reward_key
        if key is not None and key in reward:
            return {**reward, key: finite(reward[key], f"the reward's {key!r}")}
        if key is None and self._flags.custom_reward_post_process_path is not None:
            return reward
        raise RewardError(f"the reward is a dict with the keys {', '.join(map(str, reward))}; --reward-key ({key}) must name one of them")


def _fail(sample: Sample, failure: RewardError) -> None:
    sample.status, sample.error, sample.reward = SampleStatus.FAILED, f"reward: {failure}", None


def reward_number(reward: float | dict[str, Any], key: str | None) -> float:
    """Return the number to which extra rewards are added. Raises RewardError if the reward is a dict and `key` is None."""
    if not isinstance(reward, dict):
        return reward
    if key is None:
        raise RewardError("--extra-rm-path adds to a number, but the reward is a dict; name its value with --reward-key")
    return reward[key]


def finite(value: Any, what: str) -> float:
    """Return `value` as a float; NumPy numbers and 0-d tensors are accepted. Raises RewardError if it is not a finite number."""
    try:
        number = float(value) if isinstance(value, Real) or hasattr(value, "item") else math.nan
    except (TypeError, ValueError, OverflowError, RuntimeError):
        number = math.nan
    if not math.isfinite(number):
        raise RewardError(f"{what} must be a finite number, not {value!r:.80}")
    return number
