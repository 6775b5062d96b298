"""Whether ranks still run: each counts up in the store, whatever else it does, and rank 0 sees who has stopped counting."""

from __future__ import annotations

import socket
import time

from torch.distributed import DistError, PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]

BEAT_S = 1.0
CHECK_S = 5.0
"""Between looks at the counts."""
SILENCE_S = 40.0
"""Without a count a rank is lost: stopped, its machine gone, or its interpreter stuck."""


def beat(store: TCPStore, rank: int) -> None:
    """Count until the store is gone. For a thread of its own, with a connection of its own."""
    beats = _beats(store)
    try:
        beats.set(_host(rank), socket.gethostname())
        while True:
            beats.add(_count(rank), 1)
            time.sleep(BEAT_S)
    except DistError:
        return


class Heartbeats:
    """Rank 0's end."""

    def __init__(self, store: TCPStore, size: int) -> None:
        self._store = _beats(store)
        self._seen: dict[int, tuple[int, float]] = dict.fromkeys(range(1, size), (0, 0.0))
        """By rank: its last count, and since when it stands there."""

    def silent(self) -> dict[int, str]:
        """Hosts of the ranks that began to count and have not for `SILENCE_S`, by rank."""
        now = time.monotonic()
        for rank, (seen, _) in self._seen.items():
            count = self._store.add(_count(rank), 0)
            if count != seen:
                self._seen[rank] = count, now
        lost = [rank for rank, (count, since) in self._seen.items() if count and now - since >= SILENCE_S]
        return {rank: self._store.get(_host(rank)).decode() for rank in lost}


def _beats(store: TCPStore) -> PrefixStore:
    return PrefixStore("fuligo/beats", store)


def _count(rank: int) -> str:
    return f"{rank}/count"


def _host(rank: int) -> str:
    return f"{rank}/host"
