"""Continuous sampling: order and age of the groups, weight syncs, resumes and filters."""

import asyncio
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fuligo.engines.generation import Generation, SamplingParams
from fuligo.errors import EngineError, RolloutError
from fuligo.rollout.producer import PacedRollouts
from fuligo.rollout.protocol import Rollout, UnfilledRolloutError
from fuligo.types import Sample, SampleStatus
from tests.unit.rollout.continuous_world import ContinuousWorld, continuous, pass_ticks, saved
from tests.unit.rollout.scripted import ScriptedEngine, ScriptedReward, by_row, drop_rows, rows_where, samples_of, token


def rows_of(rollout: Rollout) -> list[int]:
    return [group.row for group in rollout.kept]


class TestHandOut:
    async def test_a_rollout_is_there_as_soon_as_it_is_full(self):
        given = continuous(engine=ScriptedEngine(by_row({0: 50})))
        rollout = await given.runner.rollout(0)
        assert rows_of(rollout) == [1, 2], "row 0 is still being sampled"
        assert [group.row for group in rollout.state.buffer] == [0, 3]

    async def test_nothing_is_aborted_for_it_and_what_is_unfinished_comes_later(self):
        given = continuous(engine=ScriptedEngine(by_row({0: 50})))
        rollouts = [await given.runner.rollout(0), await given.runner.rollout(1)]
        assert given.engine.num_aborts == 0
        assert rows_of(rollouts[1]) == [3, 4]
        await given.engine.until(lambda: 0 in given.reward.judged)
        assert rows_of(await given.runner.rollout(2)) == [0, 5]

    async def test_groups_wait_in_the_queue_while_the_trainer_works_and_the_oldest_go_first(self):
        given = continuous(max_staleness=2, engine=ScriptedEngine(by_row({2: 30})))
        await given.runner.rollout(0)
        await pass_ticks(100)
        second = await given.runner.rollout(1)
        assert rows_of(second) == [2, 3], "row 2 finished last of all that wait"
        assert (second.metrics["rollout/num_queued"], second.metrics["rollout/num_in_flight"]) == (2, 2)

    async def test_in_the_order_of_submission_it_waits_for_those_that_began_first(self):
        given = continuous(engine=ScriptedEngine(by_row({0: 50})), sampling_order="submission")
        assert rows_of(await given.runner.rollout(0)) == [0, 1]
        assert rows_of(await given.runner.rollout(1)) == [2, 3]

    async def test_what_was_dropped_meanwhile_is_part_of_it(self):
        given = continuous(group_filter=drop_rows(0, 3, reason="dull"))
        rollout = await given.runner.rollout(0)
        assert rows_of(rollout) == [1, 2]
        assert rows_where(rollout.groups, "dull") == [0, 3], "the filter judges each group as it finishes"
        assert rollout.metrics["rollout/num_groups_kept"] == 2
        assert rollout.metrics["rollout/dropped/dull"] == rollout.metrics["rollout/num_groups_dropped"] == 2

    async def test_the_sample_filter_sees_what_is_handed_out(self):
        seen: list[list[int]] = []
        given = continuous(sample_filter=lambda groups: seen.append([group.row for group in groups]))
        rollouts = await given.steps(2)
        assert seen == [rows_of(rollout) for rollout in rollouts]

    async def test_each_token_is_counted_once(self):
        given = continuous(engine=ScriptedEngine(lambda row, index: 3 + 7 * index % 40), rollout_max_response_len=64)
        rollouts = await given.steps(6)
        ended = sum(sample.response_length for rollout in rollouts for sample in samples_of(rollout.groups))
        under_way = sum(sample.response_length for sample in samples_of(rollouts[-1].state.buffer))
        assert sum(rollout.metrics["rollout/num_tokens"] for rollout in rollouts) == ended + under_way


