"""Rollouts with scripted response lengths: waves, and kept, dropped, surplus and aborted groups."""

import logging
import re
from dataclasses import dataclass, field

import pytest

from fuligo.errors import RolloutError
from fuligo.rollout.protocol import Rollout, UnfilledRolloutError
from fuligo.rollout.source import DataSource
from fuligo.types import SampleGroup, SampleStatus
from tests.unit.rollout.scripted import Rows, ScriptedEngine, ScriptedReward, by_row, drop_rows, rows_where, samples_of, world


@dataclass
class Scenario:
    """Case of a rollout of two groups, with the expected outcome by row."""

    name: str
    wave: int
    lengths: dict[int, int]
    kept: list[int]
    waves: int = 1
    filtered: list[int] = field(default_factory=list)
    dropped: list[int] = field(default_factory=list)
    surplus: list[int] = field(default_factory=list)
    aborted: list[int] = field(default_factory=list)
    in_order: bool = False


SCENARIOS = [
    Scenario("as many as needed", wave=2, lengths={0: 30, 1: 10}, kept=[0, 1]),
    Scenario("the first to finish fill it", wave=4, lengths={0: 50, 1: 300, 2: 20, 3: 400}, kept=[0, 2], aborted=[1, 3]),
    Scenario("both finish in one tick: the third is surplus", wave=3, lengths={0: 20, 1: 20, 2: 20}, kept=[0, 1], surplus=[2]),
    Scenario(
        "a drop that the rest of the wave makes up for", wave=4, lengths={0: 10, 1: 50, 2: 100, 3: 300},
        filtered=[0], kept=[1, 2], dropped=[0], aborted=[3],
    ),
    Scenario(
        "submitted - dropped is just enough: no wave", wave=3, lengths={0: 10, 1: 50, 2: 100},
        filtered=[0], kept=[1, 2], dropped=[0],
    ),
    Scenario(
        "one drop too many: a wave begins while others are in flight", wave=2, lengths={0: 10, 1: 300, 2: 20, 3: 500},
        filtered=[0], waves=2, kept=[1, 2], dropped=[0], aborted=[3],
    ),
    Scenario(
        "drops wave after wave", wave=2, lengths={5: 300}, filtered=[0, 1, 2], waves=3, kept=[3, 4], dropped=[0, 1, 2], aborted=[5],
    ),
    Scenario("submission order waits for the slow", wave=3, lengths={0: 200, 1: 10, 2: 20}, kept=[0, 1], surplus=[2], in_order=True),
    Scenario(
        "submission order passes over the dropped", wave=4, lengths={0: 100, 1: 10, 2: 20, 3: 400},
        filtered=[1], kept=[0, 2], dropped=[1], aborted=[3], in_order=True,
    ),
]  # fmt: skip


@pytest.mark.parametrize("scenario", SCENARIOS, ids=lambda scenario: scenario.name)
async def test_a_rollout_keeps_drops_discards_and_aborts(scenario: Scenario):
    given = world(
        engine=ScriptedEngine(by_row(scenario.lengths)),
        group_filter=drop_rows(*scenario.filtered),
        over_sampling_batch_size=scenario.wave,
        sampling_order="submission" if scenario.in_order else "first-finished",
    )

    rollout = await given.runner.rollout(0)

    assert [group.row for group in rollout.kept] == scenario.kept
    assert rows_where(rollout.groups, "unwanted") == scenario.dropped
    assert rows_where(rollout.groups, "surplus") == scenario.surplus
    assert rows_where(rollout.groups, "aborted") == scenario.aborted
    assert [group.index for group in rollout.groups] == sorted(group.index for group in rollout.groups)
    assert_metrics(rollout, scenario)
    assert given.engine.num_running == 0, "nothing generates after the rollout"
    assert given.rows.returned == scenario.aborted, "an aborted prompt returns to the order"


