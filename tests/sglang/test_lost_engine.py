"""An engine is killed, or its scheduler stops, during a weight sync.

The other engine gets the weights, and the restarted one catches up.
"""

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any, cast

import pytest
import pytest_asyncio
import torch
from transformers import PreTrainedModel

from fuligo.engines.client import EngineClient
from fuligo.engines.connection import ControlDeadlines, Deadline
from fuligo.engines.host import PortClaims
from fuligo.engines.sglang.fleet import Fleet
from fuligo.engines.sglang.server import SGLangServer
from fuligo.formats.weight_manifest import Transport, WeightTarget
from fuligo.trainer.protocol import Trainer
from fuligo.trainer.ranks.commands import Command
from fuligo.trainer.ranks.trainer import RankedTrainer
from fuligo.weights import colocated
from fuligo.weights.senders import WeightSender
from fuligo.weights.sync import WeightSync, WeightSyncSettings
from tests.e2e.processes import descendants
from tests.sglang import oracle
from tests.sglang.conftest import SEEN_S, fleet_settings
from tests.sglang.test_weights import BUCKET_BYTES, assert_engines_hold


class KillingTrainer(RankedTrainer):
    """Trainer that sends the weights of `model` and signals the processes of `victims` in the middle of the next send."""

    def __init__(self, model: PreTrainedModel) -> None:
        super().__init__(None, None)
        self.model = model
        self.victims: list[int] = []
        self.signal = signal.SIGKILL
        self.sender = WeightSender()

    async def _run(self, command: Command[Any]) -> Any:
        assert command.name == "send_weights"
        return await asyncio.to_thread(self._send, *command.arguments)

    def _send(self, target: WeightTarget) -> Any:
        return self.sender.send(self._gathered(), target)

    def _gathered(self) -> Iterator[tuple[str, torch.Tensor]]:
        named = list(self.model.named_parameters())
        for number, (name, parameter) in enumerate(named):
            if number == len(named) // 2:
                for pid in self.victims:
                    os.kill(pid, self.signal)
                self.victims = []
            yield name, parameter.detach()


@pytest_asyncio.fixture
async def fleet(checkpoint: Path, claims: PortClaims, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Fleet]:
    soon = ControlDeadlines(bucket=Deadline(20.0))
    monkeypatch.setattr(colocated, "client_of", lambda engine: EngineClient(engine.url, engine.keys, number=engine.number, deadlines=soon))
    fleet = await Fleet.launch(fleet_settings(checkpoint, claims, tmp_path))
    yield fleet
    await fleet.stop()


@pytest.mark.parametrize(
    ("transport", "number"),
    [
        ("gloo", signal.SIGKILL),
        pytest.param("tensor", signal.SIGKILL, marks=pytest.mark.slow),
        pytest.param("tensor", signal.SIGSTOP, marks=pytest.mark.slow),
    ],
)
async def test_the_sync_continues(fleet: Fleet, checkpoint: Path, tmp_path: Path, transport: Transport, number: signal.Signals) -> None:
    """Only the deadline of the bucket detects a stopped scheduler, whose HTTP server still answers."""
    trainer = KillingTrainer(oracle.perturbed(oracle.load(checkpoint), seed=1))
    weight_sync = WeightSync(cast(Trainer, trainer), fleet.group, WeightSyncSettings(transport, BUCKET_BYTES, False, checkpoint, tmp_path))
    fleet.sync_restarted = weight_sync.sync_restarted
    watch = asyncio.create_task(fleet.watch())
    await weight_sync.resync()
    await asyncio.sleep(SEEN_S)

    victim = fleet.servers[0]
    assert isinstance(victim, SGLangServer)
    processes = descendants(victim.pid)
    trainer.signal = number
    trainer.victims = (
        list(processes)[:1] if number == signal.SIGKILL else [pid for pid, command in processes.items() if "scheduler" in command]
    )
    assert trainer.victims
    oracle.perturbed(trainer.model, seed=2)
    trainer.num_updates += 1
    assert await weight_sync.sync() == 1
    assert fleet.group.urls[0] == fleet.servers[1].url, "the remaining engine was not restarted"
    await assert_engines_hold(fleet.group, trainer.model, 1)

    while len(fleet.group.clients) < 2:  # there is no event to wait for
        assert not watch.done()
        await asyncio.sleep(0.1)
    await assert_engines_hold(fleet.group, trainer.model, 1)
    assert {worker.url for worker in await fleet.router.workers()} == set(fleet.group.urls)

    await weight_sync.sync()
    await assert_engines_hold(fleet.group, trainer.model, 2)
    watch.cancel()
    await asyncio.to_thread(trainer.sender.close)
