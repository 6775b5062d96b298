"""`--data-source-path`: the user's own source of groups behind the same runner."""

from typing import ClassVar

import numpy as np
import pytest

from fuligo.errors import DataError, RolloutError
from fuligo.rollout.custom_source import CustomSource
from fuligo.rollout.protocol import RolloutState
from fuligo.rollout.runner import RolloutRunner
from fuligo.types import Sample
from tests.unit.rollout.scripted import ScriptedEngine, World, by_row, samples_of, world


class Numbers:
    """Typical data source of a user: prompts 0, 1, 2, ...; unfinished groups first; state in a dict instead of a file."""

    saved: ClassVar[dict[int, tuple[int, list]]] = {}

    def __init__(self, args: object) -> None:
        self.next = 0
        self.waiting: list[list[Sample]] = []

    def get_samples(self, num_groups: int) -> list[list[Sample]]:
        groups = [self.waiting.pop(0) for _ in range(min(num_groups, len(self.waiting)))]
        while len(groups) < num_groups:
            groups.append([Sample(0, 0, "", np.array([self.next], np.int32), metadata={"row": self.next}) for _ in range(2)])
            self.next += 1
        return groups

    def add_samples(self, groups: list[list[Sample]]) -> None:
        self.waiting += groups

    def save(self, rollout_id: int) -> None:
        self.saved[rollout_id] = self.next, list(self.waiting)

    def load(self, rollout_id: int) -> None:
        self.next, waiting = self.saved[rollout_id]
        self.waiting = list(waiting)

    def __len__(self) -> int:
        return 1000


def with_source(partial_rollout: bool, state: RolloutState | None = None) -> tuple[World, RolloutRunner]:
    given = world(
        engine=ScriptedEngine(by_row({1: 120})),
        source=CustomSource(Numbers(None), partial_rollout=partial_rollout),
        state=state,
        over_sampling_batch_size=3,
        partial_rollout=partial_rollout,
    )
    return given, given.runner


def drawn(rollout) -> list[int]:
    return [int(group.samples[0].prompt_ids[0]) for group in rollout.groups]


async def test_groups_are_numbered_over_the_run_whatever_index_they_come_with():
    _, runner = with_source(partial_rollout=False)
    rollout = await runner.rollout(0)
    assert [sample.index for sample in samples_of(rollout.groups)] == list(range(6))
    assert [group.index for group in rollout.groups] == [0, 1, 2]


async def test_unfinished_groups_come_back_with_their_tokens_under_partial_rollout():
    given, runner = with_source(partial_rollout=True)
    await runner.rollout(0)
    given.engine.version, given.engine.lengths = 1, by_row({1: 40, 4: 300})
    second = await runner.rollout(1)
    assert drawn(second) == [1, 3, 4]
    assert second.metrics["rollout/num_resumed"] == 2
    assert set(second.groups[0].samples[0].versions.tolist()) == {0, 1}


async def test_without_it_they_come_back_as_fresh_samples():
    given, runner = with_source(partial_rollout=False)
    await runner.rollout(0)
    given.engine.version, given.engine.lengths = 1, by_row({4: 300})
    second = await runner.rollout(1)
    assert sorted(drawn(second)) == [1, 3, 4]
    again = next(group for group in second.groups if group.samples[0].prompt_ids[0] == 1)
    assert set(again.samples[0].versions.tolist()) == {1}
    assert [sample.index for sample in samples_of(second.groups)] == list(range(6, 12))


@pytest.mark.parametrize("partial_rollout", [False, True])
async def test_it_saves_after_every_rollout_and_loads_on_resume(partial_rollout: bool):
    _, runner = with_source(partial_rollout)
    first = await runner.rollout(0)
    whole = await runner.rollout(1)
    _, resumed = with_source(partial_rollout, first.state)
    again = await resumed.rollout(1)
    assert drawn(again) == drawn(whole)
    assert [sample.index for sample in samples_of(again.groups)] == [sample.index for sample in samples_of(whole.groups)]


@pytest.mark.parametrize("result", [None, [[]], [["text"]], [[Sample(0, 0, "", np.zeros(1, np.int32))]] * 9], ids=str)
def test_something_else_than_groups_is_refused(result):
    hook = Numbers(None)
    hook.get_samples = lambda num_groups: result
    with pytest.raises(RolloutError, match=r"--data-source-path: get_samples\(3\) must return"):
        CustomSource(hook).draw(3, 0, 0)


@pytest.mark.parametrize("ids", [[], [0.5], [-1], "text", [[1]]], ids=str)
def test_prompts_are_token_ids(ids):
    class Source(Numbers):
        def get_samples(self, num_groups: int) -> list[list[Sample]]:
            return [[Sample(0, 0, "text", ids)]]

    with pytest.raises(RolloutError, match=r"prompt_ids are .*; set them to at least one token id"):
        CustomSource(Source(None)).draw(1, 0, 0)


def test_a_list_of_token_ids_will_do():
    class Source(Numbers):
        def get_samples(self, num_groups: int) -> list[list[Sample]]:
            return [[Sample(0, 0, "text", [1, 2])]]

    (group,) = CustomSource(Source(None)).draw(1, 0, 0).groups
    assert group.samples[0].tokens.dtype == np.int32 and group.samples[0].tokens.tolist() == [1, 2]


def test_a_method_that_raises_is_named():
    hook = Numbers(None)
    with pytest.raises(RolloutError, match=r"--data-source-path: load raised KeyError: 7 \(test_custom_source\.py:\d+\)"):
        CustomSource(hook).restore(RolloutState({"rollout_id": 7}))


def test_a_position_in_a_file_is_refused():
    with pytest.raises(DataError, match="read its prompts from a file; resume with its --prompt-data"):
        CustomSource(Numbers(None)).restore(RolloutState({"num_rows": 9, "epoch": 0, "offset": 3}))
