"""Thread that reads traces and samples ahead of the page's requests."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence

from fuligo.observability.viewer.run import RunReader

logger = logging.getLogger(__name__)
BUDGET_S = 0.2
"""Seconds per run before the next run's turn."""
PAUSE_S = 1.0
"""Seconds to wait if nothing was new."""
ASLEEP_S = 60.0
"""Seconds without a request after which reading pauses."""


class Watcher:
    """Thread that keeps runs up to date while the page is open."""

    def __init__(self, runs: Sequence[RunReader]) -> None:
        self._runs = runs
        self._woken = threading.Event()
        self._last_visit_s = time.monotonic()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="watcher")

    def start(self) -> None:
        self._thread.start()

    def wake(self) -> None:
        """Continue reading, because a request arrived."""
        self._last_visit_s = time.monotonic()
        self._woken.set()

    def _watch(self) -> None:
        while True:
            changed = False
            for run in self._runs:
                try:
                    changed |= run.update_rest(BUDGET_S)
                except Exception:  # one broken run must not stop the others from updating
                    logger.exception("cannot read the run %s", run.path)
            if not changed:
                time.sleep(PAUSE_S)
            if time.monotonic() - self._last_visit_s > ASLEEP_S:
                self._woken.clear()
                self._woken.wait()
