"""Data of a run, opened before its model is loaded."""

import json
from pathlib import Path

import pytest

from fuligo.config.command_line import parse
from fuligo.errors import DataError
from fuligo.job.rollouts import RunData
from fuligo.rollout.protocol import RolloutState
from tests import tiny


@pytest.mark.parametrize("loss", ["policy_loss", "sft_loss"])
def test_data_that_a_checkpoint_does_not_belong_to_are_refused_when_they_are_opened(tmp_path: Path, loss: str) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"input": f"{n}+{n}=", "label": str(2 * n)}) + "\n" for n in range(3)))
    model = tiny.save_checkpoint(tmp_path / "model")
    flags = ["--hf-checkpoint", model, "--prompt-data", prompts, "--label-key", "label", "--num-rollout", 1, "--loss-type", loss]
    config = parse([str(flag) for flag in flags]).config

    data = RunData.open(config)
    assert data.source is not None
    state = data.source.state()
    RunData.open(config, RolloutState(state, 0, 0, []))
    for other in ({**state, "num_rows": 4}, {}):
        with pytest.raises(DataError, match=f"has 3 rows, but the checkpoint's had {other.get('num_rows', 'none')}"):
            RunData.open(config, RolloutState(other, 0, 0, []))
