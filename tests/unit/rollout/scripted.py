"""Test world without models: an engine with scripted tokens, a dataset of numbered rows, rewards by row.

A prompt is `[row]`. Sample `index` of that row wants `lengths(row, index)` tokens; token t of it is `token(index, t)`. The engine
makes one token per tick of the event loop, so the lengths decide which sample finishes first.
"""

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from fuligo.config.groups import RolloutFlags
from fuligo.engines.generation import EngineLoad, Generation, RoutingQuery, SamplingParams
from fuligo.errors import EngineError
from fuligo.rollout.filters import AllSamples
from fuligo.rollout.generate import SingleTurn, sampling_params
from fuligo.rollout.protocol import GenerateFn, GroupFilter, GroupStream, RolloutState
from fuligo.rollout.runner import RolloutRunner, RunnerParts
from fuligo.rollout.sampler import Sampler, Turns
from fuligo.rollout.source import GroupSource
from fuligo.types import IntArray, Prompt, PromptImage, Sample, SampleGroup


def token(index: int, position: int) -> int:
    return 10 + index % 97 + 100 * position


class Tokenizer:
    """Decoder that spells out the token ids."""

    def decode(self, token_ids: list[int], skip_special_tokens: bool = False) -> str:
        return " ".join(map(str, token_ids))


@dataclass
class ScriptedEngine:
    lengths: Callable[[int, int], int] = lambda row, index: 5
    """Number of tokens of a whole response, by row and sample index."""
    version: int = 0
    refuse: Callable[[int], bool] = lambda index: False
    """Sample indices whose requests fail."""
    hang: Callable[[int], bool] = lambda index: False
    """Sample indices whose requests are never answered, even after an abort."""
    requests: list[tuple[str, SamplingParams]] = field(default_factory=list)
    """rid and parameters of every request, in arrival order."""
    num_running: int = 0
    most_running: int = 0
    num_aborts: int = 0
    log: list[str] = field(default_factory=list)
    """Events pause, resume, arrive and start, in order."""
    _going: asyncio.Event = field(default_factory=asyncio.Event)

    def __post_init__(self) -> None:
        self._going.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        """Wait until `condition` holds."""
        for _ in range(10_000):
            if condition():
                return
            await asyncio.sleep(0)
        raise AssertionError("the condition never held")

    async def generate(
        self,
        input_ids: IntArray,
        params: SamplingParams,
        *,
        rid: str,
        priority: int = 0,
        timeout_s: float | None = None,
        routing: RoutingQuery | None = None,
        images: Sequence[PromptImage] = (),
    ) -> Generation:
        assert routing is None
        index, row, begun = -priority, int(input_ids[0]), len(input_ids) - 1
        self.requests.append((rid, params))
        self.log.append("arrive")
        if self.refuse(index):
            raise EngineError(f"engine: request {rid} refused")
        if self.hang(index):
            await asyncio.Event().wait()
        await self._going.wait()
        self.log.append("start")
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        try:
            return await self._decode(index, begun, self.lengths(row, index), params.max_new_tokens)
        finally:
            self.num_running -= 1

    async def _decode(self, index: int, begun: int, length: int, max_new_tokens: int) -> Generation:
        num_aborts, ids, reason = self.num_aborts, [], "length"
        while len(ids) < max_new_tokens:
            await asyncio.sleep(0)
            if self.num_aborts > num_aborts:
                reason = "abort"
                break
            ids.append(token(index, begun + len(ids)))
            if begun + len(ids) == length:
                reason = "stop"
                break
        return Generation(np.array(ids, np.int32), np.full(len(ids), -0.5, np.float32), reason, self.version, 1 + begun, 0, "")

    async def abort_all(self) -> None:
        self.num_aborts += 1

    async def pause(self, mode: str) -> None:
        self.log.append("pause")
        self._going.clear()

    async def resume(self) -> None:
        self.log.append("resume")
        self._going.set()

    async def load(self) -> EngineLoad:
        return EngineLoad(self.num_running, 0, len(self.requests))


