"""Ranks that torchrun started: each connects to rank 0, which is the driver.

On one host they connect through a Unix socket, and the kernel tells which user's process is the peer. On several hosts they prove that they
know the run's key and sign every message. torchrun's store accepts requests from anyone who reaches it, so it only passes on the address at
which rank 0 listens.
"""

import asyncio
import json
import logging
import os
import secrets
import signal
import socket
import struct
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import timedelta
from multiprocessing.connection import Connection

from torch.distributed import DistStoreError, TCPStore

from fuligo.config.launcher import world_size
from fuligo.engines.host import is_loopback, listening_socket, listening_store, use_loopback_interface
from fuligo.errors import ConfigError, TrainerError
from fuligo.quantities import count
from fuligo.trainer.ranks.compute_thread import ComputeThread
from fuligo.trainer.ranks.connected import ConnectedRank, RankConnection, serve
from fuligo.trainer.ranks.executor import RankExecutor
from fuligo.trainer.ranks.handle import InProcessRank, RankHandle
from fuligo.trainer.ranks.rank import Rank
from fuligo.trainer.ranks.signed import SignedConnection
from fuligo.trainer.ranks.world import Rendezvous

logger = logging.getLogger(__name__)
CONNECT_TIMEOUT_S = 300.0
"""Seconds for all ranks to connect to the driver once it listens."""
HANDSHAKE_TIMEOUT_S = 10.0
"""Seconds for a connecting process to identify itself."""
KEY_VARIABLE = "FULIGO_RANKS_KEY"
MIN_KEY_LENGTH = 32
_MAX_HELLO_BYTES = 1024
_WAIT = timedelta(hours=1)
"""Time of one wait for the driver's address; long, because torch writes a warning to stderr after each wait that times out."""
_ADDRESS = "fuligo/driver"
"""Key of the driver's address in torchrun's store: a port, or the name of a Unix socket."""


@dataclass(slots=True, frozen=True)
class TorchrunPlace:
    """Place of this process among those that torchrun started."""

    rank: int
    size: int
    rendezvous: Rendezvous
    on_one_host: bool

    def host_store(self) -> TCPStore | None:
        """Open torchrun's store on rank 0; return None if torchrun's agent has already opened it."""
        if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == str(True):
            return None
        return listening_store(self.listens_at, self.rendezvous.port)

    @property
    def listens_at(self) -> str:
        """Address at which rank 0 listens: MASTER_ADDR, or all interfaces if that is a loopback address and there are several hosts."""
        host = self.rendezvous.host
        return "0.0.0.0" if is_loopback(host) and not self.on_one_host else host

    def read_key(self) -> bytes | None:
        """Return the secret that ranks on several hosts share; None on one Linux host, where they need none.

        Raises ConfigError if FULIGO_RANKS_KEY is unset or too short.
        """
        if self.on_one_host and sys.platform == "linux":
            return None
        key = os.environ.get(KEY_VARIABLE, "")
        if len(key) < MIN_KEY_LENGTH:
            found = f"{KEY_VARIABLE} has {len(key)} characters" if key else f"{KEY_VARIABLE} is not set"
            raise ConfigError(
                f"cannot connect ranks of several hosts: {found}, but must have at least {MIN_KEY_LENGTH} characters; set it to the output "
                "of `openssl rand -hex 32`, the same on every host, in the environment of torchrun"
            )
        return key.encode()


def torchrun_place() -> TorchrunPlace | None:
    """Return the place of a process that torchrun started as one of several; None for any other process."""
    environment = os.environ
    size = world_size(environment)
    if size == 1:
        return None
    rendezvous = Rendezvous(environment["MASTER_ADDR"], int(environment["MASTER_PORT"]))
    return TorchrunPlace(int(environment["RANK"]), size, rendezvous, on_one_host=environment.get("LOCAL_WORLD_SIZE") == str(size))


