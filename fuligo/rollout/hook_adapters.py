"""The user's filters as what the runner and the source call. A filter that raises ends the run: there is no sample to blame."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from fuligo.config.hooks import Hook, describe_exception
from fuligo.errors import HookError, RolloutError
from fuligo.rollout.protocol import BufferFilter, GroupFilter
from fuligo.rollout.sampler import malformation
from fuligo.types import Sample, SampleGroup


def group_filter(hook: Hook, args: Any) -> GroupFilter:
    """`--dynamic-sampling-filter-path`: `f(args, samples, **kwargs) -> bool | (keep, reason)`.

    Whatever `bool()` takes will do (a 0-d tensor, say). The reason for a drop without one is the function's name.
    """
    name = getattr(hook, "__name__", type(hook).__name__)
    _refuse_async(hook, "--dynamic-sampling-filter-path")

    def judge(samples: list[Sample]) -> str | None:
        try:
            verdict = hook(args, samples)
            keep, reason = verdict if isinstance(verdict, tuple) else (verdict, name)
            dropped_for = None if bool(keep) else str(reason or name)
        except Exception as error:
            raise _failure("--dynamic-sampling-filter-path", f"group {samples[0].group_index}", error, hook) from error
        if keep is None:
            raise RolloutError(f"--dynamic-sampling-filter-path: {name} returned None; return True to keep the group, False to drop it")
        return dropped_for

    return judge


def buffer_filter(hook: Hook, args: Any) -> BufferFilter:
    """`--buffer-filter-path`: `f(args, rollout_id, buffer, num_samples)`, where `num_samples` counts groups."""
    _refuse_async(hook, "--buffer-filter-path")

    def choose(rollout_id: int, buffer: list[list[Sample]], num_groups: int) -> list[list[Sample]]:
        try:
            return list(hook(args, rollout_id, buffer, num_groups))
        except Exception as error:
            raise _failure("--buffer-filter-path", f"rollout {rollout_id}", error, hook) from error

    return choose


def sample_filter(hook: Hook, args: Any) -> Callable[[list[SampleGroup]], None]:
    """`--rollout-sample-filter-path`: `f(args, groups: list[list[Sample]]) -> None` changes samples in place (their loss mask, say)."""
    _refuse_async(hook, "--rollout-sample-filter-path")

    def see(groups: list[SampleGroup]) -> None:
        shown = [group.samples for group in groups]
        before = list(map(len, shown))
        try:
            result = hook(args, shown)
        except Exception as error:
            raise _failure("--rollout-sample-filter-path", f"{len(groups)} groups", error, hook) from error
        if result is not None or list(map(len, shown)) != before:
            raise RolloutError(
                "--rollout-sample-filter-path: the function must change samples in place (a loss_mask of zeros keeps a sample out of "
                "the loss) and return None; the number of groups and of their samples is fixed"
            )
        for sample in (sample for samples in shown for sample in samples):
            if (problem := malformation(sample)) is not None:
                raise RolloutError(f"--rollout-sample-filter-path left sample {sample.index} with a {problem}")

    return see


def _refuse_async(hook: Hook, flag: str) -> None:
    if inspect.iscoroutinefunction(hook):
        raise HookError(f"{flag}: {hook.__qualname__} must be a plain function, not async")


def _failure(flag: str, place: str, error: Exception, hook: Hook) -> RolloutError:
    return RolloutError(f"{flag}: on {place} it raised {describe_exception(error, hook)}")
