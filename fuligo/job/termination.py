"""Course of a run after SIGTERM: it ends at once, or after a checkpoint of the last complete rollout (--save-on-sigterm)."""

import asyncio
import logging
from collections.abc import Iterator
from contextlib import contextmanager

logger = logging.getLogger(__name__)


class Termination:
    """Request to end a run, and the time that it may take to save first."""

    def __init__(self, save_within_s: float | None = None) -> None:
        """Create a request that has not been made.

        Args:
            save_within_s: seconds for the step in progress and its checkpoint; None ends the run at once
        """
        self._save_within_s = save_within_s
        self._can_save = False
        self.requested = False
        self.end_of_rollouts = asyncio.Event()
        """Set when no further rollout may be sampled or trained on."""

    def request(self, run: asyncio.Task[object]) -> None:
        """End the run: at once, or within the time for a checkpoint, which further requests do not shorten."""
        first, self.requested = not self.requested, True
        if not self._can_save or self._save_within_s is None:
            run.cancel()
            return
        if not first:
            return
        logger.warning("received SIGTERM; saving the last complete rollout within %g s", self._save_within_s)
        self.end_of_rollouts.set()
        asyncio.get_running_loop().call_later(self._save_within_s, self._give_up, run)

    @contextmanager
    def may_save(self) -> Iterator[None]:
        """Let a request in this block wait for a checkpoint."""
        self._can_save = True
        try:
            yield
        finally:
            self._can_save = False

    def _give_up(self, run: asyncio.Task[object]) -> None:
        if self._can_save:
            logger.warning("no checkpoint within %g s of SIGTERM (--save-on-sigterm); ending without it", self._save_within_s)
        run.cancel()
