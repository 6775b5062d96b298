"""Campaign: one run, struck by faults and resumed after each that ends it, and the ledger at its end."""

import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from tests.chaos.faults import Fault, Run
from tests.chaos.machine import Machine
from tests.e2e.command import DEADLINE_S, train_command
from tests.e2e.processes import alive, descendants, interrupt, wait_until
from tests.e2e.records import TOKENS, assert_every_prompt_is_accounted_for, metrics, sample_rows
from tests.e2e.warm_children import ForkServer

NUM_SAMPLES = 4
EXACT: Mapping[str, Any] = {}
RESTARTING: Mapping[str, Any] = {"max_restarts": 1000}
WITHOUT_FAULTS: Mapping[str, Any] = {"rollout_timeout_s": 600}
"""An exact mode, with time for requests on a busy machine."""
EXACT_MODES = (EXACT, RESTARTING)
"""Modes whose runs, resumed or restarted, equal an uninterrupted one bit for bit."""
_DROPPING = {"over_sampling_batch_size": 8, "dynamic_sampling_filter_path": "tests.e2e.killers.drop_some"}
MODES: Mapping[str, Mapping[str, Any]] = {
    "sync": EXACT,
    "sync, restarts": RESTARTING,
    "partial": {**_DROPPING, "partial_rollout": True},
    "one-step": {**_DROPPING, "async_mode": "one-step"},
    "one-step, partial": {**_DROPPING, "async_mode": "one-step", "partial_rollout": True, "max_staleness": 1},
    "full": {**_DROPPING, "async_mode": "full", "max_staleness": 1, "over_sampling_batch_size": None},
    "full, restarts": {
        **_DROPPING,
        **RESTARTING,
        "async_mode": "full",
        "max_staleness": 1,
        "over_sampling_batch_size": None,
    },
}
NAMED_WITHIN_S = 60.0
RESTARTED_WITHIN_S = 120.0
"""Deadline of the third step after the loss of a rank, which is noticed after up to 40 s."""
CLEAN_WITHIN_S = 60.0
FIRST_STEPS = 3
"""Steps before the first fault: a resume from the checkpoint before the newest needs two."""
UNINTERRUPTED_S = 1800.0
"""Deadline of a whole run without faults, on a busy machine."""
LATER_STEPS = 2
"""Further steps after which a fault has had its effect: the rollout and the checkpoint that it struck are complete."""


@dataclass(slots=True, frozen=True)
class Strike:
    """Fault that struck, and its outcome."""

    fault: str
    ended: bool
    seconds: float
    """From the fault to the end of the run, or to the third recorded step."""
    said: str = ""
    """Last output of a run that it ended."""


