"""The driver's state round-trips exactly through plain data."""

import json
import random
from pathlib import Path

import numpy as np
import pytest

from fuligo.checkpoint.state import DriverRng, RunState
from fuligo.errors import CheckpointError


def test_a_state_comes_back_as_it_was(tmp_path: Path, state) -> None:
    written: RunState = state(20)
    written.write(tmp_path)
    read = RunState.read(tmp_path)
    assert (read.step, read.policy_version, read.config) == (20, 21, written.config)
    assert read.rollout.source == {"epoch": 1, "offset": 12, "returned": [4, 2]}
    assert (read.rollout.next_sample_index, read.rollout.next_group_index) == (160, 20)
    (group,), (expected,) = read.rollout.buffer, written.rollout.buffer
    assert (group.index, group.row) == (expected.index, expected.row)
    np.testing.assert_equal(
        {name: getattr(group.samples[0], name) for name in expected.samples[0].__slots__},
        {name: getattr(expected.samples[0], name) for name in expected.samples[0].__slots__},
    )


def test_generators_of_hooks_continue_where_they_were(tmp_path: Path, state) -> None:
    random.gauss(0, 1), np.random.normal()  # both keep a second number for the next call
    state(1).write(tmp_path)
    expected = [random.gauss(0, 1), random.random(), np.random.normal(), np.random.rand()]
    random.seed(0), np.random.seed(0)
    RunState.read(tmp_path).rng.restore()
    assert [random.gauss(0, 1), random.random(), np.random.normal(), np.random.rand()] == expected
    assert DriverRng.capture() != RunState.read(tmp_path).rng


def test_another_format_is_refused(tmp_path: Path, state) -> None:
    state(1).write(tmp_path)
    content = json.loads((tmp_path / "state.json").read_text())
    (tmp_path / "state.json").write_text(json.dumps({**content, "format": 99}))
    with pytest.raises(CheckpointError, match=r"it has format 99, but this version reads 1"):
        RunState.read(tmp_path)


@pytest.mark.parametrize(("name", "content"), [("state.json", b'{"format": 1}'), ("state.json", b"{"), ("buffer.parquet", b"PAR1")])
def test_a_damaged_file_is_reported(tmp_path: Path, state, name: str, content: bytes) -> None:
    state(1).write(tmp_path)
    (tmp_path / name).write_bytes(content)
    with pytest.raises(CheckpointError, match="the checkpoint is damaged"):
        RunState.read(tmp_path)
