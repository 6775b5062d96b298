"""Ranks of torchrun connect to rank 0; other users' processes get neither a rank nor an answer."""

import asyncio
import json
import os
import pickle
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import closing
from multiprocessing.connection import Connection
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from fuligo.engines.host import listening_store
from fuligo.errors import ConfigError, TrainerError
from fuligo.trainer.ranks import torchrun
from fuligo.trainer.ranks.commands import SharedCommand
from fuligo.trainer.ranks.handle import PING
from fuligo.trainer.ranks.signed import SignedConnection
from fuligo.trainer.ranks.torchrun import KEY_VARIABLE, TorchrunPlace, connect_ranks, follow, torchrun_place
from fuligo.trainer.ranks.world import Rendezvous

KEY = "0123456789abcdef" * 4


class Trap:
    """Object that creates a file when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.file,)


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> TCPStore:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    monkeypatch.setenv(KEY_VARIABLE, KEY)
    return listening_store("127.0.0.1")


def place(store: TCPStore, rank: int, size: int, *, on_one_host: bool) -> TorchrunPlace:
    return TorchrunPlace(rank, size, Rendezvous("127.0.0.1", store.port), on_one_host)


@pytest.mark.parametrize("on_one_host", [True, False])
async def test_ranks_of_torchrun_connect_to_rank_0(store: TCPStore, on_one_host: bool) -> None:
    places = [place(store, rank, 3, on_one_host=on_one_host) for rank in range(3)]
    followers = [threading.Thread(target=follow, args=(its,), daemon=True) for its in (places[2], places[1])]
    for follower in followers:
        follower.start()
    ranks = await connect_ranks(places[0], 3)
    assert [rank.rank for rank in ranks] == [0, 1, 2]
    assert all(rank.host == socket.gethostname() for rank in ranks)
    answers = await asyncio.gather(*(rank.run(SharedCommand(PING)) for rank in ranks))
    assert all(answer.error is None for answer in answers)
    await asyncio.gather(*(rank.close(failed=False) for rank in ranks))
    for follower in followers:
        follower.join(60)
        assert not follower.is_alive()


@pytest.mark.long
@pytest.mark.parametrize("stranger", ["silent about the key", "with another key", "as rank 0", "too long"])
async def test_a_process_without_the_key_gets_no_rank(
    store: TCPStore, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stranger: str
) -> None:
    monkeypatch.setattr(torchrun, "CONNECT_TIMEOUT_S", 1.0)
    monkeypatch.setattr(torchrun, "HANDSHAKE_TIMEOUT_S", 1.0)
    connecting = asyncio.create_task(connect_ranks(place(store, 0, 2, on_one_host=False), 2))
    port = int(await asyncio.to_thread(store.get, torchrun._ADDRESS))

    def intrude() -> None:
        with socket.create_connection(("127.0.0.1", port)) as stream:
            if stranger == "silent about the key":
                Connection(os.dup(stream.fileno())).send(Trap(tmp_path / "ran"))
                return
            connection = SignedConnection(stream, b"another key" if stranger == "with another key" else KEY.encode(), "rank")
            rank = 0 if stranger == "as rank 0" else 1
            hello = json.dumps({"rank": rank, "host": "x" * (2000 if stranger == "too long" else 1)}).encode()
            with pytest.raises((EOFError, ConnectionError)):
                connection.send_bytes(pickle.dumps(Trap(tmp_path / "ran")) if stranger == "with another key" else hello)
                connection.recv_bytes()

    await asyncio.to_thread(intrude)
    with pytest.raises(TrainerError, match=r"trainer rank 1 \(started by torchrun\) did not connect within 1 s"):
        await connecting
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("key", [b"another key", KEY.encode()], ids=["with another key", "that replays"])
def test_a_rank_takes_no_command_from_a_stranger(store: TCPStore, tmp_path: Path, key: bytes) -> None:
    """The store accepts an address from anyone, so another user may announce a listener."""
    with socket.create_server(("127.0.0.1", 0)) as impostor:
        store.set(torchrun._ADDRESS, str(impostor.getsockname()[1]))
        failed: list[Exception] = []

        def rank() -> None:
            try:
                follow(place(store, 1, 2, on_one_host=False))
            except Exception as error:
                failed.append(error)

        following = threading.Thread(target=rank, daemon=True)
        following.start()
        stream, _ = impostor.accept()
        with closing(stream):
            # A replay: what the driver sent on another connection is signed with the run's key, for that connection's nonces.
            connection = SignedConnection(stream, key, "driver")
            if key == KEY.encode():
                connection._own_key = b"of another connection"
            connection.send_bytes(pickle.dumps(Trap(tmp_path / "ran")))
            following.join(60)
    assert not following.is_alive()
    assert isinstance(failed[0], TrainerError)
    assert f"set the same {KEY_VARIABLE} on every host" in str(failed[0])
    assert not (tmp_path / "ran").exists()


def test_a_rank_that_cannot_reach_the_driver_says_so(store: TCPStore) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        store.set(torchrun._ADDRESS, str(closed.getsockname()[1]))
    with pytest.raises(TrainerError, match=r"cannot join the trainer as rank 1: .*refused; see the output of rank 0"):
        follow(place(store, 1, 2, on_one_host=False))


async def test_a_rank_that_does_not_connect_in_time_is_named(store: TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torchrun, "CONNECT_TIMEOUT_S", 0.1)
    with pytest.raises(TrainerError, match=r"trainer rank 1 \(started by torchrun\) did not connect within 0.1 s"):
        await connect_ranks(place(store, 0, 2, on_one_host=True), 2)


@pytest.fixture
def listening(store: TCPStore) -> Iterator[str]:
    """Yield the name of the Unix socket on which rank 0 waits for rank 1, which connects after the test."""

    async def wait() -> None:
        ranks = await connect_ranks(place(store, 0, 2, on_one_host=True), 2)
        await asyncio.gather(*(rank.close(failed=False) for rank in ranks))

    waiting = threading.Thread(target=lambda: asyncio.run(wait()), daemon=True)
    waiting.start()
    yield store.get(torchrun._ADDRESS).decode()
    rank = threading.Thread(target=follow, args=(place(store, 1, 2, on_one_host=True),), daemon=True)
    rank.start()
    for thread in (waiting, rank):
        thread.join(60)
        assert not thread.is_alive()


@pytest.mark.skipif(os.getuid() != 0, reason="needs root to act as another user")
def test_another_user_of_the_host_gets_no_rank(listening: str) -> None:
    script = """
import json, os, socket, sys
from multiprocessing.connection import Connection
os.setgid(65534)
os.setuid(65534)
stream = socket.socket(socket.AF_UNIX)
stream.connect("\\0" + sys.argv[1])
connection = Connection(stream.detach())
try:
    connection.send_bytes(json.dumps({"rank": 1, "host": "mine"}).encode())
    print(connection.recv_bytes())
except (EOFError, ConnectionError):
    print("refused")
"""
    command = [sys.executable, "-I", "-c", script, listening]
    stranger = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert stranger.stdout == "refused\n", stranger.stderr


@pytest.mark.parametrize(("key", "found"), [("", "is not set"), ("guess", "has 5 characters")])
def test_ranks_of_several_hosts_need_a_key(monkeypatch: pytest.MonkeyPatch, key: str, found: str) -> None:
    for name, value in {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv(KEY_VARIABLE, key)
    its = torchrun_place()
    assert its is not None
    with pytest.raises(ConfigError, match=f"cannot connect ranks of several hosts: {KEY_VARIABLE} {found}"):
        its.read_key()
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    on_one_host = torchrun_place()
    assert on_one_host is not None
    assert on_one_host.read_key() is None