def assert_metrics(rollout: Rollout, scenario: Scenario) -> None:
    metrics = rollout.metrics
    assert metrics["rollout/num_waves"] == scenario.waves
    assert metrics["rollout/num_groups_kept"] == len(scenario.kept)
    assert metrics["rollout/num_groups_dropped"] == len(scenario.dropped)
    assert metrics["rollout/num_groups_surplus"] == len(scenario.surplus)
    assert metrics["rollout/num_groups_aborted"] == len(scenario.aborted)
    assert metrics.get("rollout/dropped/unwanted", 0) == len(scenario.dropped)


async def test_aborted_prompts_are_drawn_first_next_time_as_new_samples():
    given = world(engine=ScriptedEngine(by_row({1: 300, 3: 400})), over_sampling_batch_size=4)
    await given.runner.rollout(0)
    given.engine.lengths = by_row({})
    second = await given.runner.rollout(1)
    assert [group.row for group in second.groups] == [1, 3, 4, 5]
    assert [sample.index for sample in samples_of(second.groups)] == list(range(8, 16))
    assert all(sample.versions.size == sample.response_length for sample in samples_of(second.kept))


async def test_samples_and_groups_are_numbered_over_the_whole_run():
    given = world()
    rollouts = [await given.runner.rollout(step) for step in range(3)]
    groups = [group for rollout in rollouts for group in rollout.groups]
    assert [group.index for group in groups] == list(range(6))
    assert [sample.index for sample in samples_of(groups)] == list(range(12))
    assert [sample.metadata["start_rollout_id"] for sample in samples_of(groups)] == [step for step in range(3) for _ in range(4)]


async def test_metrics_are_of_the_kept_groups():
    given = world(engine=ScriptedEngine(by_row({0: 10, 1: 4, 2: 500})), over_sampling_batch_size=3, rollout_max_response_len=8)
    metrics = (await given.runner.rollout(0)).metrics
    assert metrics["rollout/response_len_mean"] == 6.0, "8, cut off, and 4"
    assert metrics["rollout/response_len_max"] == 8
    assert metrics["rollout/truncated_ratio"] == 0.5
    assert metrics["rollout/prompt_len_mean"] == 1
    assert metrics["rollout/reward_mean"] == 0.5
    assert metrics["rollout/reward_std"] == 0.5
    assert metrics["rollout/zero_std_ratio"] == 0


async def test_no_more_requests_are_in_flight_than_allowed():
    given = world(rollout_batch_size=8, rollout_concurrency=3)
    rollout = await given.runner.rollout(0)
    assert len(rollout.kept) == 8
    assert given.engine.most_running == 3


async def test_what_waits_for_its_turn_when_the_rollout_is_full_is_never_sent():
    given = world(rollout_batch_size=1, over_sampling_batch_size=4, rollout_concurrency=2)
    rollout = await given.runner.rollout(0)
    assert [group.row for group in rollout.kept] == [0]
    pending = [sample for sample in samples_of(rollout.groups) if sample.status is SampleStatus.PENDING]
    assert pending
    assert len(given.engine.requests) == len(samples_of(rollout.groups)) - len(pending)


async def test_a_filter_that_drops_everything_ends_the_run_clearly_and_loses_no_prompt():
    given = world(group_filter=lambda samples: "dull", over_sampling_batch_size=3, max_sampling_waves=4)
    with pytest.raises(UnfilledRolloutError, match=r"4 sampling waves .* gave 0 of 2 needed groups.*by dull") as raised:
        await given.runner.rollout(0)
    assert given.engine.num_running == 0
    assert raised.value.step == 0
    assert {group.drop_reason for group in raised.value.groups} <= {"dull", "aborted", "surplus"}


