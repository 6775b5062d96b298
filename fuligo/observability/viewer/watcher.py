"""The thread that reads traces and samples ahead of the page's questions."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Sequence

from fuligo.observability.viewer.run import RunReader

logger = logging.getLogger(__name__)
BUDGET_S = 0.2
"""Of one run before the next has its turn."""
PAUSE_S = 1.0
"""Where nothing was new."""
ASLEEP_S = 60.0
"""Without a visitor for so long nothing is read."""


class Watcher:
    """Keeps the runs up to date while somebody looks."""

    def __init__(self, runs: Sequence[RunReader]) -> None:
        self._runs = runs
        self._woken = threading.Event()
        self._last_visit_s = time.monotonic()
        self._thread = threading.Thread(target=self._watch, daemon=True, name="watcher")

    def start(self) -> None:
        self._thread.start()

    def wake(self) -> None:
        """Somebody looks."""
        self._last_visit_s = time.monotonic()
        self._woken.set()

    def _watch(self) -> None:
        while True:
            changed = False
            for run in self._runs:
                try:
                    changed |= run.update_rest(BUDGET_S)
                except Exception:  # the page shows what there is; one broken run must not blind it for the others
                    logger.exception("%s cannot be read", run.path)
            if not changed:
                time.sleep(PAUSE_S)
            if time.monotonic() - self._last_visit_s > ASLEEP_S:
                self._woken.clear()
                self._woken.wait()