@dataclass(slots=True)
class Campaign:
    """Run under faults."""

    machine: Machine
    checkpoint: Path
    prompts: Path
    num_rollouts: int
    mode: Mapping[str, Any]
    random: random.Random
    record: Callable[[Strike], None] = lambda strike: None
    """Called after each strike."""
    strikes: list[Strike] = field(default_factory=list)
    warm: ForkServer | None = None
    """Process on the machine from which the run and its own processes fork; without it, they start fresh."""
    _flags: dict[str, Any] = field(default_factory=dict)
    """Flags of only the next resume."""

    @property
    def run_dir(self) -> Path:
        return self.machine.disk.path / "run"

    @property
    def restarts(self) -> bool:
        """True if the run replaces trainers that it loses."""
        return "max_restarts" in self.mode

    def command(self, run_dir: Path) -> list[str]:
        """Return a run with two trainer ranks whose weight syncs are verified."""
        flags = {
            "rm_type": None,
            "custom_rm_path": "tests.e2e.killers.reward",
            "n_samples_per_prompt": NUM_SAMPLES,
            "num_rollout": self.num_rollouts,
            "actor_num_gpus_per_node": 2,
            "check_weight_update_equal": True,
            "rollout_timeout_s": 20,
            "save_interval": 1,
            "keep_checkpoints": 2,
            "save_on_sigterm": 60,
            "run_dir": run_dir,
            "load": run_dir / "checkpoints",
        }
        return train_command(self.checkpoint, self.prompts, **{**flags, **self.mode, **self._flags})

    def survive(self, faults: Iterator[Fault]) -> None:
        """Run to the end, struck by these faults; resume after each that ends the run.

        Raises:
            AssertionError: a fault did not have its required outcome, or something was left behind
        """
        ended = True
        while ended:
            with self._started() as run:
                self._flags = {}
                ended = self._strike_until_end(run, faults)
                code = run.driver.wait(timeout=DEADLINE_S)
                assert ended or code == 0, run.log.read_text()
        assert [record["step"] for record in metrics(self.run_dir)] == list(range(self.num_rollouts))
        assert not self.machine.shared_memory()

    def assert_ledger(self, uninterrupted: Path | None) -> None:
        """Check what the run recorded: equal to an uninterrupted run if there is one, else every prompt is accounted for."""
        if uninterrupted is not None:
            assert metrics(self.run_dir) == metrics(uninterrupted)
            assert sample_rows(self.run_dir, *TOKENS) == sample_rows(uninterrupted, *TOKENS)
        texts = [json.loads(line)["prompt"][0]["content"] for line in self.prompts.read_text().splitlines()]
        assert_every_prompt_is_accounted_for(self.run_dir, texts, num_rollouts=self.num_rollouts, num_samples=NUM_SAMPLES)

    def uninterrupted(self, run_dir: Path) -> Path:
        """Run the command of an exact mode without faults, unless this has been done; return its directory."""
        if not run_dir.exists():
            unfinished = run_dir.with_suffix(".unfinished")
            shutil.rmtree(unfinished, ignore_errors=True)
            command = replace(self, mode=WITHOUT_FAULTS)._on_machine(unfinished)
            with interrupt():
                ended = subprocess.run(
                    command, check=False, capture_output=True, text=True, env=self.machine.environment(), timeout=UNINTERRUPTED_S
                )
            assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
            unfinished.rename(run_dir)
        return run_dir

    def _strike_until_end(self, run: Run, faults: Iterator[Fault]) -> bool:
        """Strike at random moments; return True if a fault ended the run, False if it ended or will end by itself."""
        while True:
            num_steps = max(FIRST_STEPS, self._num_steps() + self.random.randint(0, 1))
            self._wait_for_step(run, num_steps, "a step")
            time.sleep(self.random.random() * 0.3)
            near_end = self._num_steps() >= self.num_rollouts - 2
            fault = None if near_end or run.driver.poll() is not None else next(faults, None)
            if fault is None:
                return False
            if self._strike(run, fault):
                return True

    def _num_steps(self) -> int:
        """Return the number of whole records; one that a fault tore apart does not count."""
        file = self.run_dir / "metrics.jsonl"
        return file.read_bytes().count(b"\n") if file.exists() else 0

    def _wait_for_step(self, run: Run, num_steps: int, what: str) -> None:
        """Wait until more steps than these are recorded, or the run has ended."""
        wait_until(lambda: self._num_steps() > num_steps or run.driver.poll() is not None, what, DEADLINE_S)

    def _strike(self, run: Run, fault: Fault) -> bool:
        """Strike and wait for the outcome; return True if the run ended."""
        family, num_steps, struck = descendants(run.driver.pid), self._num_steps(), time.monotonic()
        outcome = fault.outcome_in(restarts=self.restarts)
        fault.strike(run)
        if outcome != "ends":
            self._wait_for_step(run, num_steps + LATER_STEPS, f"steps after {fault.name}")
        else:
            wait_until(lambda: run.driver.poll() is not None, f"the end after {fault.name}")
        seconds, code = time.monotonic() - struck, run.driver.poll()
        ended = code not in (None, 0)
        if code == 0 and outcome == "ends":  # the run had ended before the fault
            fault.repair(run)
            return False
        said = " ".join(run.log.read_text(errors="replace").split())
        self.strikes.append(Strike(fault.name, ended, seconds, said[-300:] if ended else ""))
        self.record(self.strikes[-1])
        allowed_s = RESTARTED_WITHIN_S if self.restarts and fault.restarts else NAMED_WITHIN_S
        assert seconds <= allowed_s, f"{fault.name}: {seconds:.0f} s until {'the end' if ended else 'the third step'}: {said[-1000:]}"
        if ended:
            assert outcome != "continues", f"{fault.name} ended the run: {said[-3000:]}"
            self._assert_clean_end(fault, said, family)
            fault.repair(run)
            if fault.refused:
                self._assert_refused(run, fault)
        return ended

    def _assert_clean_end(self, fault: Fault, said: str, family: dict[int, str]) -> None:
        """Check the last output of a run, and that it left neither processes nor files."""
        assert "Traceback" not in said, f"{fault.name}: {said[-3000:]}"
        assert re.search(fault.says, said), f"{fault.name}: not named: {said[-3000:]}"
        wait_until(lambda: not alive(family), f"all processes have ended after {fault.name}", timeout_s=CLEAN_WITHIN_S)
        wait_until(lambda: not self.machine.shared_memory(), f"/dev/shm is empty after {fault.name}", timeout_s=CLEAN_WITHIN_S)

    def _assert_refused(self, run: Run, fault: Fault) -> None:
        """Check that a resume names the damaged checkpoint; have the next one use the checkpoint before it."""
        with self._started() as resumed:
            code = resumed.driver.wait(timeout=NAMED_WITHIN_S)
            said = " ".join(resumed.log.read_text().split())
        assert code not in (0, None) and re.search(fault.refused, said) and "Traceback" not in said, f"{fault.name}: {code}: {said[-3000:]}"
        assert run.newest_checkpoint().name in said, f"{fault.name}: {said[-3000:]}"
        self._flags = {"ckpt_step": run.num_saved() - 1}

    @contextmanager
    def _started(self) -> Iterator[Run]:
        """Start or resume the run; kill what is left of it at the end of the block."""
        log = self.machine.temporary.parent / "run.log"
        forks = nullcontext() if self.warm is None else self.warm.serving()
        with log.open("wb") as output, interrupt(), forks:
            driver = subprocess.Popen(
                self._on_machine(self.run_dir) if self.warm is None else self._train(self.run_dir),
                stdout=output,
                stderr=subprocess.STDOUT,
                env=self.machine.environment(),
                start_new_session=True,
            )
        try:
            yield Run(driver, log, self.machine, self.run_dir, self.prompts, self.random)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(driver.pid, signal.SIGKILL)
            driver.wait()

    def _on_machine(self, run_dir: Path) -> list[str]:
        return self.machine.command(*self._train(run_dir))

    def _train(self, run_dir: Path) -> list[str]:
        return [sys.executable, "-m", "fuligo", *self.command(run_dir)]
