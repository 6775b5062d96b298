"""Shards round-trip through a distributed checkpoint in any other shapes."""

import dataclasses
import os
import pickle
import resource
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata

from fuligo.errors import CheckpointError
from fuligo.formats.dist_tensors import DistributedTensors
from fuligo.formats.shards import Shard, Unread, boxes, write_shards


@given(st.data())
def test_boxes_are_the_range_and_nothing_else(data: st.DataObject):
    shape = data.draw(st.one_of(st.tuples(st.integers(1, 20)), st.tuples(st.integers(1, 6), st.integers(1, 6))))
    whole = torch.arange(torch.Size(shape).numel()).view(shape)
    start, end = sorted(data.draw(st.tuples(*[st.integers(0, whole.numel())] * 2)))
    found = boxes(shape, start, end)
    assert len(found) <= 3
    parts = [whole[tuple(slice(o, o + n) for o, n in zip(box.offset, box.shape, strict=True))].reshape(-1) for box in found]
    assert torch.equal(torch.cat([torch.arange(0), *parts]), torch.arange(start, end))
    assert all(int(part[0]) == box.start and len(part) == box.size for part, box in zip(parts, found, strict=True))


def shard(whole: Tensor, rows: slice, columns: slice, data: Tensor | None = None) -> Shard:
    part = whole[rows, columns]
    return Shard("w", tuple(whole.shape), (rows.start, columns.start), part.contiguous() if data is None else data)


@pytest.fixture
def whole() -> Tensor:
    return torch.randn(8, 6)


@pytest.fixture
def saved(tmp_path: Path, whole: Tensor) -> Path:
    """Save four shards: two halves of the columns of the first rows, and the rest as flat ranges."""
    top = [shard(whole, slice(0, 4), slice(0, 3)), shard(whole, slice(0, 4), slice(3, 6))]
    rest = shard(whole, slice(4, 8), slice(0, 6))
    flat = rest.data.view(-1)
    write_shards(tmp_path, [*top, *rest.flat_range("w", flat[:10], 0, 10), *rest.flat_range("w", flat[10:], 10, 24)], None)
    return tmp_path


def test_any_part_is_read_from_those_that_it_overlaps(saved: Path, whole: Tensor):
    tensors = DistributedTensors(saved)
    assert tensors.shapes == {"w": (8, 6)} and tensors.dtypes == {"w": torch.float32}
    assert torch.equal(tensors.read("w"), whole)
    middle = torch.zeros(5, 2, dtype=torch.float64)
    tensors.read_into(shard(whole, slice(2, 7), slice(2, 4), middle))
    assert torch.equal(middle.float(), whole[2:7, 2:4])


def test_tensors_are_read_when_their_turn_comes(tmp_path: Path, whole: Tensor):
    """A tensor is read only when it is written, so a conversion holds few of them."""
    read: list[str] = []

    def reader(name: str):
        def read_it() -> Tensor:
            read.append(name)
            return whole.bfloat16()

        return read_it

    tensors = [Unread(name, (8, 6), torch.bfloat16, reader(name)) for name in "abc"]
    assert read == []
    write_shards(tmp_path, tensors, None)
    assert sorted(read) == ["a", "b", "c"]
    assert torch.equal(DistributedTensors(tmp_path).read("b"), whole.bfloat16())


def test_parts_that_are_not_the_whole_are_no_checkpoint(tmp_path: Path, whole: Tensor):
    with pytest.raises(CheckpointError, match="the shards of w have 24 of 48 elements"):
        write_shards(tmp_path, [shard(whole, slice(0, 4), slice(0, 6))], None)
    assert not (tmp_path / ".metadata").exists()


def test_a_part_that_was_not_written_is_reported(saved: Path, whole: Tensor):
    """Another writer may have left out a part; uninitialized memory must not become a weight."""
    metadata = pickle.loads((saved / ".metadata").read_bytes())
    metadata.state_dict_metadata["w"].chunks.pop(0)
    (saved / ".metadata").write_bytes(pickle.dumps(metadata))
    tensors = DistributedTensors(saved)
    with pytest.raises(CheckpointError, match=r"cannot read w from .*: it has 36 of 48 elements"):
        tensors.read("w")
    tensors.read_into(shard(whole, slice(4, 8), slice(0, 6), torch.empty(4, 6)))


def test_damage_is_named(saved: Path):
    file = max(saved.glob("*.distcp"), key=lambda path: path.stat().st_size)
    content = file.read_bytes()
    file.write_bytes(bytes(len(content)))
    with pytest.raises(CheckpointError, match=f"cannot read w from .*{file.name}"):
        DistributedTensors(saved).read("w")
    os.truncate(file, 10)
    with pytest.raises(CheckpointError, match=f"{file.name} has 10 bytes"):
        DistributedTensors(saved)
    file.unlink()
    with pytest.raises(CheckpointError, match=f"{file.name} is missing"):
        DistributedTensors(saved)
    (saved / ".metadata").unlink()
    with pytest.raises(CheckpointError, match=r"no \.metadata"):
        DistributedTensors(saved)


