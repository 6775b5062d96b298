"""Shards round-trip through a distributed checkpoint in any other shapes."""

import dataclasses
import os
import pickle
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

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


def test_a_part_that_nobody_wrote_is_missed(saved: Path, whole: Tensor):
    """Another writer may have left out a part; uninitialised memory must not become a weight."""
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
