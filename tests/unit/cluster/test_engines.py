"""An engine on another node, with a scripted agent. (Real ones: tests/cluster.)"""

import asyncio
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("ray")

from ray.exceptions import RayError

from fuligo.cluster import engines
from fuligo.cluster.engines import RemotePart, RemoteServer
from fuligo.engines.sglang.server import ServerPorts, ServerSettings
from fuligo.errors import EngineError


def agent(**answers: Any) -> SimpleNamespace:
    """Return a handle whose calls return the scripted value, raise it, or wait forever (None)."""

    def call(answer: Any) -> SimpleNamespace:
        async def remote(*_: object) -> Any:
            if answer is None:
                await asyncio.Event().wait()
            if isinstance(answer, Exception):
                raise answer
            return answer

        return SimpleNamespace(remote=remote)

    return SimpleNamespace(**{name: call(answer) for name, answer in answers.items()})


@pytest.mark.parametrize(
    ("last_lines", "said"),
    [("out of memory", "out of memory"), (RayError("lost"), "its node does not answer"), (None, "its node does not answer")],
    ids=["answers", "lost", "unplugged"],
)
async def test_an_engine_that_is_not_ready_in_time_is_named(
    last_lines: Any, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engines, "LOG_TIMEOUT_S", 0.05)
    ports = ServerPorts(9, 1, 1)  # nothing listens
    settings = ServerSettings("engine 3", "model", 1, 1, {}, "regular", "cpu", "127.0.0.1", ports, tmp_path / "log", start_timeout_s=0.0)
    parts = [RemotePart(agent(start="started", ending=None, last_lines=last_lines, stop="stopped"), "127.0.0.1", ())]
    server = RemoteServer(settings, parts)
    with pytest.raises(EngineError) as caught:
        await server.wait_ready()
    assert "engine 3 on 127.0.0.1 was not ready within 0 s" in str(caught.value)
    assert said in str(caught.value)
    await server.stop()
    assert not server.is_lost