class TestAdmission:
    @pytest.mark.parametrize("max_staleness", [0, 1, 3])
    async def test_so_many_groups_are_begun_and_no_more(self, max_staleness: int):
        given = continuous(max_staleness=max_staleness)
        for step in range(3):
            await given.runner.rollout(step)
            await pass_ticks(200)
            assert given.rows.position == 2 * (step + max_staleness + 1), "while rollout `step` is trained on"
            await given.sync()

    async def test_sampling_ends_with_the_last_rollout(self):
        given = continuous(max_staleness=5, num_rollout=3)
        rollouts = await given.steps(3, ticks=100)
        assert given.rows.position == 6
        assert rollouts[-1].state.buffer == []

    async def test_dropped_groups_make_room_for_others(self):
        given = continuous(max_staleness=0, group_filter=drop_rows(0, 1, 2))
        assert rows_of(await given.runner.rollout(0)) == [3, 4]

    async def test_weights_that_never_change_hold_nothing_up(self):
        """The case of --debug-rollout-only."""
        given = continuous(max_staleness=0)
        assert [rows_of(await given.runner.rollout(step)) for step in range(3)] == [[0, 1], [2, 3], [4, 5]]


class TestSync:
    async def test_interrupted_samples_continue_at_once_with_the_new_weights(self):
        given = continuous(engine=ScriptedEngine(by_row({2: 60})), sampling_order="submission")
        await given.step(0, ticks=20)
        second = await given.runner.rollout(1)
        assert second.metrics["rollout/num_resumed"] == 2
        sample = second.kept[0].samples[0]
        assert sample.response_ids.tolist() == [token(sample.index, position) for position in range(60)]
        assert set(sample.versions.tolist()) == {0, 1}
        assert sorted(sample.versions.tolist()) == sample.versions.tolist()
        assert len(sample.engine_logprobs) == len(sample.loss_mask) == 60
        assert sample.loss_mask.all()
        assert sample.response == " ".join(map(str, sample.response_ids)), "decoded from all ids"

    async def test_it_waits_for_nothing(self):
        """`settle` returns while requests run; the new weights sample the rest of them."""
        given = continuous(engine=ScriptedEngine(lambda row, index: 1000), rollout_max_response_len=1000)
        rollouts = PacedRollouts(given.runner.rollout, start=0, stop=9, mode="full", before_sync=given.runner.before_sync)
        first = asyncio.ensure_future(anext(rollouts))
        await given.engine.until(lambda: given.engine.num_running > 0)
        await asyncio.wait_for(rollouts.settle(), 120)
        assert given.engine.num_running > 0
        first.cancel()
        await given.runner.close()

    async def test_a_request_that_it_meets_before_its_first_token_is_sent_again(self):
        given = continuous(engine=ScriptedEngine(lambda row, index: 5))
        first = asyncio.ensure_future(given.runner.rollout(0))
        await given.engine.until(lambda: given.engine.num_running > 0)
        await given.sync()
        assert all(sample.response_length == 5 for sample in samples_of((await first).kept))

    async def test_what_waits_for_its_turn_keeps_its_place(self):
        """With one request at a time, an interrupted response continues before another begins."""
        given = continuous(engine=ScriptedEngine(lambda row, index: 12), rollout_concurrency=1, n_samples_per_prompt=1)
        first = asyncio.ensure_future(given.runner.rollout(0))
        await given.engine.until(lambda: given.engine.num_running == 1)
        await pass_ticks(4)
        await given.sync()
        await first
        assert [rid.split("-")[0] for rid, _ in given.engine.requests][:3] == ["0", "0", "1"]