async def connect_ranks(place: TorchrunPlace, size: int) -> list[RankHandle]:
    """Wait until all other ranks have connected to this process, which is rank 0, and return the handles of all ranks.

    Raises ConfigError if torchrun started another number of processes than `size` or the ranks have no common key, and TrainerError if a
    rank did not connect in time.
    """
    if place.size != size:
        raise ConfigError(
            f"torchrun started {place.size} process{'' if place.size == 1 else 'es'}, but the flags ask for "
            f"{count(size, 'trainer rank')}; set --actor-num-nodes and "
            "--actor-num-gpus-per-node to torchrun's --nnodes and --nproc-per-node"
        )
    key = place.read_key()
    if place.on_one_host:
        use_loopback_interface()
    executor = RankExecutor(Rank(0, size, rendezvous=place.rendezvous, store=place.host_store()))
    connecting = ComputeThread("torchrun-ranks")  # a daemon, so that a missing rank cannot keep this process alive
    try:
        others = await asyncio.wrap_future(connecting.submit(lambda: _accept_all(place, key)))
    finally:
        connecting.stop()
    return [InProcessRank(executor, socket.gethostname()), *others]


def follow(place: TorchrunPlace) -> None:
    """Serve as a rank other than 0 until the driver ends.

    Raises ConfigError if the ranks have no common key, and TrainerError if the driver cannot be reached, belongs to another user, or
    refused this rank.
    """
    key = place.read_key()
    try:
        connection = _connect(place, key)
    except OSError as error:
        raise TrainerError(f"cannot join the trainer as rank {place.rank}: {error}; see the output of rank 0") from error
    connection.send_bytes(json.dumps({"rank": place.rank, "host": socket.gethostname()}).encode())
    try:
        connection.recv_bytes(_MAX_HELLO_BYTES)
    except (EOFError, OSError) as error:
        advice = "see its output" if key is None else f"set the same {KEY_VARIABLE} on every host"
        raise TrainerError(f"cannot join the trainer as rank {place.rank}: the driver refused this process; {advice}") from error
    if place.on_one_host:
        use_loopback_interface()
    if threading.current_thread() is threading.main_thread():  # which alone gets signals
        signal.signal(signal.SIGINT, signal.SIG_IGN)  # torchrun sends Ctrl-C to all ranks; the driver may need them for a checkpoint
    serve(connection, RankExecutor(Rank(place.rank, place.size)))


def share_key(place: TorchrunPlace) -> bytes | None:
    """Return a secret that only the processes started by torchrun know, for a command without a driver.

    On one Linux host, rank 0 creates the secret and hands it out. Otherwise it is FULIGO_RANKS_KEY; if that is unset, log a warning on rank
    0 and return None.

    Raises ConfigError if FULIGO_RANKS_KEY is too short, and TrainerError if another process is missing, late or another user's.
    """
    if not place.on_one_host or sys.platform != "linux":
        if os.environ.get(KEY_VARIABLE):
            return place.read_key()
        if place.rank == 0:
            logger.warning(
                "%s is not set: anyone who reaches these hosts' ports can run code in this command; set it on every host, or close the "
                "network (SECURITY.md)",
                KEY_VARIABLE,
            )
        return None
    return _ask_for_key(place) if place.rank else _give_key(place)


def _ask_for_key(place: TorchrunPlace) -> bytes:
    try:
        return bytes(_connect(place, None).recv_bytes(_MAX_HELLO_BYTES))
    except (EOFError, OSError) as error:
        raise TrainerError(
            f"cannot join the ranks of torchrun as rank {place.rank}: {error or 'rank 0 has ended'}; restart torchrun"
        ) from error


def _give_key(place: TorchrunPlace) -> bytes:
    """Create a key, send it to all other ranks, and return it. Raises TrainerError if a rank does not connect in time."""
    key = secrets.token_bytes(MIN_KEY_LENGTH)
    num_left = place.size - 1
    for accepted in _connections(place, None):
        with accepted:
            try:
                _require_own_process(accepted)
            except PermissionError as error:
                logger.warning("refused a process that connected as a rank of torchrun: %s", error)
                continue
            accepted.settimeout(None)
            try:
                Connection(os.dup(accepted.fileno())).send_bytes(key)
            except OSError as error:
                raise TrainerError(f"a process of torchrun ended while it joined ({error.strerror}); restart torchrun") from None
        num_left -= 1
        if num_left == 0:
            return key
    raise TrainerError(f"{num_left} of torchrun's {place.size} processes did not connect within {CONNECT_TIMEOUT_S:g} s; see their output")


