"""Profiler of the engines when an engine refuses."""

import asyncio
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest

from fuligo.engines import profiling
from fuligo.engines.group import EngineGroup
from fuligo.engines.profiling import EngineProfiler
from fuligo.errors import EngineError


class FakeEngine:
    """Engine that records calls, and refuses those that it is told to."""

    url = "http://engine"

    def __init__(self, *refused: str) -> None:
        self.refused = refused
        self.calls: list[str] = []
        self.stopped = asyncio.Event()

    async def start_profile(self, directory: str, name: str) -> None:
        self.called("start", name)

    async def stop_profile(self) -> None:
        self.stopped.set()
        self.called("stop", "")

    def called(self, call: str, name: str) -> None:
        self.calls.append(call + name)
        if call in self.refused:
            raise EngineError("refused")


def profiler(*engines: FakeEngine) -> EngineProfiler:
    return EngineProfiler(cast(EngineGroup, SimpleNamespace(clients=list(engines))), (2,), Path("profile"))


async def test_an_engine_that_refuses_is_logged_and_the_others_are_profiled(caplog: pytest.LogCaptureFixture) -> None:
    good, deaf, stuck = FakeEngine(), FakeEngine("start"), FakeEngine("stop")
    with caplog.at_level(logging.WARNING):
        async with profiler(good, deaf, stuck).profiled(2):
            assert good.calls == ["startrollout_000002_engine0"]
    assert (good.calls[1:], deaf.calls, stuck.calls[1:]) == (["stop"], ["startrollout_000002_engine1"], ["stop"])
    assert [record.levelname for record in caplog.records] == ["WARNING", "WARNING"]


async def test_other_rollouts_are_not_profiled_and_errors_of_the_rollout_pass() -> None:
    engine = FakeEngine()
    async with profiler(engine).profiled(1):
        pass
    assert engine.calls == []
    with pytest.raises(ValueError, match="of the rollout"):
        async with profiler(engine).profiled(2):
            raise ValueError("of the rollout")
    assert engine.calls[-1] == "stop"


async def test_the_profile_ends_before_a_long_rollout(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(profiling, "LONGEST_S", 0.01)
    engine = FakeEngine()
    async with profiler(engine).profiled(2):
        async with asyncio.timeout(60):
            await engine.stopped.wait()