class TestStaleness:
    async def too_slow(self, **flags: Any) -> tuple[ContinuousWorld, list[Rollout]]:
        """Row 0 takes longer than three steps."""
        engine = ScriptedEngine(by_row({0: 100}), version=0)
        given = continuous(engine=engine, rollout_max_response_len=200, **flags)
        return given, await given.steps(4, ticks=10)

    async def test_a_group_with_a_token_that_is_too_old_is_dropped_and_its_prompt_drawn_again(self):
        _, rollouts = await self.too_slow()
        (stale,) = [rollout for rollout in rollouts if rows_where(rollout.groups, "stale")]
        assert stale.step == 2, "it began at version 0, and would be trained by version 2"
        assert rows_where(stale.groups, "stale") == [0]
        assert stale.metrics["rollout/num_groups_stale"] == stale.metrics["rollout/dropped/stale"] == 1
        (group,) = [group for group in stale.groups if group.drop_reason == "stale"]
        assert not group.kept
        assert all(0 < sample.response_length < 100 for sample in group.samples), (
            "it did not go on after the weight sync that made it too old"
        )
        again = [group for group in rollouts[3].state.buffer if group.row == 0]
        assert len(again) == 1 and again[0].index > group.index, "a new group of the same prompt"

    async def test_a_queued_group_grows_too_old_as_well(self):
        given = continuous(max_staleness=1, num_rollout=9)
        first = await given.runner.rollout(0)
        await pass_ticks(100)
        assert len(first.state.buffer) == 2
        for _ in range(2):
            await given.sync()
        second = await given.runner.rollout(1)
        assert rows_where(second.groups, "stale") == [2, 3]
        assert rows_of(second) == [2, 3], "their prompts are the next"
        assert {int(version) for sample in samples_of(second.kept) for version in sample.versions} == {2}

    async def test_a_stopped_group_is_dropped_even_if_its_old_sample_fails(self):
        """Sample 0 becomes too old, so sample 1 stops; then sample 0 fails, and no old token is left."""
        given = continuous(engine=ScriptedEngine(lambda row, index: 200 if row == 0 else 5), rollout_max_response_len=200)
        single_turn = given.runner._tasks.sampler.generate

        async def fails_late(sample: Sample, params: SamplingParams) -> Sample:
            if sample.index == 0 and len(sample.versions) and given.engine.version == 1:
                sample.versions = sample.versions[:0]  # malformed: it fails, and its response is cleared
                return sample
            return await single_turn(sample, params)

        given = continuous(engine=given.engine, generate=fails_late, rollout_max_response_len=200, max_staleness=0)
        parts = given.runner._parts
        given.runner._parts = replace(parts, flags=parts.flags.model_copy(update={"rollout_batch_size": 1}))
        rollout = await given.step(0, ticks=20)
        assert rows_of(rollout) == [1]
        await pass_ticks(20)
        second = await given.runner.rollout(1)
        assert rows_where(second.groups, "stale") == [0]

    async def test_in_the_order_of_submission_nothing_is_dropped(self):
        _, rollouts = await self.too_slow(sampling_order="submission")
        assert [rows_of(rollout) for rollout in rollouts] == [[0, 1], [2, 3], [4, 5], [6, 7]]

    async def test_the_metrics_say_how_old_the_tokens_are_for_the_weights_that_train_on_them(self):
        given = continuous(max_staleness=2)
        rollouts = await given.steps(5, ticks=100)
        assert [rollout.metrics["rollout/staleness"] for rollout in rollouts] == [0, 1, 2, 2, 2]
        assert [rollout.metrics["rollout/staleness_max"] for rollout in rollouts] == [0, 1, 2, 2, 2]


