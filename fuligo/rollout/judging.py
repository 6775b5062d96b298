"""Outcomes of finished groups: why one is dropped, and whether so many fail that the run must end."""

import re
from collections import Counter, deque
from collections.abc import Collection, Iterable

from fuligo.errors import RolloutError
from fuligo.rollout.protocol import GroupFilter
from fuligo.types import Sample, SampleGroup, SampleStatus

MIN_EVIDENCE = 32
"""Smallest number of groups whose failures show that an engine or reward is broken."""
MASS_FAILURE_SHARE = 0.95
"""Share of the last groups that must fail for the run to end; samples that fail at random stay far below it."""

# Values of `SampleGroup.drop_reason` that do not come from a filter.
TOO_FEW_USABLE = "too_few_usable_samples"
"""Fewer than two usable samples to compare; or none with --n-samples-per-prompt 1."""
SURPLUS = "surplus"
"""Finished, but the rollout was already full."""
ABORTED = "aborted"
"""Unfinished when the rollout was full."""
STALE = "stale"
"""Contains a token older than --max-staleness allows."""

NO_ROOM = (
    "the prompt fills --rollout-max-context-len and leaves no room for a token; raise --rollout-max-context-len, or limit prompts with "
    "--rollout-max-prompt-len"
)
_REQUEST_ID = re.compile(r"request \S+: ")
"""Part of an error that differs between requests with the same cause."""


def judged(samples: Iterable[Sample], *, rewarded: bool = True) -> list[Sample]:
    """Return the samples that finished and did not fail. `rewarded`: only those with a reward."""
    answered = [sample for sample in samples if sample.status in (SampleStatus.COMPLETED, SampleStatus.TRUNCATED)]
    return [sample for sample in answered if sample.reward is not None] if rewarded else answered


def usable(samples: Iterable[Sample], *, rewarded: bool = True) -> list[Sample]:
    """Return the judged samples with at least one token (a prompt that fills the context leaves room for none)."""
    return [sample for sample in judged(samples, rewarded=rewarded) if sample.response_length]


def drop_reason(group: SampleGroup, num_samples: int, group_filter: GroupFilter | None) -> str | None:
    """Return why a finished group is dropped, or None. Samples split from one response count once; filters see only usable ones."""
    samples = usable(group.samples)
    if len({sample.index for sample in samples}) < min(2, num_samples):
        return TOO_FEW_USABLE
    return group_filter(samples) if group_filter is not None else None


def explain_drops(groups: Collection[SampleGroup], reward_key: str | None) -> str:
    """Return sentences for the end of the `too_many_dropped` error: equal rewards of the dropped groups, and errors of failed samples."""
    alike = equal_rewards(groups, reward_key)
    errors = _errors(sample for group in groups for sample in group.samples)
    return (f" Dropped groups: {alike}." if alike else "") + (f" Most frequent errors: {_most_frequent(errors)}." if errors else "")


def equal_rewards(groups: Iterable[SampleGroup], reward_key: str | None) -> str:
    """Describe the groups with equal rewards (`38 with every reward 0, 2 with every reward 1`); return "" if there are none."""
    values = [{sample.reward_value(reward_key) for sample in usable(group.samples)} for group in groups]
    alike = Counter(of_group.pop() for of_group in values if len(of_group) == 1)
    return ", ".join(f"{count} with every reward {value:g}" for value, count in alike.most_common(3))


class FailureWatch:
    """Guard that ends the run if nearly all of the last `max(batch_size, MIN_EVIDENCE)` groups failed, before the data is used up."""

    def __init__(self, batch_size: int) -> None:
        self._num_needed = max(batch_size, MIN_EVIDENCE)
        self._last: deque[Counter[str] | None] = deque(maxlen=self._num_needed)
        """Errors of each failed group; None for each other group."""

    def add(self, step: int, group: SampleGroup, reason: str | None) -> None:
        """Record a finished group. Raises RolloutError if nearly all of the last groups failed, with the most frequent errors.

        `reason` is the group's `drop_reason`; only `TOO_FEW_USABLE` counts as a failure, a filter's drop does not.
        """
        self._last.append(_errors_of_failed(group) if reason == TOO_FEW_USABLE else None)
        if len(self._last) == self._num_needed:
            self.refuse_mass_failure(step)

    def refuse_mass_failure(self, step: int) -> None:
        """Raise RolloutError if nearly all of the groups recorded so far failed, even if they are few.

        Call it before raising another error of sampling, because failed samples are the more likely cause.
        """
        failed = [errors for errors in self._last if errors is not None]
        if not failed or len(failed) < MASS_FAILURE_SHARE * len(self._last):
            return
        raise RolloutError(
            f"rollout {step}: {len(failed)} of the last {len(self._last)} groups have too few usable samples; most frequent errors: "
            f"{_most_frequent(sum(failed, Counter())) or 'no reward was set'}"
        )


def _errors_of_failed(group: SampleGroup) -> Counter[str]:
    errors = _errors(group.samples)
    errors[NO_ROOM] = sum(sample.status is SampleStatus.TRUNCATED and not sample.response_length for sample in group.samples)
    return errors


def failure_warning(step: int, groups: Iterable[SampleGroup]) -> str | None:
    """Return a warning about the failed samples of a rollout; None if none failed."""
    samples = [sample for group in groups for sample in group.samples]
    errors = _errors(samples)
    if not errors:
        return None
    return (
        f"rollout {step}: {errors.total()} of {len(samples)} samples failed and will not be trained on; most frequent errors: "
        f"{_most_frequent(errors)}"
    )


def _errors(samples: Iterable[Sample]) -> Counter[str]:
    return Counter(_REQUEST_ID.sub("", sample.error or "") for sample in samples if sample.status is SampleStatus.FAILED)


def _most_frequent(errors: Counter[str]) -> str:
    return "; ".join(f"{count} x {error}" for error, count in errors.most_common(3) if count)
