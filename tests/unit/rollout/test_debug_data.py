"""Groups survive a round trip to disk bit for bit."""

from dataclasses import fields
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fuligo.errors import DataError, RolloutError
from fuligo.rollout.debug_data import decode_groups, encode_groups, load_rollout, save_rollout
from fuligo.types import PromptImage, Sample, SampleGroup, SampleStatus, Span
from tests.unit.rollout.scripted import ScriptedEngine, by_row, world

floats = st.floats(allow_nan=False)
json_data = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**60), 2**60) | floats | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner, max_size=3),
    max_leaves=6,
)


sizes = st.integers(1, 99)
images = st.builds(PromptImage, st.text(max_size=3), st.binary(max_size=9), st.text(max_size=3), st.integers(0, 2**40), sizes, sizes)


@st.composite
def samples(draw: st.DrawFn) -> Sample:
    length = draw(st.integers(0, 5))

    def ids(size: int) -> np.ndarray:
        return np.array(draw(st.lists(st.integers(0, 2**31 - 1), min_size=size, max_size=size)), np.int32)

    logprobs = st.floats(max_value=0, width=32, allow_nan=False, allow_infinity=False)
    return Sample(
        index=draw(st.integers(0, 2**40)),
        group_index=draw(st.integers(0, 2**40)),
        prompt=draw(st.text(max_size=20) | st.just([{"role": "user", "content": "hi"}])),
        prompt_ids=ids(draw(st.integers(0, 4))),
        label=draw(json_data),
        metadata=draw(st.dictionaries(st.text(max_size=3), json_data, max_size=3)),
        images=tuple(draw(st.lists(images, max_size=2))),
        response_ids=ids(length),
        loss_mask=np.array(draw(st.lists(st.integers(0, 1), min_size=length, max_size=length)), np.int8),
        engine_logprobs=np.array(draw(st.lists(logprobs, min_size=length, max_size=length)), np.float32),
        versions=ids(length),
        teacher_logprobs=draw(st.none() | st.builds(np.full, st.just(length), logprobs, st.just(np.float32))),
        routed_experts=draw(
            st.none() | st.builds(np.zeros, st.tuples(st.just(length), st.just(2), st.just(3)), st.sampled_from([np.uint8, np.uint16]))
        ),
        status=draw(st.sampled_from(SampleStatus)),
        finish_reason=draw(st.none() | st.just("stop")),
        error=draw(st.none() | st.text(max_size=5)),
        reward=draw(st.none() | floats | st.dictionaries(st.text(max_size=3), floats, max_size=2)),
        response=draw(st.text(max_size=20)),
        spans=draw(st.lists(st.builds(Span, st.text(max_size=3), floats, floats), max_size=2)),
    )


groups = st.builds(
    SampleGroup,
    st.integers(0, 2**40),
    st.integers(-1, 2**40),
    st.lists(samples(), min_size=1, max_size=3),
    st.booleans(),
    st.none() | st.text(max_size=5),
)


def assert_equal(one: list[SampleGroup], other: list[SampleGroup]) -> None:
    assert [(group.index, group.row, group.kept, group.drop_reason) for group in one] == [
        (group.index, group.row, group.kept, group.drop_reason) for group in other
    ]
    for first, second in zip(one, other, strict=True):
        for a, b in zip(first.samples, second.samples, strict=True):
            for field in fields(Sample):
                left, right = getattr(a, field.name), getattr(b, field.name)
                if isinstance(left, np.ndarray):
                    assert (left.dtype, left.shape) == (right.dtype, right.shape)
                    assert left.tobytes() == right.tobytes()
                else:
                    assert left == right
                    assert type(left) is type(right)


@settings(max_examples=max(25, settings().max_examples // 2))
@given(st.lists(groups, max_size=2))
def test_what_is_decoded_equals_what_was_encoded(some: list[SampleGroup]):
    assert_equal(decode_groups(encode_groups(some)), some)


async def test_a_rollout_is_saved_with_its_state(tmp_path: Path):
    engine = ScriptedEngine(by_row({1: 120}))
    rollout = await world(engine=engine, over_sampling_batch_size=3, partial_rollout=True).runner.rollout(7)
    path = save_rollout(str(tmp_path / "data" / "rollout_{rollout_id}.parquet"), rollout)
    assert path == tmp_path / "data" / "rollout_7.parquet"
    loaded = load_rollout(str(tmp_path / "data" / "rollout_{rollout_id}.parquet"), 7)
    assert_equal(loaded.groups, rollout.groups)
    assert_equal(loaded.state.buffer, rollout.state.buffer)
    assert (loaded.step, loaded.metrics) == (7, rollout.metrics)
    assert loaded.state.source == rollout.state.source
    assert (loaded.state.next_sample_index, loaded.state.next_group_index) == (6, 3)
    last = max(int(sample.tokens.max()) for group in rollout.groups for sample in group.samples)
    with pytest.raises(
        DataError, match=f"has the token id {last}, but --hf-checkpoint has {last} tokens; the file belongs to another model"
    ):
        load_rollout(str(tmp_path / "data" / "rollout_{rollout_id}.parquet"), 7, vocab_size=last)


def group(**values: object) -> SampleGroup:
    return SampleGroup(0, 0, [Sample(3, 0, "", np.zeros(1, np.int32), **values)])


def test_numbers_of_numpy_become_plain_ones():
    (decoded,) = decode_groups(encode_groups([group(reward=np.float64(0.1), metadata={"seen": np.array([1, 2])})]))
    assert decoded.samples[0].reward == 0.1
    assert decoded.samples[0].metadata == {"seen": [1, 2]}


def test_what_is_no_json_data_is_refused_by_name():
    with pytest.raises(RolloutError, match=r"cannot save the metadata of sample 3: .*set"):
        encode_groups([group(metadata={"tools": {1, 2}})])


@pytest.mark.parametrize("content", [None, b"", b"no parquet", encode_groups([group()])], ids=["missing", "empty", "garbage", "no rollout"])
def test_a_file_that_is_no_rollout_is_named(tmp_path: Path, content: bytes | None):
    path = tmp_path / "0.parquet"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=str(path)):
        load_rollout(str(tmp_path / "{rollout_id}.parquet"), 0)