async def test_a_rollout_of_which_nothing_is_kept_ends_long_before_the_last_wave(caplog: pytest.LogCaptureFixture):
    given = world(reward=ScriptedReward(lambda row, index: 0.0), group_filter=lambda samples: "dull")
    text = r"^cannot fill the rollout: 3\d sampling waves .* gave 0 of 2 .*Dropped groups: 6\d with every reward 0\.$"
    with pytest.raises(RolloutError, match=text):
        await given.runner.rollout(0)
    assert re.fullmatch(r"rollout 0 after wave 1: kept 0 of 2 groups, dropped ([12]) \(\1 with every reward 0\)", caplog.messages[0])


async def test_the_sample_filter_sees_the_kept_groups_and_may_change_them():
    seen: list[int] = []

    def mask_first(groups: list[SampleGroup]) -> None:
        seen.extend(group.row for group in groups)
        groups[0].samples[0].loss_mask[:] = 0

    given = world(engine=ScriptedEngine(by_row({0: 400})), over_sampling_batch_size=3, sample_filter=mask_first)
    rollout = await given.runner.rollout(0)
    assert seen == [1, 2]
    assert rollout.kept[0].samples[0].loss_mask.sum() == 0


async def test_all_samples_includes_dropped_groups_and_can_give_them_back():
    seen: list[int] = []

    def process(groups: list[SampleGroup], data_source: DataSource) -> None:
        seen.extend(group.row for group in groups)
        data_source.add_samples([group.samples for group in groups if group.drop_reason == "unwanted"])

    given = world(group_filter=drop_rows(0), all_samples=process)
    rollout = await given.runner.rollout(0)
    assert seen == [group.row for group in rollout.groups]
    assert 0 in seen
    assert 0 not in [group.row for group in rollout.kept]
    assert given.source.draw(1, 1, 0).groups[0].row == 0, "the prompt that was given back comes next"


async def test_an_aligned_wave_starts_when_all_its_requests_have_arrived():
    given = world(rollout_batch_size=3, aligned_waves=True)
    await given.runner.rollout(0)
    assert given.engine.log == ["pause", *["arrive"] * 6, "resume", *["start"] * 6]


async def test_an_aligned_wave_does_not_wait_for_samples_that_need_no_request():
    given = world(rollout_batch_size=2, aligned_waves=True, engine=ScriptedEngine(refuse=lambda index: index == 1), n_samples_per_prompt=3)
    rollout = await given.runner.rollout(0)
    assert rollout.metrics["rollout/num_failed"] == 1
    assert given.engine.log.count("start") == 5


async def test_a_wave_beyond_the_concurrency_limit_is_not_aligned_with_a_warning(caplog: pytest.LogCaptureFixture):
    with caplog.at_level(logging.WARNING):
        given = world(rollout_batch_size=3, rollout_concurrency=5, aligned_waves=True)
    assert "not bitwise reproducible" in caplog.text
    await given.runner.rollout(0)
    assert "pause" not in given.engine.log


async def test_equal_seeds_give_equal_rollouts_whatever_the_concurrency():
    def seeds(requests: list) -> list[tuple[str, int]]:
        return sorted((rid.split("-")[0], params.sampling_seed) for rid, params in requests)

    wide, narrow = world(rollout_batch_size=4), world(rollout_batch_size=4, rollout_concurrency=1)
    one, other = await wide.runner.rollout(0), await narrow.runner.rollout(0)
    assert seeds(wide.engine.requests) == seeds(narrow.engine.requests)
    assert len({seed for _, seed in seeds(wide.engine.requests)}) == 8
    assert [sample.response for sample in samples_of(one.kept)] == [sample.response for sample in samples_of(other.kept)]


async def test_the_state_after_a_rollout_does_not_change_with_the_next_one():
    given = world(rows=Rows(), over_sampling_batch_size=4, engine=ScriptedEngine(by_row({1: 300, 3: 300})))
    first = await given.runner.rollout(0)
    assert first.state.source == {"position": 4, "returned": [1, 3]}
    await given.runner.rollout(1)
    assert first.state.source == {"position": 4, "returned": [1, 3]}
    assert (first.state.next_sample_index, first.state.next_group_index) == (8, 4)
