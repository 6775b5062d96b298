"""A weight sync that engines receive in one call: its keys in the group's store, and the waits for its broadcasts."""

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch.distributed as dist

from fuligo.errors import EngineError

POLL_S = 5e-5
"""Seconds between checks of a broadcast, which takes about 1.5 ms over NVLink (512 MiB)."""
POLL_FREE_S = 0.05
"""Seconds between checks of whether a group that was left can be freed."""
FAILURE_POLL_S = 1.0
"""Seconds between checks of whether a rank has failed, while a broadcast waits for it."""


@dataclass(slots=True)
class Stream:
    """Buckets of one sync that engines receive in one call."""

    number: int
    """Index among the streams of the group."""
    num_buckets: int = 0
    in_flight: dist.Work | None = None
    """Broadcast of the latest bucket."""

    def key(self, bucket: int) -> str:
        return f"{self.number}/{bucket}"

    def outcome_key(self, rank: int) -> str:
        """Return the key under which a rank of the group writes why it did not load the stream, or an empty text if it did."""
        return f"{self.number}/rank/{rank}"


def wait_until_sent(broadcast: dist.Work, timeout_s: float, failure: Callable[[], str]) -> None:
    """Wait for a broadcast alone; waiting for the device would include the kernels that gather the next bucket.

    Raises EngineError after `timeout_s`, or with the text of `failure`, which is called every `FAILURE_POLL_S`, if it is not empty, and
    RuntimeError if the broadcast failed.
    """
    start_s = time.monotonic()
    next_s = start_s + FAILURE_POLL_S
    while not broadcast.is_completed():
        time.sleep(POLL_S)
        if time.monotonic() > next_s:
            next_s += FAILURE_POLL_S
            if found := failure():
                raise EngineError(found)
            if time.monotonic() > start_s + timeout_s:
                raise EngineError(f"timed out after {timeout_s:g} s")
    broadcast.wait()  # raises its error


def free_when_sent(group: dist.ProcessGroup, stream: Stream, worker: threading.Thread) -> None:
    """Keep the group, in a daemon thread, until its broadcasts have ended: gloo waits for them when it frees a group, and a peer may hang.

    `worker`: thread that may be starting a broadcast.
    """

    def keep(kept: list[dist.ProcessGroup]) -> None:
        worker.join()
        while stream.in_flight is not None and not stream.in_flight.is_completed():
            time.sleep(POLL_FREE_S)
        stream.in_flight = None  # it keeps connections open, and tracebacks may keep the stream
        kept.clear()

    threading.Thread(target=keep, args=([group],), name="weights-broadcast-end", daemon=True).start()