def _accept_all(place: TorchrunPlace, key: bytes | None) -> list[ConnectedRank]:
    """Wait until ranks 1 to size - 1 have connected, and return them. Raises TrainerError if a rank does not connect in time."""
    ranks: dict[int, ConnectedRank] = {}
    for accepted in _connections(place, key):
        try:
            rank = _introduced(accepted, key, place.size)
        except (EOFError, OSError, ValueError, TypeError, KeyError) as error:
            accepted.close()
            logger.warning("refused a process that connected as a trainer rank: %s", error or type(error).__name__)
            continue
        ranks.setdefault(rank.rank, rank)
        if len(ranks) == place.size - 1:
            return [ranks[rank] for rank in range(1, place.size)]
    missing = [str(rank) for rank in range(1, place.size) if rank not in ranks]
    named = f"{'rank' if len(missing) == 1 else 'ranks'} {', '.join(missing)}"
    raise TrainerError(f"trainer {named} (started by torchrun) did not connect within {CONNECT_TIMEOUT_S:g} s; see their output")


def _connections(place: TorchrunPlace, key: bytes | None) -> Iterator[socket.socket]:
    """Yield connections for `CONNECT_TIMEOUT_S`: to a port at `TorchrunPlace.listens_at`, or, without a key, to a Unix socket."""
    if key is None:
        listener, address = socket.socket(socket.AF_UNIX), f"fuligo-ranks-{secrets.token_hex(16)}"
        listener.bind(f"\0{address}")
        listener.listen()
    else:
        listener = listening_socket(place.listens_at)
        address = str(listener.getsockname()[1])
    with listener:
        place.rendezvous.connect().set(_ADDRESS, address)
        deadline = time.monotonic() + CONNECT_TIMEOUT_S
        while True:
            listener.settimeout(max(0.001, deadline - time.monotonic()))
            try:
                accepted, _ = listener.accept()
            except TimeoutError:
                return
            yield accepted


def _introduced(accepted: socket.socket, key: bytes | None, size: int) -> ConnectedRank:
    """Verify that the connecting process belongs to the run, and return the rank that it names.

    Raises OSError, EOFError, ValueError, TypeError or KeyError if it does not.
    """
    accepted.settimeout(HANDSHAKE_TIMEOUT_S)
    if key is None:
        _require_own_process(accepted)
        _set_receive_timeout(accepted, HANDSHAKE_TIMEOUT_S)
        connection: RankConnection = Connection(os.dup(accepted.fileno()))
    else:
        connection = SignedConnection(accepted, key, "driver")
    hello = json.loads(bytes(connection.recv_bytes(_MAX_HELLO_BYTES)))
    rank, host = int(hello["rank"]), str(hello["host"])
    if not 0 < rank < size:
        raise ValueError(f"it claims to be rank {rank} of {size}")
    connection.send_bytes(b"welcome")
    if key is None:
        _set_receive_timeout(accepted, 0)
        accepted.close()
    else:
        accepted.settimeout(None)
    return ConnectedRank(rank, host, connection)


def _connect(place: TorchrunPlace, key: bytes | None) -> RankConnection:
    store = place.rendezvous.connect()
    while True:
        try:
            store.wait([_ADDRESS], _WAIT)
            break
        except DistStoreError:
            continue
    address = store.get(_ADDRESS).decode()
    if key is None:
        stream = socket.socket(socket.AF_UNIX)
        stream.connect(f"\0{address}")
        _require_own_process(stream)
        return Connection(stream.detach())
    return SignedConnection(socket.create_connection((place.rendezvous.host, int(address))), key, "rank")


def _require_own_process(stream: socket.socket) -> None:
    """Check that a process of this user is at the other end of a Unix socket. Raises PermissionError if it belongs to another user."""
    credentials = struct.Struct("3i")
    _, user, _ = credentials.unpack(stream.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, credentials.size))
    if user != os.getuid():
        raise PermissionError(f"the process belongs to user {user}")


def _set_receive_timeout(stream: socket.socket, timeout_s: float) -> None:
    """Limit the time of reads from the socket, also through other objects that wrap it; 0 means no limit."""
    stream.settimeout(None)  # a blocking file descriptor, as `Connection` needs
    stream.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("ll", int(timeout_s), 0))
