"""Filters of groups and samples: the built-in ones, and adapters that call the user's.

A user's filter that raises ends the run, because no single sample is to blame.
"""

from collections.abc import Callable
from typing import Any

import numpy as np

from fuligo.config.hooks import Hook, reraised
from fuligo.errors import RolloutError
from fuligo.quantities import count
from fuligo.rollout.protocol import BufferFilter, GroupFilter
from fuligo.rollout.sampler import malformation
from fuligo.types import Sample, SampleGroup

MIN_REWARD_STD = 1e-6
AllSamples = Callable[[list[SampleGroup], Any], None]
"""Hook `(all groups of a rollout, data source) -> None`."""
SampleFilter = Callable[[list[SampleGroup]], None]
"""Hook that changes the samples of the kept groups in place."""


def check_reward_nonzero_std(args: Any, samples: list[Sample], **kwargs: Any) -> bool:
    """Keep a group whose rewards differ (`--dynamic-sampling-filter-path`).

    If all rewards are equal, group-relative advantages are zero and nothing is learned. The unbiased standard deviation of the
    `--reward-key` values, in float64, must exceed 1e-6; for a single sample it is 0.
    """
    return reward_std(samples, args.reward_key) > MIN_REWARD_STD


def pop_first(args: Any, rollout_id: int, buffer: list[list[Sample]], num_samples: int) -> list[list[Sample]]:
    """Continue the unfinished groups that have waited longest, at most `num_samples` groups (`--buffer-filter-path`)."""
    taken = buffer[:num_samples]
    del buffer[:num_samples]
    return taken


def reward_std(samples: list[Sample], reward_key: str | None) -> float:
    """Return the unbiased standard deviation of the rewards in float64; 0 for fewer than two samples."""
    if len(samples) < 2:
        return 0.0
    return float(np.std([sample.reward_value(reward_key) for sample in samples], ddof=1, dtype=np.float64))


def group_filter(hook: Hook, args: Any) -> GroupFilter:
    """Adapt `--dynamic-sampling-filter-path`: `f(args, samples, **kwargs) -> bool | (keep, reason)`.

    Anything that `bool()` accepts, except None, is a verdict (a 0-d tensor, for instance). The default reason for a drop is the function's
    name.
    """
    name = getattr(hook, "__name__", type(hook).__name__)

    def judge(samples: list[Sample]) -> str | None:
        with reraised(f"--dynamic-sampling-filter-path: the function raised on group {samples[0].group_index}:", hook):
            verdict = hook(args, samples)
            keep, reason = verdict if isinstance(verdict, tuple) else (verdict, name)
            drop_reason = None if bool(keep) else str(reason or name)
        if keep is None:
            raise RolloutError(f"--dynamic-sampling-filter-path: {name} returned None; return True to keep the group, False to drop it")
        return drop_reason

    return judge


def buffer_filter(hook: Hook, args: Any) -> BufferFilter:
    """Adapt `--buffer-filter-path`: `f(args, rollout_id, buffer, num_samples)`, where `num_samples` counts groups."""

    def choose(rollout_id: int, buffer: list[list[Sample]], num_groups: int) -> list[list[Sample]]:
        with reraised(f"--buffer-filter-path: the function raised on rollout {rollout_id}:", hook):
            return list(hook(args, rollout_id, buffer, num_groups))

    return choose


def sample_filter(hook: Hook, args: Any) -> SampleFilter:
    """Adapt `--rollout-sample-filter-path`: `f(args, groups: list[list[Sample]]) -> None` changes samples in place (loss masks, say)."""

    def apply(groups: list[SampleGroup]) -> None:
        samples = [group.samples for group in groups]
        sizes = list(map(len, samples))
        with reraised(f"--rollout-sample-filter-path: the function raised on {count(len(groups), 'group')}:", hook):
            result = hook(args, samples)
        if result is not None or list(map(len, samples)) != sizes:
            raise RolloutError(
                "--rollout-sample-filter-path: the function must change samples in place and return None, and must not add or remove "
                "groups or samples; to keep a sample out of the loss, set its loss_mask to zeros"
            )
        _check_changed("--rollout-sample-filter-path", groups)

    return apply


def all_samples(hook: Hook, args: Any) -> AllSamples:
    """Adapt `--rollout-all-samples-process-path`: `f(args, groups: list[list[Sample]], data_source) -> None`, dropped groups included."""

    def process(groups: list[SampleGroup], data_source: Any) -> None:
        with reraised(f"--rollout-all-samples-process-path: the function raised on {count(len(groups), 'group')}:", hook):
            hook(args, [group.samples for group in groups], data_source)
        _check_changed("--rollout-all-samples-process-path", [group for group in groups if group.kept])

    return process


def _check_changed(flag: str, groups: list[SampleGroup]) -> None:
    """Raise RolloutError if a function left a sample malformed."""
    for sample in (sample for group in groups for sample in group.samples):
        if (problem := malformation(sample)) is not None:
            raise RolloutError(f"{flag}: the function left sample {sample.index} with a {problem}")
