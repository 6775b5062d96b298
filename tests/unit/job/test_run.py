"""Restarts within a run: from where the trainer begins again, and when its loss ends the run."""

import asyncio
import logging
import sys
from collections.abc import Callable
from contextlib import AsyncExitStack, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest.mock import AsyncMock

import pytest

from fuligo.checkpoint.store import CheckpointStore
from fuligo.config.command_line import parse
from fuligo.errors import ConfigError, RankError, TrainerError
from fuligo.job import run_job
from fuligo.job.engines import Engines
from fuligo.job.origin import Origin
from fuligo.job.run import Outcome, _load_trainer, _open, _start, run_config
from fuligo.job.stages import Opened
from fuligo.job.watch import Termination
from fuligo.trainer.ranks import trainer as trainer_module
from tests.unit.checkpoint.conftest import make_state

MODEL = Path(__file__).parents[3] / "fuligo" / "quickstart" / "assets" / "model"
DONE = Outcome(Path("run"), [])
LOST = RankError("trainer rank 1 on here is gone during `train`", "Its log says why.")


@pytest.mark.parametrize("flags", ["--rollout-backend sglang", "--rollout-backend sglang --colocate"])
async def test_engines_load_while_the_driver_opens_the_data(tmp_path: Path, flags: str) -> None:
    """The engine's process runs before the driver imports what it needs for the data."""
    python = tmp_path / "python"
    python.write_text("#!/bin/sh\nexec sleep 600\n")
    python.chmod(0o700)
    run = f"--hf-checkpoint {MODEL} --prompt-data unused --rm-type random --device cpu --rollout-num-gpus 1 --num-rollout 1"
    config = parse([*run.split(), *flags.split(), "--engine-python", str(python), "--run-dir", str(tmp_path / "run")]).config
    async with AsyncExitStack() as stack:
        await _open(config, stack, None)
        assert (tmp_path / "run" / "engine-0.txt").exists()


