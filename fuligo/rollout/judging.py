"""What becomes of a finished group, and when so much goes wrong that sampling must end."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable

from fuligo.errors import RolloutError
from fuligo.rollout.protocol import GroupFilter
from fuligo.types import Sample, SampleGroup, SampleStatus

MIN_MASS_FAILURE = 8
"""Groups; fewer failures in one rollout are never taken for a broken engine or reward."""

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


def refuse_mass_failure(step: int, num_failed: int, batch_size: int, groups: Iterable[SampleGroup]) -> None:
    """As many failed groups as the rollout needs (and more than a few): something is broken, and going on would use up the data.

    Args:
        num_failed: groups that were dropped as `TOO_FEW_USABLE`
        batch_size: groups that the rollout needs
        groups: where the errors stand

    Raises:
        RolloutError: with the most frequent errors.
    """
    if num_failed < max(batch_size, MIN_MASS_FAILURE):
        return
    samples = [sample for group in groups for sample in group.samples]
    errors = _errors(samples)
    errors[NO_ROOM] = sum(sample.status is SampleStatus.TRUNCATED and not sample.response_length for sample in samples)
    raise RolloutError(
        f"rollout {step}: {num_failed} groups have too few usable samples; most frequent errors: "
        f"{_most_frequent(errors) or 'no reward was set'}"
    )


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
