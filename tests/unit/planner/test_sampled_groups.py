"""Groups that a rollout samples: expected numbers against `DynamicSampling` with random lengths and a random filter."""

import heapq
import random
from dataclasses import astuple, dataclass, replace

import pytest

from fuligo.planner.layout import make_layout
from fuligo.planner.roofline import assumptions
from fuligo.planner.sampled_groups import SampledGroups, sampled_groups
from fuligo.planner.subject import Assumed, Subject
from fuligo.rollout.dynamic_sampling import DynamicSampling
from tests.unit.planner.subjects import subject_of

FILTER = "--dynamic-sampling-filter-path filters.keep"


@dataclass(frozen=True, slots=True)
class Case:
    """Groups to keep, groups of a wave, share that the filter keeps, samples of a group."""

    target: int
    wave: int
    kept: float
    num_samples: int
    order: str = "first-finished"

    def subject(self, flags: str = "") -> Subject:
        sizes = f"--rollout-batch-size {self.target} --over-sampling-batch-size {self.wave} --n-samples-per-prompt {self.num_samples}"
        found = subject_of(f"{sizes} {FILTER} --sampling-order {self.order} {flags}", "qwen3-4b")
        return replace(found, assumed=Assumed(kept_share=self.kept))


CASES = [
    Case(64, 96, 0.5, 16),
    Case(64, 64, 0.5, 16),
    Case(32, 48, 0.5, 8),
    Case(64, 96, 1.0, 8),
    Case(32, 64, 0.5, 8),
    Case(32, 64, 0.3, 8),
    Case(64, 80, 0.7, 4),
    Case(32, 32, 0.9, 8),
    Case(64, 96, 1.0, 8, "submission"),
    Case(32, 64, 0.3, 8, "submission"),
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_groups_and_time_are_those_of_the_rollouts_own_bookkeeping(case: Case) -> None:
    planned, measured = sampled_groups(case.subject()), simulated(case, num_rollouts=100)
    assert astuple(planned) == pytest.approx(astuple(measured), rel=0.15)


def test_without_filter_and_over_sampling_nothing_is_sampled_in_vain() -> None:
    found = subject_of("--rollout-batch-size 32", "qwen3-4b")
    assert sampled_groups(found) == SampledGroups(1.0, 32, 32, 32, 32, 1.0)


def test_continued_groups_are_decoded_once() -> None:
    case = Case(32, 48, 0.5, 8)
    restarted, continued = (sampled_groups(case.subject(flags)) for flags in ("", "--partial-rollout"))
    assert continued == replace(restarted, decoded=64.0) and restarted.decoded > 90


def test_continuous_sampling_has_no_waves() -> None:
    flags = "--async-mode full --max-staleness 2 --actor-num-gpus-per-node 1 --rollout-num-gpus 1"
    assert sampled_groups(Case(32, 48, 0.5, 8).subject(flags)) == SampledGroups(1.0, 64, 64, 64, 64, 1.0)


def test_no_more_groups_finish_than_the_last_wave_starts() -> None:
    """After it, the run ends."""
    flags = "--async-mode full --max-staleness 2 --actor-num-gpus-per-node 1 --rollout-num-gpus 1"
    hopeless = Case(32, 48, 1e-300, 8)
    waves, continuous = sampled_groups(hopeless.subject("--max-sampling-waves 3")), sampled_groups(hopeless.subject(flags))
    assert (waves.started, waves.finished, waves.unfilled) == (144, 144, 1.0)
    assert (continuous.started, continuous.finished, continuous.unfilled) == (101 * 32, 101 * 32, 1.0)
    few = sampled_groups(Case(32, 48, 0.5, 8).subject("--max-sampling-waves 1"))
    assert few.finished == few.started == 48 and 0.98 < few.unfilled < 1
    assert sampled_groups(Case(32, 48, 0.5, 8).subject()).unfilled == 0


def test_the_plan_states_how_often_the_last_wave_is_not_enough() -> None:
    subject = Case(32, 48, 0.004, 8).subject("--max-sampling-waves 4")
    stated = " ".join(assumptions(subject, make_layout(subject)))
    assert "keeps 0.4% of the groups (--kept-share): a rollout starts 192 groups, of which 192 finish, to keep 32" in stated
    assert "; with probability 100%, --max-sampling-waves ends the run before that." in stated


def test_the_plan_states_the_share_that_it_assumes() -> None:
    subject = Case(64, 96, 0.5, 16).subject()
    plain = subject_of("--rollout-batch-size 64 --over-sampling-batch-size 96", "qwen3-4b")
    stated, of_plain = (" ".join(assumptions(each, make_layout(each))) for each in (subject, plain))
    assert "keeps 50% of the groups (--kept-share): a rollout starts 192 groups, of which 128 finish, to keep 64." in stated
    assert "With --over-sampling-batch-size 96, a rollout starts 96 groups, of which 64 finish, to keep 64." in of_plain


def simulated(case: Case, num_rollouts: int) -> SampledGroups:
    """Return the means over rollouts whose responses have uniform lengths up to 1 and all run at once."""
    rng, total = random.Random(0), [0.0] * 5
    for _ in range(num_rollouts):
        sampling = DynamicSampling(case.target, case.wave, 100, in_submission_order=case.order == "submission")
        now, running, started = 0.0, list[tuple[float, int]](), list[tuple[float, list[float]]]()
        while not sampling.complete:
            if sampling.needs_wave:
                sampling.begin_wave()
                indices = range(len(started), len(started) + case.wave)
                sampling.submit(indices)
                for index in indices:
                    lengths = [rng.random() for _ in range(case.num_samples)]
                    started.append((now, lengths))
                    heapq.heappush(running, (now + max(lengths), index))
            now, index = heapq.heappop(running)
            sampling.finish(index, None if rng.random() < case.kept else "dropped")
        decoded = sum(min(length, now - start) for start, lengths in started for length in lengths) / (0.5 * case.num_samples)
        num_finished = sampling.num_kept + len(sampling.dropped)
        of_rollout = (sampling.num_waves, sampling.num_submitted, num_finished, decoded, now)
        total = [sum_ + value for sum_, value in zip(total, of_rollout, strict=True)]
    waves, submitted, finished, decoded, duration = (value / num_rollouts for value in total)
    return SampledGroups(waves, case.wave, submitted, finished, decoded, duration)
