import weakref
from collections.abc import Iterator

import numpy as np
import pytest
import torch

from fuligo.formats import weight_manifest
from fuligo.formats.weight_manifest import WeightsChecksum, weights_checksum

TENSORS = [("a", torch.arange(6.0).view(2, 3)), ("b", torch.ones(4, dtype=torch.bfloat16)), ("c", torch.empty(0))]


def test_order_does_not_matter_and_one_at_a_time_is_the_same() -> None:
    whole = weights_checksum(TENSORS)
    assert whole == weights_checksum(reversed(TENSORS))
    one_by_one = WeightsChecksum()
    for name, tensor in TENSORS:
        one_by_one.update(name, tensor)
    assert one_by_one.result() == whole
    assert (whole.num_tensors, whole.num_bytes) == (3, 6 * 4 + 4 * 2)


def test_batches_have_the_digest_of_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    tensors = [(f"w{i}", torch.full((100 + i, 7), float(i)).to([torch.float32, torch.bfloat16][i % 2])) for i in range(40)]
    one_by_one = WeightsChecksum()
    for name, tensor in tensors:
        one_by_one.update(name, tensor)
    for at_once in (1, 10_000, 2**28):
        monkeypatch.setattr(weight_manifest, "DIGESTED_AT_ONCE", at_once)
        assert weights_checksum(iter(tensors)) == one_by_one.result()


def test_a_batch_is_freed_before_the_next_one_is_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weight_manifest, "DIGESTED_AT_ONCE", 2 * 4 * 8)  # two tensors
    read: list[weakref.ref[np.ndarray]] = []  # memory of the tensors, which views of them keep as well
    num_held: list[int] = []

    def tensors() -> Iterator[tuple[str, torch.Tensor]]:
        for number in range(6):
            num_held.append(sum(memory() is not None for memory in read))
            memory = np.full(8, number, np.float32)
            read.append(weakref.ref(memory))
            tensor = torch.from_numpy(memory)
            del memory
            yield f"w{number}", tensor
            del tensor

    weights_checksum(tensors())
    # The first tensor of a batch is read while the last one of the previous batch is held, the second while only the first is.
    assert num_held == [0, 1, 1, 1, 1, 1]


def test_digest_stays_the_same_over_versions() -> None:
    """Digests are compared with those that a run recorded before, perhaps by an older fuligo."""
    assert weights_checksum(TENSORS) == (3, 32, "xxh3:03cbe2aea0b20c7ce1bd4a7937e438e6")


def test_name_shape_type_and_bytes_all_count() -> None:
    tensor = torch.arange(6.0)
    variants = [
        ("a", tensor),
        ("b", tensor),
        ("a", tensor.view(2, 3)),
        ("a", tensor.view(torch.int32)),
        ("a", tensor + torch.tensor([0, 0, 0, 0, 0, 1e-6])),
        ("a", -tensor),
    ]
    assert len({weights_checksum([variant]).checksum for variant in variants}) == len(variants)


def test_strides_do_not_count() -> None:
    tensor = torch.arange(6.0).view(2, 3)
    assert weights_checksum([("a", tensor.t())]) == weights_checksum([("a", tensor.t().contiguous())])
