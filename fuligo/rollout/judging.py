"""Outcomes of finished groups: why one is dropped, and when so many fail that the run must end."""

from __future__ import annotations

import re
from collections import Counter, deque
from collections.abc import Iterable

from fuligo.errors import RolloutError
from fuligo.rollout.protocol import GroupFilter
from fuligo.types import Sample, SampleGroup, SampleStatus

MIN_EVIDENCE = 32
"""Groups; failures among fewer are never taken for a broken engine or reward."""
MASS_FAILURE_SHARE = 0.95
"""Share of the last groups that must fail for the run to end. Samples that fail at random stay far below it."""

# Why a group is not trained on, beside a filter's own reasons: `SampleGroup.drop_reason`.
TOO_FEW_USABLE = "too_few_usable_samples"
"""Fewer than two samples are left to compare; of a single one asked for, none."""
SURPLUS = "surplus"
"""It was finished when the rollout was full."""
ABORTED = "aborted"
"""It was unfinished when the rollout was full."""
STALE = "stale"
"""It has a token older than --max-staleness allows."""

NO_ROOM = (
    "the prompt fills --rollout-max-context-len and leaves no room for a token: raise it, or bound prompts by --rollout-max-prompt-len"
)
_OF_ONE_REQUEST = re.compile(r"request \S+: ")
"""What tells one request's error from another's of the same cause."""


def judged(samples: Iterable[Sample], *, rewarded: bool = True) -> list[Sample]:
    """Samples that are finished and not failed.

    Args:
        rewarded: and have a reward.
    """
    answered = [sample for sample in samples if sample.status in (SampleStatus.COMPLETED, SampleStatus.TRUNCATED)]
    return [sample for sample in answered if sample.reward is not None] if rewarded else answered


def usable(samples: Iterable[Sample], *, rewarded: bool = True) -> list[Sample]:
    """Samples to learn from: judged, with at least one token (a prompt that fills the context leaves room for none)."""
    return [sample for sample in judged(samples, rewarded=rewarded) if sample.response_length]


def drop_reason(group: SampleGroup, num_samples: int, group_filter: GroupFilter | None) -> str | None:
    """Why a finished group is not trained on; None keeps it. Samples split from one rollout count once.

    Args:
        num_samples: `--n-samples-per-prompt`
        group_filter: sees usable samples only
    """
    samples = usable(group.samples)
    if len({sample.index for sample in samples}) < min(2, num_samples):
        return TOO_FEW_USABLE
    return group_filter(samples) if group_filter is not None else None


class FailureWatch:
    """Outcomes of the groups that finished last; ends a run in which nearly all of them fail, which would only use up the data.

    Args:
        batch_size: groups of a rollout. The watch looks at as many, and at no fewer than `MIN_EVIDENCE`.
    """

    def __init__(self, batch_size: int) -> None:
        self._num_needed = max(batch_size, MIN_EVIDENCE)
        self._last: deque[Counter[str] | None] = deque(maxlen=self._num_needed)
        """Errors of each group that failed, None for each that did not."""

    def add(self, step: int, group: SampleGroup, reason: str | None) -> None:
        """Record a finished group.

        Args:
            reason: its `drop_reason`; a group fails with `TOO_FEW_USABLE`, and not where a filter drops it

        Raises:
            RolloutError: nearly all of the last groups failed; names the most frequent errors.
        """
        self._last.append(_errors_of_failed(group) if reason == TOO_FEW_USABLE else None)
        if len(self._last) == self._num_needed:
            self.refuse_mass_failure(step)

    def refuse_mass_failure(self, step: int) -> None:
        """Look at the groups recorded so far, however few; where sampling is about to end for another reason, this is the better one.

        Raises:
            RolloutError: nearly all of them failed.
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
    """What is said of a rollout some samples of which failed."""
    samples = [sample for group in groups for sample in group.samples]
    errors = _errors(samples)
    if not errors:
        return None
    return (
        f"rollout {step}: {errors.total()} of {len(samples)} samples failed and are not trained on; most frequent errors: "
        f"{_most_frequent(errors)}"
    )


def _errors(samples: Iterable[Sample]) -> Counter[str]:
    return Counter(_OF_ONE_REQUEST.sub("", sample.error or "") for sample in samples if sample.status is SampleStatus.FAILED)


def _most_frequent(errors: Counter[str]) -> str:
    return "; ".join(f"{count} x {error}" for error, count in errors.most_common(3) if count)