class Attempts:
    """Run whose attempts are scripted: each saves iterations, then ends as it must."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, *script: tuple[list[int], Exception | None]) -> None:
        self.origins: list[int] = []
        self.num_open = 0
        self.termination = Termination()
        self.before_end: Callable[[], None] = lambda: None
        self._script = list(script)
        self._store = CheckpointStore(tmp_path)
        self._first = Origin(0, 0, tmp_path / "model", None, None)
        for name in ("_open", "_begin", "_train"):
            monkeypatch.setattr(sys.modules[run_config.__module__], name, getattr(self, name))

    async def _open(self, config: object, stack: AsyncExitStack, lent: None) -> Opened:
        return cast(Opened, SimpleNamespace(origin=self._first, store=self._store))

    def _begin(self, opened: Opened, origin: Origin, stack: AsyncExitStack) -> Any:
        assert self.num_open == 0, "the records of the attempt before are closed"
        self.num_open += 1
        stack.callback(self._close)
        self.origins.append(origin.step)

    def _close(self) -> None:
        self.num_open -= 1

    async def _train(self, begun: object, termination: Termination) -> Outcome:
        async def write(directory: Path) -> None:
            (directory / "hf").mkdir()

        saved, error = self._script.pop(0)
        for iteration in saved:
            await self._store.save(iteration, write, make_state(iteration))
        self.before_end()
        if error is not None:
            raise error
        return DONE

    async def run(self, max_restarts: int) -> Outcome:
        return await run_config(parse(["--max-restarts", str(max_restarts)]).config, self.termination)


async def test_each_restart_begins_at_the_newest_checkpoint(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    attempts = Attempts(monkeypatch, tmp_path, ([], LOST), ([2, 4], LOST), ([], LOST), ([6], None))
    assert await attempts.run(3) is DONE
    assert attempts.origins == [0, 0, 4, 4]
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING] == [
        f"{LOST.event}; restarting the trainer from {where} (restart {number} of 3)"
        for number, where in enumerate(
            ["the start of the run", f"{tmp_path / 'iter_0000004'}, rollout 4", f"{tmp_path / 'iter_0000004'}, rollout 4"], 1
        )
    ]


async def test_what_an_interrupted_save_left_is_removed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    attempts = Attempts(monkeypatch, tmp_path, ([2], LOST), ([], None))
    unfinished = tmp_path / ".tmp_iter_0000004"
    attempts.before_end = lambda: unfinished.mkdir() if len(attempts.origins) == 1 else None
    await attempts.run(1)
    assert not unfinished.exists()


@pytest.mark.parametrize(
    ("max_restarts", "error", "num_attempts"),
    [(0, LOST, 1), (2, LOST, 3), (2, TrainerError("the loss is not finite"), 1)],
    ids=["no restarts", "too many losses", "another error"],
)
async def test_an_error_ends_the_run(
    max_restarts: int, error: TrainerError, num_attempts: int, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    attempts = Attempts(monkeypatch, tmp_path, *[([], error)] * 4)
    with pytest.raises(TrainerError) as raised:
        await attempts.run(max_restarts)
    assert raised.value is error
    assert len(attempts.origins) == num_attempts
    assert attempts.num_open == 0


async def test_a_run_that_shall_end_does_not_restart(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    attempts = Attempts(monkeypatch, tmp_path, ([], LOST))
    attempts.termination.requested = True
    with pytest.raises(RankError):
        await attempts.run(5)


def test_ranks_that_torchrun_started_are_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"RANK": 0, "WORLD_SIZE": 2, "LOCAL_WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": 1}.items():
        monkeypatch.setenv(name, str(value))
    with pytest.raises(ConfigError, match=r"--max-restarts 2: this run cannot replace ranks that torchrun started"):
        run_job(parse(["--max-restarts", "2"]).config)


def test_restarted_engines_wait_for_weights_while_there_is_no_trainer() -> None:
    async def later(engine: object) -> bool:
        return False

    policy, weights = SimpleNamespace(sync_restarted=later), SimpleNamespace(sync_restarted=object())
    engines = Engines(cast(Any, SimpleNamespace(policy=policy)), cast(Any, None))
    with pytest.raises(RankError), engines.synced_by(cast(Any, weights)):
        assert policy.sync_restarted is weights.sync_restarted
        raise LOST
    assert policy.sync_restarted is later


@pytest.mark.parametrize(
    ("backend", "is_starting", "expected"), [("sglang", True, True), ("sglang", False, False), ("embedded", True, False)]
)
async def test_a_trainer_is_warmed_up_while_engines_start_that_do_not_share_its_memory(
    backend: str, monkeypatch: pytest.MonkeyPatch, *, is_starting: bool, expected: bool
) -> None:
    """An embedded engine sizes its KV cache by the memory that is free when it starts, beside the trainer."""
    trainer = AsyncMock()
    monkeypatch.setattr(trainer_module, "LocalTrainer", lambda *_: trainer)
    monkeypatch.setattr(sys.modules[run_config.__module__], "trainer_settings", lambda *_, **__: None)
    launching = asyncio.get_running_loop().create_future()
    if not is_starting:
        launching.set_result(None)
    opened = SimpleNamespace(cluster=None, lent=None, standbys=None, directory=SimpleNamespace(path=Path("run")), launching=launching)
    origin = SimpleNamespace(initial_weights=Path("model"), checkpoint=None)
    config = parse(["--rollout-backend", backend]).config
    begun = cast(Any, SimpleNamespace(config=config, origin=origin, opened=opened, data=SimpleNamespace(num_rollout=1)))
    async with AsyncExitStack() as stack:
        assert await _load_trainer(begun, stack) is trainer
    assert trainer.warm_up.called == expected


async def test_engines_that_are_starting_outlive_a_lost_trainer(monkeypatch: pytest.MonkeyPatch) -> None:
    """The loss cancels the wait for the engines; the next trainer waits for the same ones (--max-restarts)."""
    monkeypatch.setattr(sys.modules[run_config.__module__], "_load_trainer", AsyncMock())
    ready, may_start = asyncio.Event(), asyncio.Event()

    async def launch() -> None:
        await ready.wait()

    launching = asyncio.create_task(launch())
    opened = SimpleNamespace(config=parse([]).config, launching=launching, engines_may_start=may_start)
    recorder = SimpleNamespace(phase=lambda *_: nullcontext())
    begun = cast(Any, SimpleNamespace(opened=opened, recorder=recorder, origin=SimpleNamespace(step=0)))
    starting = asyncio.create_task(_start(begun, AsyncExitStack()))
    await may_start.wait()
    starting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await starting
    ready.set()
    await launching
