"""Ranks that torchrun started, on any number of machines: each connects to rank 0, which drives."""

from __future__ import annotations

import asyncio
import os
import secrets
import socket
import struct
import time
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing import AuthenticationError
from multiprocessing.connection import Connection, answer_challenge, deliver_challenge

from torch.distributed import DistStoreError, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from fuligo.errors import ConfigError, TrainerError
from fuligo.trainer.ranks.compute_thread import ComputeThread
from fuligo.trainer.ranks.connected import ConnectedRank, serve
from fuligo.trainer.ranks.executor import RankExecutor
from fuligo.trainer.ranks.handle import InProcessRank, RankHandle
from fuligo.trainer.ranks.rank import Rank
from fuligo.trainer.ranks.world import Rendezvous

CONNECT_TIMEOUT_S = 300.0
"""For all ranks to connect to the driver once it listens."""
_HANDSHAKE_TIMEOUT = struct.pack("ll", 10, 0)
"""Seconds and microseconds that a process which connects has to prove that it knows the secret."""
_NO_TIMEOUT = struct.pack("ll", 0, 0)
_WAIT = timedelta(hours=1)
"""For the driver, before asking again: torch writes a warning to stderr each time that nothing came."""
_KEY = "fuligo/driver"
"""In torchrun's store: port and secret of the driver's listener."""


@dataclass(slots=True, frozen=True)
class TorchrunPlace:
    """Place of this process among those that torchrun started."""

    rank: int
    size: int
    rendezvous: Rendezvous
    """Address of torchrun's store."""

    def host_store(self) -> TCPStore | None:
        """Open the store on rank 0; None where torchrun's agent has opened it."""
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True):
            return None
        return TCPStore(self.rendezvous.host, self.rendezvous.port, is_master=True, wait_for_workers=False)


def torchrun_place() -> TorchrunPlace | None:
    """Return the place of a process that torchrun started as one of several; None for any other."""
    environment = os.environ
    if int(environment.get("WORLD_SIZE", "1")) <= 1:
        return None
    rendezvous = Rendezvous(environment["MASTER_ADDR"], int(environment["MASTER_PORT"]))
    return TorchrunPlace(int(environment["RANK"]), int(environment["WORLD_SIZE"]), rendezvous)


async def connect_ranks(place: TorchrunPlace, size: int) -> list[RankHandle]:
    """Wait until all other ranks have connected to this process, which is rank 0.

    Args:
        size: ranks that the trainer needs

    Raises:
        ConfigError: torchrun started another number of processes.
        TrainerError: a rank did not connect in time.
    """
    if place.size != size:
        raise ConfigError(
            f"torchrun started {place.size} processes, but the flags ask for {size} trainer ranks; set --actor-num-nodes and "
            "--actor-num-gpus-per-node to what torchrun starts"
        )
    executor = RankExecutor(Rank(0, size, rendezvous=place.rendezvous, store=place.host_store()))
    connecting = ComputeThread("torchrun-ranks")  # a daemon: a rank that never connects does not keep this process from ending
    try:
        others = await asyncio.wrap_future(connecting.submit(lambda: _accept_all(place)))
    finally:
        connecting.stop()
    return [InProcessRank(executor, socket.gethostname()), *others]


def follow(place: TorchrunPlace) -> None:
    """Be a rank other than the first until the driver ends."""
    connection = _connect(place)
    connection.send((place.rank, socket.gethostname()))
    serve(connection, RankExecutor(Rank(place.rank, place.size)))


def _accept_all(place: TorchrunPlace) -> list[ConnectedRank]:
    """Return ranks 1 to size - 1; only processes that read the secret from torchrun's store get past the handshake."""
    secret = secrets.token_bytes(32)
    ranks: dict[int, ConnectedRank] = {}
    with _listen(place.rendezvous.host) as listener:
        place.rendezvous.connect().set(_KEY, f"{listener.getsockname()[1]} {secret.hex()}")
        deadline = time.monotonic() + CONNECT_TIMEOUT_S
        while len(ranks) < place.size - 1:
            listener.settimeout(max(0.001, deadline - time.monotonic()))
            try:
                accepted, _ = listener.accept()
            except TimeoutError:
                missing = ", ".join(str(rank) for rank in range(1, place.size) if rank not in ranks)
                raise TrainerError(
                    f"trainer ranks {missing} (started by torchrun) did not connect within {CONNECT_TIMEOUT_S:g} s"
                ) from None
            with suppress(AuthenticationError, EOFError, OSError):
                connection = _authenticated(accepted, secret)
                rank, host = connection.recv()
                ranks[rank] = ConnectedRank(rank, host, connection)
    return [ranks[rank] for rank in range(1, place.size)]


def _listen(host: str) -> socket.socket:
    """Listen where the other ranks can connect: on the loopback interface if they are all here."""
    if host == "localhost" or host.startswith("127."):
        return socket.create_server((host, 0))
    if socket.has_dualstack_ipv6():
        return socket.create_server(("", 0), family=socket.AF_INET6, dualstack_ipv6=True)
    return socket.create_server(("", 0))


def _authenticated(accepted: socket.socket, secret: bytes) -> Connection:
    accepted.settimeout(None)
    accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    accepted.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _HANDSHAKE_TIMEOUT)
    connection = Connection(accepted.detach())
    deliver_challenge(connection, secret)
    answer_challenge(connection, secret)
    with socket.socket(fileno=os.dup(connection.fileno())) as authenticated:
        authenticated.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, _NO_TIMEOUT)
    return connection


def _connect(place: TorchrunPlace) -> Connection:
    store = place.rendezvous.connect()
    while True:
        try:
            store.wait([_KEY], _WAIT)
            break
        except DistStoreError:
            continue
    port, secret = store.get(_KEY).decode().split()
    connection = Connection(socket.create_connection((place.rendezvous.host, int(port))).detach())
    answer_challenge(connection, bytes.fromhex(secret))
    deliver_challenge(connection, bytes.fromhex(secret))
    return connection