class TestState:
    async def test_it_holds_what_is_queued_and_what_is_in_flight(self):
        given = continuous(engine=ScriptedEngine(by_row({4: 500}), version=0), max_staleness=2, rollout_max_response_len=500)
        await given.runner.rollout(0)
        await pass_ticks(100)
        await given.sync()
        rollout = await given.runner.rollout(1)
        assert rows_of(rollout) == [2, 3]
        queued, in_flight = rollout.state.buffer[1], rollout.state.buffer[0]
        assert (queued.row, in_flight.row) == (5, 4)
        assert all(sample.reward is not None for sample in queued.samples)
        assert all(sample.status is SampleStatus.ABORTED and 0 < sample.response_length < 500 for sample in in_flight.samples)

    async def test_a_resume_continues_the_unfinished_and_asks_for_no_reward_twice(self):
        given = continuous(engine=ScriptedEngine(by_row({4: 200}), version=0), max_staleness=2, rollout_max_response_len=500)
        await given.runner.rollout(0)
        await pass_ticks(100)
        await given.sync()
        state = (await given.runner.rollout(1)).state
        begun = {sample.index: sample.response_length for group in state.buffer if group.row == 4 for sample in group.samples}

        resumed = continuous(engine=ScriptedEngine(given.engine.lengths, version=2), max_staleness=2, state=saved(state))
        rollout = await resumed.runner.rollout(2)
        assert rows_of(rollout)[0] == 5
        assert 5 not in resumed.reward.judged
        await pass_ticks(300)
        continued = (await resumed.runner.rollout(3)).kept[0]
        assert continued.row == 4
        for sample in continued.samples:
            assert sample.versions.tolist() == [0] * begun[sample.index] + [2] * (200 - begun[sample.index])

    async def test_a_resume_hands_out_at_once_what_was_complete(self):
        given = continuous(max_staleness=1)
        await given.runner.rollout(0)
        await pass_ticks(100)
        await given.sync()
        await given.runner.rollout(1)
        await pass_ticks(100)
        queued = saved(replace(given.runner._parts.source.state(1), buffer=given.runner._pending()))
        resumed = continuous(engine=ScriptedEngine(version=2), max_staleness=1, num_rollout=3, state=queued)
        assert rows_of(await asyncio.wait_for(resumed.runner.rollout(2), 120)) == [4, 5]
        assert resumed.engine.requests == [], "the last rollout was there already"

    async def test_finished_samples_of_an_unfinished_group_are_not_sampled_again(self):
        lengths = lambda row, index: 300 if index == 4 else 5  # noqa: E731
        given = continuous(engine=ScriptedEngine(lengths), rollout_max_response_len=300)
        await given.runner.rollout(0)
        await pass_ticks(50)
        state = (await given.runner.rollout(1)).state
        (group,) = [group for group in state.buffer if group.row == 2]
        assert [sample.status for sample in group.samples] == [SampleStatus.PENDING, SampleStatus.COMPLETED]
        resumed = continuous(engine=ScriptedEngine(lengths, version=2), max_staleness=9, rollout_max_response_len=300, state=saved(state))
        await resumed.steps(3, start=2, ticks=400)
        assert "5" not in [rid.split("-")[0] for rid, _ in resumed.engine.requests]

    async def test_groups_held_too_long_start_over_after_a_resume(self):
        given = continuous(max_staleness=1)
        await given.runner.rollout(0)
        await pass_ticks(100)
        state = (await given.runner.rollout(1)).state
        resumed = continuous(engine=ScriptedEngine(version=7), max_staleness=1, state=saved(state))
        rollout = await resumed.runner.rollout(2)
        assert set(rows_where(rollout.groups, "stale")) == {
            group.row for group in state.buffer if any(len(sample.versions) for sample in group.samples)
        }
        assert all((sample.versions == 7).all() for sample in samples_of(rollout.kept))

    async def test_later_sampling_does_not_reach_back_into_it(self):
        given = continuous(engine=ScriptedEngine(by_row({2: 60})), max_staleness=2)
        await given.step(0, ticks=10)
        state = (await given.runner.rollout(1)).state
        before = [(sample.status, sample.response_ids.tolist(), sample.reward) for sample in samples_of(state.buffer)]
        await given.sync()
        await given.steps(3, start=2)
        assert [(sample.status, sample.response_ids.tolist(), sample.reward) for sample in samples_of(state.buffer)] == before

    async def test_a_conversation_stands_as_it_was_when_the_user_s_function_was_called(self):
        """Between two turns the sample looks finished; only the function knows that more turns follow."""
        given = continuous(engine=ScriptedEngine(lambda row, index: 3 if row < 2 else 40), max_staleness=1)
        single_turn = given.runner._tasks.sampler.generate

        async def two_turns(sample: Sample, params: SamplingParams) -> Sample:
            await single_turn(sample, params)
            if sample.metadata["row"] >= 2 and sample.status is SampleStatus.COMPLETED:
                await asyncio.Event().wait()
            return sample

        given = continuous(engine=given.engine, generate=two_turns, rollout_max_response_len=40)
        first = await given.runner.rollout(0)
        assert rows_of(first) == [0, 1]
        await pass_ticks(200)
        assert [sample.status for sample in samples_of(given.runner._pending())] == [SampleStatus.PENDING] * 4
        await given.runner.close()


