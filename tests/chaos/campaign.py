"""Campaign: one run, struck by faults drawn from a seed and resumed after each, and the ledger at its end."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.chaos.faults import Fault, Run
from tests.e2e.command import DEADLINE_S, environment, succeed, train_command
from tests.e2e.processes import alive, descendants, shared_memory, wait_until
from tests.e2e.records import TOKENS, assert_every_prompt_is_accounted_for, metrics, sample_rows
from tests.small_disk import SmallDisk

NUM_SAMPLES = 4
EXACT: Mapping[str, Any] = {}
"""Mode whose resumed runs equal an uninterrupted one bit for bit."""

CLEAN_WITHIN_S = 120.0


@dataclass(slots=True, frozen=True)
class Strike:
    """Fault that struck, and its outcome."""

    fault: str
    ended: bool
    seconds: float
    """From the fault to the end of the run, or to the next recorded step."""


@dataclass(slots=True)
class Campaign:
    """Run under faults. It needs root, for a disk and a network of its own."""

    disk: SmallDisk
    checkpoint: Path
    prompts: Path
    num_rollouts: int
    mode: Mapping[str, Any]
    random: random.Random
    strikes: list[Strike] = field(default_factory=list)

    @property
    def run_dir(self) -> Path:
        return self.disk.path / "run"

    def command(self, run_dir: Path) -> list[str]:
        """Return a run with two trainer ranks whose weight syncs are verified."""
        return train_command(
            self.checkpoint,
            self.prompts,
            **self.mode,
            rm_type=None,
            custom_rm_path="tests.e2e.killers.reward",
            n_samples_per_prompt=NUM_SAMPLES,
            num_rollout=self.num_rollouts,
            actor_num_gpus_per_node=2,
            check_weight_update_equal=True,
            save_interval=1,
            keep_checkpoints=2,
            save_on_sigterm=60,
            run_dir=run_dir,
            load=run_dir / "checkpoints",
        )

    def survive(self, faults: Iterator[Fault]) -> None:
        """Run to the end, struck by these faults; resume after each that ends the run.

        Raises:
            AssertionError: a fault had another outcome than it must; something was left behind
        """
        ended = True
        while ended:
            with self._started() as run:
                ended = self._strike_until_end(run, faults)
                code = run.driver.wait(timeout=DEADLINE_S)
                assert ended or code == 0, run.log.read_text()
        assert [record["step"] for record in metrics(self.run_dir)] == list(range(self.num_rollouts))

    def assert_ledger(self, uninterrupted: Path | None) -> None:
        """Check what the run recorded: equal to an uninterrupted run if there is one, else every prompt is accounted for."""
        if uninterrupted is not None:
            assert metrics(self.run_dir) == metrics(uninterrupted)
            assert sample_rows(self.run_dir, *TOKENS) == sample_rows(uninterrupted, *TOKENS)
        texts = [json.loads(line)["prompt"][0]["content"] for line in self.prompts.read_text().splitlines()]
        assert_every_prompt_is_accounted_for(self.run_dir, texts, num_rollouts=self.num_rollouts, num_samples=NUM_SAMPLES)

    def _strike_until_end(self, run: Run, faults: Iterator[Fault]) -> bool:
        """Strike at random moments; return True if a fault ended the run, False if it ended or will end by itself."""
        while True:
            self._wait_for_step(run, len(metrics(self.run_dir)) + self.random.randint(0, 1), "a step")
            time.sleep(self.random.random() * 0.3)
            near_end = len(metrics(self.run_dir)) >= self.num_rollouts - 1
            fault = None if near_end or run.driver.poll() is not None else next(faults, None)
            if fault is None:
                return False
            if self._strike(run, fault):
                return True

    def _wait_for_step(self, run: Run, num_steps: int, what: str) -> None:
        """Wait until more steps than these are recorded, or the run has ended."""
        wait_until(lambda: len(metrics(self.run_dir)) > num_steps or run.driver.poll() is not None, what, DEADLINE_S)

    def _strike(self, run: Run, fault: Fault) -> bool:
        """Strike and wait for the outcome; return True if the run ended."""
        family, num_steps, struck = descendants(run.driver.pid), len(metrics(self.run_dir)), time.monotonic()
        fault.strike(run)
        if fault.outcome != "ends":
            self._wait_for_step(run, num_steps, f"a step after {fault.name}")
        else:
            wait_until(lambda: run.driver.poll() is not None, f"the end after {fault.name}")
        seconds, ended = time.monotonic() - struck, run.driver.poll() not in (None, 0)
        self.strikes.append(Strike(fault.name, ended, seconds))
        if ended:
            said = run.log.read_text()
            assert fault.outcome != "continues", f"{fault.name} ended the run: {said}"
            assert "Traceback" not in said, f"{fault.name}: {said}"
            wait_until(lambda: not alive(family), f"all processes have ended after {fault.name}", timeout_s=CLEAN_WITHIN_S)
            wait_until(lambda: not shared_memory(list(family)), f"shared memory is given back after {fault.name}", timeout_s=CLEAN_WITHIN_S)
        return ended

    @contextmanager
    def _started(self) -> Iterator[Run]:
        """Start or resume the run in a network namespace of its own; kill what is left of it at the end of the block."""
        script = 'ip link set lo up && exec "$@"'
        command = ["unshare", "--net", "sh", "-c", script, "sh", sys.executable, "-m", "fuligo", *self.command(self.run_dir)]
        log = self.disk.path.parent / "run.log"
        with log.open("wb") as output:
            driver = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=environment(), start_new_session=True)
        try:
            yield Run(driver, log, self.disk, self.random)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(driver.pid, signal.SIGKILL)
            driver.wait()


def uninterrupted_run(campaign: Campaign, run_dir: Path) -> Path:
    """Run the campaign's command without faults."""
    succeed(*campaign.command(run_dir))
    return run_dir
