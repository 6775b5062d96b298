"""Dynamic sampling: groups that the filter keeps, and the waves that a rollout may take."""

from collections.abc import Iterator

from fuligo.config.findings import Severity
from fuligo.config.rules.rule import set_flag
from fuligo.planner.rules.rule import Violation, rule
from fuligo.planner.sampled_groups import LIKELY, has_filter, sampled_groups
from fuligo.planner.subject import Subject

_DOUBLINGS = range(1, 8)
"""Exponents of the powers of two by which the number of waves is multiplied to find one that is enough."""


@rule("PLAN-SAMPLING-WAVES", "--max-sampling-waves", "--dynamic-sampling-filter-path", severity=Severity.WARNING)
def waves_fill_a_rollout(subject: Subject) -> Iterator[Violation]:
    """A rollout that is not full after the last wave ends the run."""
    config = subject.config
    if not config.needs_engine or config.is_sft or not has_filter(config):
        return
    unfilled = sampled_groups(subject).unfilled
    if unfilled < LIKELY:
        return
    waves = config.rollout.max_sampling_waves
    yield Violation(
        f"--max-sampling-waves {waves}: a rollout ends the run with probability {unfilled:.0%}, because fewer than --rollout-batch-size "
        f"{config.rollout.rollout_batch_size} groups pass the filter, if it keeps {100 * subject.assumed.kept_share:.3g}% of them "
        "(fuligo plan --kept-share)",
        tuple((set_flag("max_sampling_waves", waves << doubling),) for doubling in _DOUBLINGS),
        "or start more prompts per wave (--over-sampling-batch-size)",
        flags=("--max-sampling-waves",),
    )
