"""Whole runs of a model with an MTP layer on the torch trainer, beside an engine that does not draft."""

from pathlib import Path

import pytest
import torch

from tests import tiny, tiny_mtp
from tests.e2e.command import succeed, train_command
from tests.e2e.records import metrics

TRAINING = {"mtp_num_layers": 1, "enable_mtp_training": True}


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_mtp.add_mtp(tiny.save_checkpoint(tmp_path_factory.mktemp("hybrid"), "qwen3_next"))


def test_a_run_trains_exports_and_resumes_the_layer(hybrid: Path, prompts: Path, tmp_path: Path) -> None:
    given = {"train_backend": "torch", "rollout_backend": "embedded", "check_weight_update_equal": True, **TRAINING}
    whole, resumed = tmp_path / "whole", tmp_path / "resumed"
    saving = {"save_interval": 1, "save_hf": tmp_path / "hf" / "{rollout_id}"}
    succeed(*train_command(hybrid, prompts, **given, **saving, num_rollout=2, run_dir=whole))
    records = metrics(whole)
    assert len(records) == 2
    assert all(record["train/mtp_loss"] > 0 and record["train/logprob_abs_diff"] < 1e-4 for record in records)
    before, after = tiny_mtp.tensors_of(hybrid), tiny_mtp.tensors_of(max((tmp_path / "hf").iterdir()))
    assert before.keys() == after.keys()
    assert all(not torch.equal(tensor, before[name]) for name, tensor in after.items() if name.startswith("mtp."))

    succeed(*train_command(hybrid, prompts, **given, num_rollout=2, load=whole / "checkpoints", ckpt_step=1, run_dir=resumed))
    assert metrics(resumed)[-1]["train/mtp_loss"] == records[-1]["train/mtp_loss"]
