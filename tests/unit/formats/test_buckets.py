"""Buckets: no tensor is lost or sent twice, order is kept, and only changed tensors are sent."""

import threading
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from fuligo.formats.buckets import Bucket, Changes, Counted, cut_into_buckets, packed, send_each

Sizes = st.lists(st.integers(1, 40), max_size=30)


def weights(sizes: list[int]) -> list[tuple[str, torch.Tensor]]:
    """Return a uint8 tensor, whose size is its number of bytes."""
    return [(f"w{i}", torch.full((size,), i % 251, dtype=torch.uint8)) for i, size in enumerate(sizes)]


@given(Sizes, st.integers(1, 60))
def test_buckets_hold_every_tensor_once_in_order_and_no_more_than_they_may(sizes: list[int], limit: int) -> None:
    buckets = list(cut_into_buckets(weights(sizes), limit))
    assert [name for bucket in buckets for name, _ in bucket] == [f"w{i}" for i in range(len(sizes))]
    assert all(len(bucket) == 1 or sum(tensor.nbytes for _, tensor in bucket) <= limit for bucket in buckets)


@given(st.integers(1, 60))
def test_projections_of_latent_attention_are_never_sent_apart(limit: int) -> None:
    """Return names of two layers in transformers' order."""
    names = [
        f"model.layers.{layer}.self_attn.{name}"
        for layer in range(2)
        for name in ("q_a_proj", "q_a_layernorm", "q_b_proj", "kv_a_proj_with_mqa")
    ]
    tensors = [(f"{name}.weight", torch.zeros(20, dtype=torch.uint8)) for name in names]
    buckets = list(cut_into_buckets([*tensors, *weights([20])], limit))
    assert [name for bucket in buckets for name, _ in bucket] == [*(name for name, _ in tensors), "w0"]
    assert {names[0], names[3]} <= {name.removesuffix(".weight") for name, _ in buckets[0]}
    changes = Changes()
    list(changes.only(tensors))
    tensors[3] = (tensors[3][0], tensors[3][1] + 1)
    assert [name for name, _ in changes.only(tensors)] == [name for name, _ in tensors[:4]]


@given(st.integers(1, 60))
def test_values_and_scales_of_an_indexer_are_never_sent_apart(limit: int) -> None:
    name = "model.layers.0.self_attn.indexer.wk.weight"
    pair = [(each, torch.zeros(20, dtype=torch.uint8)) for each in (name, f"{name}_scale_inv")]
    buckets = [[name for name, _ in bucket] for bucket in cut_into_buckets([*weights([20]), *pair, *weights([20])], limit)]
    assert any({each for each, _ in pair} <= set(bucket) for bucket in buckets)


@given(Sizes)
def test_buckets_are_sent_in_order_and_the_last_is_called_so(sizes: list[int]) -> None:
    sent: list[tuple[str, bool]] = []
    send_each(cut_into_buckets(weights(sizes), 1), lambda bucket, is_last: sent.append((bucket[0][0], is_last)))
    assert sent == [(f"w{i}", i == len(sizes) - 1) for i in range(len(sizes))]


def test_the_next_bucket_is_gathered_while_one_is_sent() -> None:
    gathered = [threading.Event() for _ in range(3)]

    def gather() -> Iterator[Bucket]:
        for number, event in enumerate(gathered):
            event.set()
            yield [(f"w{number}", torch.zeros(1))]

    def send(bucket: Bucket, is_last: bool) -> None:
        following = int(bucket[0][0][1:]) + 1
        assert following == len(gathered) or gathered[following].wait(60)

    send_each(gather(), send)


def test_gathering_continues_to_its_end_when_sending_fails() -> None:
    """Gathering is a collective, so every rank iterates to the end."""
    gathered: list[int] = []

    def gather() -> Iterator[Bucket]:
        for number in range(5):
            gathered.append(number)
            yield [(f"w{number}", torch.zeros(1))]

    def send(bucket: Bucket, is_last: bool) -> None:
        raise ConnectionError(bucket[0][0])

    with pytest.raises(ConnectionError, match="w0"):
        send_each(gather(), send)
    assert gathered == list(range(5))


@given(Sizes.filter(bool), st.data())
def test_changes_are_what_changed(sizes: list[int], data: st.DataObject) -> None:
    changes = Changes()
    before = weights(sizes)
    assert [name for name, _ in changes.only(before)] == [name for name, _ in before]
    touched = data.draw(st.sets(st.sampled_from([name for name, _ in before])))
    after = [(name, tensor + 1 if name in touched else tensor) for name, tensor in before]
    expected = [name for name, _ in before if name in touched] or [before[-1][0]]
    assert [name for name, _ in changes.only(after)] == expected
    changes.forget()
    assert [name for name, _ in changes.only(after)] == [name for name, _ in after]


def test_another_shape_or_type_of_the_same_bytes_is_a_change() -> None:
    changes = Changes()
    row = torch.zeros(4, dtype=torch.float32)
    for tensor in (row, row.reshape(2, 2), row.view(torch.int32)):
        assert len(list(changes.only([("first", torch.zeros(1)), ("w", tensor)]))) >= 1
    assert [name for name, _ in changes.only([("first", torch.zeros(1)), ("w", row)])] == ["w"]


def test_a_manifest_counts_all_weights_and_the_bytes_that_were_sent() -> None:
    counted = Counted(with_checksum=True)
    changes = Changes()
    list(changes.only(weights([3, 5])))
    observed = counted.observe([("w0", torch.full((3,), 7, dtype=torch.uint8)), *weights([3, 5])[1:]])
    list(counted.observe_sent(cut_into_buckets(changes.only(observed), 100)))
    manifest = counted.manifest(version=4)
    assert (manifest.version, manifest.num_tensors, manifest.num_bytes, manifest.num_bytes_sent) == (4, 2, 8, 3)
    assert manifest.checksum is not None


@given(
    st.lists(
        st.tuples(
            st.sampled_from([torch.uint8, torch.bfloat16, torch.float32]),
            st.integers(min_value=0, max_value=9),
            st.integers(min_value=0, max_value=3),
        ),
        min_size=1,
    )
)
def test_a_packed_bucket_has_the_bytes_of_all_tensors(kinds: list[tuple[torch.dtype, int, int]]) -> None:
    """Includes sizes and offsets that are not multiples of a word."""
    whole = [torch.arange(start + size).to(dtype) for dtype, size, start in kinds]
    bucket = [(str(number), values[start:]) for number, (values, (_, _, start)) in enumerate(zip(whole, kinds, strict=True))]
    expected = b"".join(tensor.clone().view(torch.uint8).numpy().tobytes() for _, tensor in bucket)
    assert packed(bucket).numpy().tobytes() == expected
