"""Tensors passed between processes through shared memory, and cleanup when one of the processes dies."""

import base64
import io
import os
import pickle
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fuligo.errors import WeightSyncError
from fuligo.formats.payload import SHARED_MEMORY, SharedCopies, _TensorUnpickler, decode_named_tensors, shared_payload
from fuligo.formats.weight_manifest import WeightsDigest, weights_checksum
from tests.e2e.processes import alive, descendants, nothing_left_in_shared_memory

pytestmark = pytest.mark.skipif(not SHARED_MEMORY.is_dir(), reason="needs a POSIX shared memory file system")

RECEIVER = """
import sys
from fuligo.formats.weight_manifest import weights_checksum
from fuligo.formats.payload import decode_named_tensors
for payload in sys.stdin:
    tensors = decode_named_tensors(payload.strip())
    digest = weights_checksum(tensors)
    del tensors
    print(digest.checksum, flush=True)
"""
SENDER = """
import sys, torch
from fuligo.formats.payload import shared_payload
with shared_payload([("a", torch.ones(100_000))]) as payload:
    print(payload, flush=True)
    sys.stdin.readline()
"""


def some_tensors() -> list[tuple[str, torch.Tensor]]:
    return [
        ("model.weight", torch.randn(300, 7)),
        ("half", torch.randn(5).bfloat16()),
        ("parameter", torch.nn.Parameter(torch.randn(2, 2))),
        ("transposed", torch.randn(4, 6).t()),
        ("scalar", torch.tensor(3.5)),
        ("empty", torch.empty(0, 4)),
        ("bits", torch.tensor([True, False, True])),
        ("half a view", torch.randn(6).bfloat16()[3:]),
        ("eighth", torch.randn(9).to(torch.float8_e4m3fn)),
    ]


def own_descriptors() -> dict[str, str]:
    """Return this process's open files by descriptor."""
    return {link.name: str(link.readlink()) for link in Path("/proc/self/fd").iterdir() if link.is_symlink()}


