"""Tensors between processes through shared memory, and what is left of it when one of them dies."""

from __future__ import annotations

import base64
import os
import pickle
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

from fuligo.errors import WeightSyncError
from fuligo.weights.checksum import weights_checksum
from fuligo.weights.payload import SHARED_MEMORY, decode_named_tensors, encode_named_tensors, shared_payload

pytestmark = pytest.mark.skipif(not SHARED_MEMORY.is_dir(), reason="needs a POSIX shared memory file system")

RECEIVER = """
import sys
from fuligo.weights.checksum import weights_checksum
from fuligo.weights.payload import decode_named_tensors
for payload in sys.stdin:
    tensors = decode_named_tensors(payload.strip())
    digest = weights_checksum(tensors)
    del tensors
    print(digest.checksum, flush=True)
"""
SENDER = """
import sys, torch
from fuligo.weights.payload import encode_named_tensors
payload = encode_named_tensors([("a", torch.ones(1000))])
print(payload, flush=True)
sys.stdin.readline()
"""


def some_tensors() -> list[tuple[str, torch.Tensor]]:
    return [
        ("model.weight", torch.randn(300, 7)),
        ("half", torch.randn(5).bfloat16()),
        ("parameter", torch.nn.Parameter(torch.randn(2, 2))),
        ("transposed", torch.randn(4, 6).t()),
    ]


def files_of(pid: int) -> list[Path]:
    return list(SHARED_MEMORY.glob(f"torch_{pid}_*"))


def gone(pid: int, deadline_s: float = 20.0) -> bool:
    end = time.monotonic() + deadline_s
    while files_of(pid):
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True


@pytest.fixture(scope="module")
def receiver() -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", RECEIVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    yield process  # pyright: ignore[reportReturnType]
    process.kill()
    process.wait()


def received(process: subprocess.Popen[str], payload: str) -> str:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(payload + "\n")
    process.stdin.flush()
    return process.stdout.readline().strip()


def test_another_process_gets_the_same_bytes_and_nothing_stays_behind(receiver: subprocess.Popen[str]) -> None:
    tensors = some_tensors()
    assert received(receiver, encode_named_tensors(tensors)) == weights_checksum(tensors).checksum
    assert gone(os.getpid())


def test_several_receivers_may_read_one_payload(receiver: subprocess.Popen[str]) -> None:
    tensors = some_tensors()
    payload = encode_named_tensors(tensors, num_receivers=3)
    assert [received(receiver, payload) for _ in range(3)] == [weights_checksum(tensors).checksum] * 3
    assert gone(os.getpid())


def test_the_senders_tensors_stay_where_they_are() -> None:
    tensor = torch.randn(10)
    place = tensor.data_ptr()
    with shared_payload([("a", tensor)]) as payload:
        decoded = dict(decode_named_tensors(payload))["a"]
        assert torch.equal(decoded, tensor)
        assert decoded.data_ptr() != place == tensor.data_ptr()
    assert not tensor.is_shared()


def test_of_a_payload_that_nobody_took_nothing_stays() -> None:
    with pytest.raises(ConnectionError), shared_payload([("a", torch.ones(1000)), ("b", torch.empty(0))]) as payload:
        assert files_of(os.getpid())
        raise ConnectionError("the engine died")
    assert not files_of(os.getpid())
    with pytest.raises(WeightSyncError, match="is the sender on this machine"):
        decode_named_tensors(payload)


def test_who_opened_a_payload_before_it_failed_keeps_it(receiver: subprocess.Popen[str]) -> None:
    tensors = some_tensors()
    with pytest.raises(ConnectionError), shared_payload(tensors, num_receivers=3) as payload:
        opened = decode_named_tensors(payload)
        assert received(receiver, payload) == weights_checksum(tensors).checksum
        raise ConnectionError("the third of three engines died")
    assert not files_of(os.getpid())
    assert weights_checksum(opened) == weights_checksum(tensors)
    del opened
    assert received(receiver, encode_named_tensors(tensors)) == weights_checksum(tensors).checksum


def test_a_killed_sender_leaves_nothing() -> None:
    process = subprocess.Popen([sys.executable, "-c", SENDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    payload = process.stdout.readline()
    assert files_of(process.pid)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert gone(process.pid)
    with pytest.raises(WeightSyncError, match="is the sender on this machine"):
        decode_named_tensors(payload.strip())


IN_SMALL_MEMORY = """
mount -t tmpfs -o size=1m tmpfs /dev/shm || exit 77
"$@"
for _ in $(seq 200); do test -z "$(ls /dev/shm)" && exit; sleep 0.1; done
ls /dev/shm
"""
"""Runs a command where nobody else sees it, and says what it left in shared memory."""
LARGE_SENDER = """
import torch
from fuligo.errors import WeightSyncError
from fuligo.weights.payload import shared_payload
try:
    with shared_payload([(name, torch.ones(100_000)) for name in "abc"]):
        print("it fits")
except WeightSyncError as error:
    print(error)
"""


def test_full_shared_memory_is_named_and_given_back() -> None:
    command = ["unshare", "--mount", "bash", "-c", IN_SMALL_MEMORY, "bash", sys.executable, "-c", LARGE_SENDER]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    if done.returncode == 77 or "unshare" in done.stderr:
        pytest.skip(f"a file system cannot be mounted here: {done.stderr}")
    said, *left = done.stdout.splitlines()
    assert said.startswith("a bucket of weights does not get into shared memory: ") and "No space left on device" in said
    assert "of 1 MiB are free on the file system /dev/shm). Give it more" in said
    assert left == []


class Evil:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("true",)


@pytest.mark.parametrize(
    ("payload", "cause"),
    [
        (base64.b64encode(pickle.dumps([("a", Evil())])).decode(), "system is not admitted"),
        (base64.b64encode(pickle.dumps([("a", eval)])).decode(), "eval is not admitted"),
        (base64.b64encode(pickle.dumps([("a", torch.load)])).decode(), "load is not admitted"),
        (base64.b64encode(pickle.dumps(["a"])).decode(), "not a list of"),
        (base64.b64encode(pickle.dumps({"a": 1})).decode(), "not a list of"),
        (base64.b64encode(b"hello").decode(), "not a list of"),
        ("not base64!", "not a list of"),
        ("", "not a list of"),
    ],
)
def test_a_payload_can_do_nothing_but_rebuild_tensors(payload: str, cause: str) -> None:
    with pytest.raises(WeightSyncError, match=cause):
        decode_named_tensors(payload)