class _RunsACommand:
    """Object whose unpickling creates a file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (f"touch {self.file}",)


def test_hostile_metadata_runs_no_code(saved: Path, tmp_path: Path):
    """`.metadata` is a pickle; one from elsewhere must not execute anything when a checkpoint is opened."""
    proof = tmp_path / "executed"
    (saved / ".metadata").write_bytes(pickle.dumps(_RunsACommand(proof)))
    with pytest.raises(CheckpointError, match=r"cannot read .*\.metadata.*system is not allowed"):
        DistributedTensors(saved)
    assert not proof.exists()


def test_metadata_must_not_refer_to_files_outside(saved: Path):
    metadata = pickle.loads((saved / ".metadata").read_bytes())
    for index, place in metadata.storage_data.items():
        metadata.storage_data[index] = dataclasses.replace(place, relative_path=f"../{saved.name}/{place.relative_path}")
    (saved / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match="outside the checkpoint"):
        DistributedTensors(saved)


@pytest.fixture
def little_memory() -> Iterator[None]:
    """Let an allocation beyond 2 GiB fail."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**31, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


def _tensor(**values: object) -> Callable[[Any], None]:
    return lambda metadata: [setattr(metadata.state_dict_metadata["w"], name, value) for name, value in values.items()] and None


def _places(**values: object) -> Callable[[Any], None]:
    def change(metadata: Any) -> None:
        metadata.storage_data = {index: dataclasses.replace(place, **values) for index, place in metadata.storage_data.items()}

    return change


def _field(name: str, value: object) -> Callable[[Any], None]:
    return lambda metadata: setattr(metadata, name, value)


def _chunk(*numbers: int) -> ChunkStorageMetadata:
    half = len(numbers) // 2
    return ChunkStorageMetadata(torch.Size(numbers[:half]), torch.Size(numbers[half:]))


HOSTILE = {
    "no tensors": _field("state_dict_metadata", None),
    "a list of tensors": _field("state_dict_metadata", [1]),
    "no places": _field("storage_data", None),
    "places of numbers": _field("storage_data", {1: 2}),
    "no place for a part": _field("storage_data", {}),
    "a place before the file": _places(offset=-1),
    "a place that is text": _places(offset="x"),
    "a place beyond the file": _places(length=2**62),
    "a negative length": _places(length=-5),
    "a path that is a number": _places(relative_path=5),
    "an absolute path": _places(relative_path="/etc/passwd"),
    "a path with a zero": _places(relative_path="a\0b"),
    "a size of petabytes": _tensor(size=torch.Size([2**40, 2**20])),
    "a size of petabytes in its parts": _tensor(size=torch.Size([2**60]), chunks=[_chunk(0, 2**60)]),
    "a size that is negative": _tensor(size=torch.Size([-1, 6])),
    "a size that is text": _tensor(size="abc"),
    "no parts": _tensor(chunks=None),
    "parts of another rank": _tensor(chunks=[_chunk(0, 48)]),
    "parts beyond the tensor": _tensor(chunks=[_chunk(4, 0, 8, 6)]),
    "no dtype": _tensor(properties=None),
}


@pytest.mark.parametrize("change", HOSTILE.values(), ids=HOSTILE)
def test_hostile_metadata_of_the_right_classes_is_one_sentence(saved: Path, change: Callable[[Any], None], little_memory: None):
    metadata = pickle.loads((saved / ".metadata").read_bytes())
    change(metadata)
    (saved / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match=r"^cannot (read|load) "):
        DistributedTensors(saved).read("w")


BOMBS = {
    "a value under the number 2^31": b"\x80\x02K\x01r\xff\xff\xff\x7f.",
    "a text of exabytes": b"\x80\x04\x8d" + b"\xff" * 7 + b"\x7f",
    "nested 100,000 deep": b"\x80\x02" + b"(" * 100_000 + b"t" * 100_000 + b".",
    "zeros": bytes(10**6),
}


@pytest.mark.parametrize("content", BOMBS.values(), ids=BOMBS)
def test_a_small_metadata_file_takes_no_memory(saved: Path, content: bytes):
    (saved / ".metadata").write_bytes(content)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with pytest.raises(CheckpointError, match=r"cannot read .*\.metadata"):
        DistributedTensors(saved)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 2**20, "a gibibyte, in KiB"


def test_metadata_that_is_a_pipe_is_not_waited_for(saved: Path):
    (saved / ".metadata").unlink()
    os.mkfifo(saved / ".metadata")
    with pytest.raises(CheckpointError, match="it is a pipe, not a plain file"):
        DistributedTensors(saved)