@pytest.fixture(scope="module")
def receiver() -> subprocess.Popen[str]:
    process = subprocess.Popen([sys.executable, "-c", RECEIVER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    yield process
    process.kill()
    process.wait()


def received(process: subprocess.Popen[str], payload: str) -> str:
    assert process.stdin is not None and process.stdout is not None
    process.stdin.write(payload + "\n")
    process.stdin.flush()
    return process.stdout.readline().strip()


@pytest.mark.long
def test_several_processes_get_the_same_bytes_and_nothing_stays_behind(receiver: subprocess.Popen[str]) -> None:
    tensors = some_tensors()
    open_before = own_descriptors().keys()
    with nothing_left_in_shared_memory():
        with shared_payload(tensors) as payload:
            assert own_descriptors().keys() > open_before
            assert [received(receiver, payload) for _ in range(3)] == [weights_checksum(tensors).checksum] * 3
        assert own_descriptors().keys() <= open_before


@pytest.mark.long
def test_no_process_of_torchs_outlives_the_sender(receiver: subprocess.Popen[str]) -> None:
    """The receiver (an engine that somebody else runs) stays alive."""
    process = subprocess.Popen([sys.executable, "-c", SENDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    assert received(receiver, process.stdout.readline().strip()) == weights_checksum([("a", torch.ones(100_000))]).checksum
    children = descendants(process.pid)
    process.communicate("\n", timeout=240)
    assert process.returncode == 0
    assert not alive(children)
    assert receiver.poll() is None


def test_the_senders_tensors_stay_where_they_are() -> None:
    tensor = torch.randn(10)
    place = tensor.data_ptr()
    with shared_payload([("a", tensor)]) as payload:
        decoded = dict(decode_named_tensors(payload))["a"]
        assert torch.equal(decoded, tensor)
        assert decoded.data_ptr() != place == tensor.data_ptr()
    assert not tensor.is_shared()


def test_a_receiver_that_comes_late_is_refused() -> None:
    with pytest.raises(ConnectionError), shared_payload([("a", torch.ones(1000)), ("b", torch.empty(0))]) as payload:
        assert [tensor.shape for _, tensor in decode_named_tensors(payload)] == [(1000,), (0,)]
        raise ConnectionError("the engine died")
    with pytest.raises(WeightSyncError, match="check that the sender is alive and on this machine"):
        decode_named_tensors(payload)


def test_a_receiver_keeps_a_payload_that_it_opened_before_the_failure() -> None:
    tensors, opened = some_tensors(), []
    with pytest.raises(ConnectionError), shared_payload(tensors) as payload:
        opened += decode_named_tensors(payload)
        raise ConnectionError("another engine died")
    assert weights_checksum(opened) == weights_checksum(tensors)


def test_what_a_receiver_changes_is_its_own() -> None:
    with shared_payload([("a", torch.ones(3))]) as payload:
        decode_named_tensors(payload)[0][1].zero_()
        assert decode_named_tensors(payload)[0][1].tolist() == [1, 1, 1]


@pytest.mark.long
def test_a_killed_sender_leaves_nothing() -> None:
    with nothing_left_in_shared_memory():
        process = subprocess.Popen([sys.executable, "-c", SENDER], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert process.stdout is not None
        payload = process.stdout.readline()
        assert decode_named_tensors(payload.strip())[0][1].sum() == 100_000
        process.send_signal(signal.SIGKILL)
        process.wait()
    with pytest.raises(WeightSyncError, match="check that the sender is alive and on this machine"):
        decode_named_tensors(payload.strip())


IN_SMALL_MEMORY = """
mount -t tmpfs -o size=1m tmpfs /dev/shm || exit 77
"$@"
ls /dev/shm
"""
"""Shell script that runs a command with a private /dev/shm of 1 MiB and lists the files it leaves there."""
LARGE_SENDERS = """
import os, torch
from fuligo.errors import WeightSyncError
from fuligo.formats.payload import SHARED_MEMORY, SharedCopies, shared_payload
tensors = [(name, torch.ones(100_000)) for name in "abc"]

def send():
    with shared_payload(tensors):
        pass

copies = SharedCopies()
for attempt in (send, lambda: copies.write(tensors)):
    try:
        attempt()
        print("it fits")
    except WeightSyncError as error:
        print(error)
    print(os.listdir(SHARED_MEMORY))
"""


@pytest.mark.long
def test_full_shared_memory_is_named_and_given_back() -> None:
    command = ["unshare", "--mount", "bash", "-c", IN_SMALL_MEMORY, "bash", sys.executable, "-c", LARGE_SENDERS]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    if done.returncode == 77 or "unshare" in done.stderr:
        pytest.skip(f"a file system cannot be mounted here: {done.stderr}")
    sent, after, copied, *left = done.stdout.splitlines()
    for said, what in ((sent, "a bucket of weights"), (copied, "an adapter")):
        assert said.startswith(f"cannot copy {what} to shared memory: ") and "No space left on device" in said
        assert "of 1 MiB are free on the file system /dev/shm); enlarge it" in said
    assert [after, *left] == ["[]", "[]"], "nothing is left after either failure, nor by the process that ended"


class ReadsAnyFile:
    def __reduce__(self) -> tuple[object, tuple[str, bool, int]]:
        return torch.UntypedStorage.from_file, ("/etc/passwd", False, 8)


class Evil:
    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, ("true",)


@pytest.mark.parametrize(
    ("payload", "cause"),
    [
        (base64.b64encode(pickle.dumps([("a", Evil())])).decode(), "system is not allowed"),
        (base64.b64encode(pickle.dumps([("a", eval)])).decode(), "eval is not allowed"),
        (base64.b64encode(pickle.dumps([("a", ReadsAnyFile())])).decode(), "/etc/passwd is not allowed"),
        (base64.b64encode(pickle.dumps([("a", torch.Tensor.numpy)])).decode(), "not allowed"),
        (base64.b64encode(pickle.dumps([("a", torch.load)])).decode(), "load is not allowed"),
        (base64.b64encode(pickle.dumps(["a"])).decode(), "expected a list of"),
        (base64.b64encode(pickle.dumps({"a": 1})).decode(), "expected a list of"),
        (base64.b64encode(b"hello").decode(), "expected a list of"),
        ("not base64!", "expected a list of"),
        ("", "expected a list of"),
    ],
)
def test_a_payload_can_do_nothing_but_rebuild_tensors(payload: str, cause: str) -> None:
    with pytest.raises(WeightSyncError, match=cause):
        decode_named_tensors(payload)


def test_a_sent_tensor_can_still_be_offloaded() -> None:
    """An offloaded trainer resizes the storages of its weights, which torch refuses for those that numpy has seen."""
    weight = torch.ones(3, 5)
    with shared_payload([("weight", weight)]):
        pass
    assert weight.untyped_storage().resizable()


def mapped(payload: str) -> dict[str, torch.Tensor]:
    """Return the tensors of a payload that is a mapping, as a receiver such as SGLang reads it."""
    return _TensorUnpickler(io.BytesIO(base64.b64decode(payload))).load()


def test_shared_copies_are_those_of_the_last_two_writes() -> None:
    """Also of more bytes than the first had; every copy of the same bytes is in the same file."""
    copies, open_before = SharedCopies(), own_descriptors().keys()
    with nothing_left_in_shared_memory():
        sent: list[tuple[dict[str, torch.Tensor], WeightsDigest]] = []
        for scale, more in ((1, 0), (2, 0), (3, 100), (4, 0)):
            tensors = [(name, tensor) for name, tensor in some_tensors() if name != "eighth"] + [("more", torch.full((more,), scale))]
            written, payload = copies.write(tensors)
            assert [name for name, _ in written] == [name for name, _ in tensors]
            sent.append((mapped(payload), weights_checksum(tensors)))
            assert weights_checksum(written) == sent[-1][1]
            assert all(weights_checksum(list(received.items())) == digest for received, digest in sent[-2:])
        copies.close()
        assert own_descriptors().keys() <= open_before


def test_a_receiver_that_is_left_out_keeps_its_copies() -> None:
    copies = SharedCopies()
    first = mapped(copies.write([("a", torch.ones(3))], receivers={"both"})[1])["a"]
    for value in range(2, 6):
        latest = mapped(copies.write([("a", torch.full((3,), value))], receivers={"one"})[1])["a"]
        assert first.tolist() == [1, 1, 1] and latest.tolist() == [value] * 3
    copies.close()