class Rows:
    """Dataset of `num_rows` numbered rows in their order, epoch after epoch."""

    def __init__(self, num_rows: int = 1000) -> None:
        self.num_rows = num_rows
        self.position = 0
        self.returned: list[int] = []

    def take(self, num_prompts: int, /) -> list[Prompt]:
        rows = []
        for _ in range(num_prompts):
            if self.returned:
                rows.append(self.returned.pop(0))
            else:
                rows.append(self.position % self.num_rows)
                self.position += 1
        return [Prompt(row, f"row {row}", np.array([row], np.int32), label=str(row), metadata={"row": row}) for row in rows]

    def give_back(self, prompts: list[Prompt], /) -> None:
        self.returned = [prompt.row for prompt in prompts] + self.returned

    def state(self) -> dict[str, int | str | list[int]]:
        return {"position": self.position, "returned": list(self.returned)}

    def restore(self, state: dict[str, int | str | list[int]], /) -> None:
        position, returned = state["position"], state["returned"]
        assert isinstance(position, int) and isinstance(returned, list)
        self.position, self.returned = position, list(returned)


class ScriptedReward:
    """Reward `value(row, index)` of every sample that did not fail, after `ticks(row)` of the event loop."""

    def __init__(
        self, value: Callable[[int, int], float] = lambda row, index: float(index % 2), ticks: Callable[[int], int] = lambda row: 0
    ) -> None:
        self.value = value
        self.ticks = ticks
        self.judged: list[int] = []

    async def __call__(self, group: SampleGroup) -> None:
        self.judged.append(group.row)
        for _ in range(self.ticks(group.row)):
            await asyncio.sleep(0)
        for sample in group.samples:
            if sample.status != "failed":
                sample.reward = self.value(group.row, sample.index)


def drop_rows(*rows: int, reason: str = "unwanted") -> GroupFilter:
    """Return a filter that drops the groups of these rows."""
    return lambda samples: reason if samples[0].metadata["row"] in rows else None


@dataclass
class World:
    """Runner with its surroundings."""

    flags: RolloutFlags
    engine: ScriptedEngine
    rows: Rows
    source: GroupStream
    reward: ScriptedReward
    parts: RunnerParts
    runner: RolloutRunner


def world(
    *,
    engine: ScriptedEngine | None = None,
    reward: ScriptedReward | None = None,
    rows: Rows | None = None,
    source: GroupStream | None = None,
    group_filter: GroupFilter | None = None,
    sample_filter: Callable[[list[SampleGroup]], None] | None = None,
    all_samples: AllSamples | None = None,
    generate: GenerateFn | None = None,
    state: RolloutState | None = None,
    timeout_s: float = 20.0,
    aligned_waves: bool = False,
    **flags: object,
) -> World:
    engine, reward, rows = engine or ScriptedEngine(), reward or ScriptedReward(), rows or Rows()
    given = RolloutFlags(**{"rollout_batch_size": 2, "n_samples_per_prompt": 2, **flags})
    source = source or GroupSource(
        rows,
        given.n_samples_per_prompt,
        partial_rollout=given.partial_rollout,
        mask_offpolicy=given.mask_offpolicy_in_partial_rollout,
        max_staleness=given.max_staleness,
    )
    if state is not None:
        source.restore(state)
    turns = Turns(given.rollout_concurrency or 512)
    single_turn = SingleTurn(engine, Tokenizer(), timeout_s=timeout_s)
    parts = RunnerParts(
        source=source,
        sampler=Sampler(generate or single_turn, seed=1, stream="train", turns=turns, timeout_s=timeout_s),
        reward=reward,
        engines=engine,
        params=sampling_params(given),
        flags=given,
        concurrency=given.rollout_concurrency or 512,
        group_filter=group_filter,
        sample_filter=sample_filter,
        all_samples=all_samples,
        policy_version=lambda: engine.version,
    )
    return World(given, engine, rows, source, reward, parts, RolloutRunner(parts, aligned_waves=aligned_waves))


def by_row(lengths: dict[int, int], default: int = 5) -> Callable[[int, int], int]:
    """Return response lengths that depend only on the row."""
    return lambda row, index: lengths.get(row, default)


def rows_where(groups: list[SampleGroup], drop_reason: str | None) -> list[int]:
    return [group.row for group in groups if group.drop_reason == drop_reason]


def samples_of(groups: list[SampleGroup]) -> list[Sample]:
    return [sample for group in groups for sample in group.samples]
