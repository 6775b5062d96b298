"""Profiles: written only for the chosen rollouts and ranks, and readable."""

import gzip
import json
from pathlib import Path

import pytest
import torch

from fuligo.trainer.profiling import ProfileSettings, profiled

CPU = torch.device("cpu")


@pytest.mark.parametrize(("rollout", "rank", "written"), [(2, 0, True), (1, 0, False), (2, 1, False)])
def test_only_chosen_rollouts_and_ranks_are_profiled(rollout: int, rank: int, written: bool, tmp_path: Path) -> None:
    settings = ProfileSettings((2, 5), (0,), tmp_path / "profile")
    with profiled(settings, rollout=rollout, rank=rank, device=CPU):
        torch.ones(8, 8) @ torch.ones(8, 8)
    file = tmp_path / "profile" / "rollout_000002_rank0.trace.json.gz"
    assert file.exists() == written
    if written:
        names = {event.get("name") for event in json.loads(gzip.decompress(file.read_bytes()))["traceEvents"]}
        assert "aten::mm" in names


def test_an_exception_passes_and_leaves_no_profile(tmp_path: Path) -> None:
    with pytest.raises(ZeroDivisionError), profiled(ProfileSettings((0,), (0,), tmp_path), rollout=0, rank=0, device=CPU):
        raise ZeroDivisionError
    assert list(tmp_path.iterdir()) == []