class TestTheEnd:
    async def test_a_filter_that_drops_everything_ends_it_with_what_was_dropped(self):
        given = continuous(group_filter=lambda samples: "zero_std", max_sampling_waves=3)
        with pytest.raises(RolloutError, match=r"6 prompts .* gave 0 of 2 needed groups; dropped: 6 by zero_std\. If all responses"):
            await given.runner.rollout(0)

    async def test_a_rollout_of_which_nothing_is_kept_ends_it_early(self):
        given = continuous(group_filter=lambda samples: "zero_std")
        with pytest.raises(UnfilledRolloutError, match=r"^cannot fill the rollout: 64 prompts") as raised:
            await given.runner.rollout(0)
        assert len(raised.value.groups) == 64

    async def test_many_drops_in_many_rollouts_do_not_end_it(self):
        given = continuous(group_filter=drop_rows(*range(0, 90, 3)), max_sampling_waves=2)
        assert len(await given.steps(10)) == 10

    async def test_an_engine_that_fails_everything_ends_it_with_its_words(self):
        given = continuous(engine=ScriptedEngine(refuse=lambda index: True))
        with pytest.raises(RolloutError, match=r"32 of the last 32 groups have too few usable samples; most frequent errors: .*refused"):
            await given.runner.rollout(0)

    async def test_few_waves_end_it_with_the_engine_s_words_too(self):
        given = continuous(engine=ScriptedEngine(refuse=lambda index: True), max_sampling_waves=3)
        with pytest.raises(RolloutError, match=r"6 of the last 6 groups have too few usable samples; most frequent errors: .*refused"):
            await given.runner.rollout(0)

    async def test_an_error_meanwhile_comes_when_the_next_rollout_is_asked_for(self):
        def judge(samples: list[Sample]) -> str | None:
            if samples[0].metadata["row"] == 3:
                raise EngineError("the judge is gone")
            return None

        given = continuous(group_filter=judge)
        await given.runner.rollout(0)
        await pass_ticks(100)
        await given.sync()
        with pytest.raises(EngineError, match="the judge is gone"):
            await given.runner.rollout(1)

    @pytest.mark.long
    async def test_an_engine_that_interrupts_for_ever_fails_the_sample_at_its_deadline(self):
        class Interrupting(ScriptedEngine):
            async def generate(self, *args: Any, **kwargs: Any) -> Generation:
                if kwargs["priority"] == 0:
                    return Generation(np.empty(0, np.int32), np.empty(0, np.float32), "abort", 0, 1, 0, "")
                return await super().generate(*args, **kwargs)

        given = continuous(engine=Interrupting(), timeout_s=2.0, n_samples_per_prompt=3, sampling_order="submission")
        sample = (await given.runner.rollout(0)).kept[0].samples[0]
        assert sample.error == "interrupted repeatedly, without a new token for 2 s (--rollout-timeout-s)"

    async def test_closing_leaves_nothing_running(self):
        given = continuous(engine=ScriptedEngine(by_row({2: 1000, 3: 1000})), rollout_max_response_len=1000)
        await given.runner.rollout(0)
        await given.engine.until(lambda: given.engine.num_running > 0)
        await given.runner.close()
        assert given.engine.num_running == 0
        assert [task for task in asyncio.all_tasks() if task is not asyncio.current_task()] == []

    async def test_a_failing_reward_is_data_of_its_samples(self):
        class Failing(ScriptedReward):
            async def __call__(self, group) -> None:
                if group.row == 0:
                    raise ValueError("no verdict")
                await super().__call__(group)

        rollout = await continuous(reward=Failing()).runner.rollout(0)
        assert rows_where(rollout.groups, "too_few_usable_samples") == [0]
        assert rows_of(rollout) == [1, 2]
