"""Thread in which embedded engines compute: one engine, or in turn the engines of several runs that share base weights."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from fuligo.engines.embedded.engine import EmbeddedEngine


class EngineThread:
    """Thread that gives each of its engines a turn: its commands, then one step."""

    def __init__(self) -> None:
        self.wake = threading.Condition()
        """Condition that guards what other threads hand to the engines; notified when there is work."""
        self._engines: list[EmbeddedEngine] = []
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def add(self, engine: EmbeddedEngine) -> None:
        """Add an engine for the thread to step; call before `start`."""
        self._engines.append(engine)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float) -> None:
        with self.wake:
            self._stopping = True
            self.wake.notify()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while self._wait_for_work():
            for engine in self._engines:
                engine.take_turn()

    def _wait_for_work(self) -> bool:
        """Sleep until there is work; return False if the engines are to stop."""
        with self.wake:
            while not (self._stopping or any(engine.has_work() for engine in self._engines)):
                self.wake.wait()
            return not self._stopping
