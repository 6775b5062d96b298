"""Bad input to the command: exit code 2 and a message with value, rule and fix, before torch is imported or a file created."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests import tiny
from tests.e2e.command import environment
from tests.e2e.conftest import Job


@pytest.fixture
def refused(job: Job, tmp_path: Path):
    """Run the command with changed flags that it must refuse; return its message."""

    def run(*further: object, **changes: object) -> str:
        command = [sys.executable, "-X", "importtime", "-m", "fuligo", *job(run_dir=tmp_path / "run", **changes), *map(str, further)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment(), check=False)
        imports = {line.rpartition("|")[2].strip() for line in done.stderr.splitlines() if line.startswith("import time:")}
        said = " ".join(line for line in done.stderr.splitlines() if not line.startswith("import time:"))
        assert done.returncode == 2, said
        assert "fuligo.config.command_line" in imports
        assert not imports & {"torch", "transformers"}, "no heavy package was imported"
        assert not (tmp_path / "run").exists()
        return " ".join(said.split())

    return run


def test_unknown_and_contradictory_flags(refused) -> None:
    said = refused("--rollout-batchsize", 4)
    assert "--rollout-batchsize" in said and "did you mean --rollout-batch-size" in said
    said = refused(global_batch_size=7)
    assert "--global-batch-size 7 does not divide a rollout" in said and "= 16 samples" in said and "use --global-batch-size 4" in said


def test_malformed_data(refused, prompts: Path, tmp_path: Path) -> None:
    lines = prompts.read_text().splitlines()
    (tmp_path / "bad.jsonl").write_text("\n".join([*lines[:2], lines[2][:-1], *lines[3:]]) + "\n")
    assert f"{tmp_path / 'bad.jsonl'}" in (said := refused(prompt_data=tmp_path / "bad.jsonl"))
    assert "line 3" in said
    assert "answer" in refused(label_key="answer")


def test_checkpoints_that_cannot_be_used(refused, checkpoint: Path, tmp_path: Path) -> None:
    truncated = shutil.copytree(checkpoint, tmp_path / "truncated")
    weights = truncated / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    assert "model.safetensors" in refused(hf_checkpoint=truncated)
    other = tiny.save_checkpoint(tmp_path / "other", "llama")
    said = refused(ref_load=other)
    assert "--ref-load" in said and "llama" in said


def test_hooks_that_do_not_import(refused) -> None:
    assert "--custom-rm-path tests.e2e.rewards.missing" in refused(rm_type=None, custom_rm_path="tests.e2e.rewards.missing")
