"""Objects in collectives: those of ranks arrive, those of an attacker in the process group are not even unpickled."""

import os
import pickle
import secrets
import socket
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed.distributed_c10d as c10d
from torch.distributed import HashStore, TCPStore

from fuligo.engines.host import listening_store
from fuligo.errors import ConfigError, TrainerError
from fuligo.trainer.ranks import torchrun
from fuligo.trainer.ranks.rank import Rank
from fuligo.trainer.ranks.signed_objects import ForgedObjectError, sign_objects
from fuligo.trainer.ranks.torchrun import KEY_VARIABLE, TorchrunPlace, share_key
from fuligo.trainer.ranks.world import Rendezvous, join_world

KEY = b"0123456789abcdef" * 2


class Trap:
    """Object that creates a file when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.file,)


@pytest.fixture(autouse=True)
def plain_afterwards() -> Iterator[None]:
    yield
    sign_objects(None)


def received(content: bytes) -> Any:
    """Return the object that a rank unpickles from bytes received in a collective."""
    return c10d._tensor_to_object(torch.tensor(list(content), dtype=torch.uint8), len(content), None)


def sent(value: object) -> bytes:
    tensor, size = c10d._object_to_tensor(value, torch.device("cpu"), None)
    return tensor.numpy().tobytes()[: int(size)]


def test_objects_of_ranks_arrive() -> None:
    sign_objects(KEY)
    value = {"plan": [1, (2.5, "x")], "shape": torch.Size([3])}
    assert received(sent(value)) == value


@pytest.mark.parametrize("forged", ["unsigned", "another key", "changed", "cut off", "empty"])
def test_a_strangers_pickle_runs_nothing(forged: str, tmp_path: Path) -> None:
    trap = pickle.dumps(Trap(tmp_path / "ran"))
    if forged == "another key":
        sign_objects(b"another key")
        trap = sent(Trap(tmp_path / "ran"))
    sign_objects(KEY)
    own = sent("a value")
    contents = {"changed": own[:32] + trap, "cut off": own[:20], "empty": b""}
    with pytest.raises(ForgedObjectError, match="not signed by a rank"):
        received(contents.get(forged, trap))
    assert not (tmp_path / "ran").exists()


def test_a_trainer_of_one_rank_after_one_of_several_is_not_bound_by_their_key() -> None:
    sign_objects(KEY)
    join_world(0, 1, "cpu", store=HashStore(), key=None, timeout_s=60)
    dist.destroy_process_group()
    assert c10d._unpickler is pickle.Unpickler


def test_a_process_that_leaves_its_ranks_sends_plain_objects_again() -> None:
    join_world(0, 1, "cpu", store=HashStore(), key=KEY, timeout_s=60)
    assert c10d._pickler is not pickle.Pickler
    Rank(0, 1).leave()
    assert not dist.is_initialized()
    assert pickle.loads(sent("a value")) == "a value"


def test_the_key_of_ranks_is_new_for_each_rendezvous_and_not_shown() -> None:
    first, second = Rendezvous("127.0.0.1", 1), Rendezvous("127.0.0.1", 1)
    assert first.key != second.key and len(first.key) == 32
    assert "key" not in repr(first)
    assert pickle.loads(pickle.dumps(first)).key == first.key


class TestConversion:
    """Processes of torchrun without a driver, as those of `fuligo convert hf-to-dist`."""

    @pytest.fixture
    def store(self, monkeypatch: pytest.MonkeyPatch) -> TCPStore:
        monkeypatch.delenv(KEY_VARIABLE, raising=False)
        return listening_store("127.0.0.1")

    @staticmethod
    def place(store: TCPStore, rank: int, *, on_one_host: bool = True) -> TorchrunPlace:
        return TorchrunPlace(rank, 3, Rendezvous("127.0.0.1", store.port), on_one_host)

    def test_ranks_of_one_host_share_a_new_key(self, store: TCPStore) -> None:
        with ThreadPoolExecutor(3) as ranks:
            keys = list(ranks.map(lambda rank: share_key(self.place(store, rank)), (2, 0, 1), timeout=60))
        assert keys[0] is not None and len(keys[0]) == 32 and len(set(keys)) == 1

    @pytest.mark.long
    @pytest.mark.skipif(os.getuid() != 0, reason="needs root to act as another user")
    def test_another_user_gets_no_key(self, store: TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(torchrun, "CONNECT_TIMEOUT_S", 3.0)
        script = """
import os, socket, sys
os.setgid(65534)
os.setuid(65534)
stream = socket.socket(socket.AF_UNIX)
stream.connect("\\0" + sys.argv[1])
print(stream.recv(100))
"""
        with ThreadPoolExecutor(1) as ranks:
            first = ranks.submit(share_key, self.place(store, 0))
            command = [sys.executable, "-I", "-c", script, store.get(torchrun._ADDRESS).decode()]
            stranger = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
            assert stranger.stdout == "b''\n", stranger.stderr
            with pytest.raises(TrainerError, match="2 of torchrun's 3 processes did not connect"):
                first.result()

    def test_a_rank_takes_no_key_from_another_user(self, store: TCPStore, monkeypatch: pytest.MonkeyPatch) -> None:
        """Another user may announce a listener in the store, which accepts an address from anyone."""
        with socket.socket(socket.AF_UNIX) as impostor:
            impostor.bind("\0fuligo-test-impostor-" + secrets.token_hex(8))
            impostor.listen()
            store.set(torchrun._ADDRESS, impostor.getsockname()[1:].decode())
            monkeypatch.setattr(os, "getuid", lambda: 12345)
            with pytest.raises(TrainerError, match="cannot join the ranks of torchrun as rank 1: the process belongs to user"):
                share_key(self.place(store, 1))

    def test_several_hosts_take_the_key_of_the_environment_or_warn(
        self, store: TCPStore, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
    ) -> None:
        """Launch scripts written for slime convert on several hosts and set no key."""
        assert share_key(self.place(store, 0, on_one_host=False)) is None
        assert f"{KEY_VARIABLE} is not set: anyone who reaches these hosts' ports can run code" in caplog.text
        monkeypatch.setenv(KEY_VARIABLE, "0123456789abcdef" * 4)
        assert share_key(self.place(store, 1, on_one_host=False)) == b"0123456789abcdef" * 4
        monkeypatch.setenv(KEY_VARIABLE, "guess")
        with pytest.raises(ConfigError, match="has 5 characters"):
            share_key(self.place(store, 1, on_one_host=False))
