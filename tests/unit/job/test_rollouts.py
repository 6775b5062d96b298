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


@pytest.mark.parametrize(
    ("flags", "warned"),
    [
        ([], "line 12: the prompt has 1,001 tokens, more than --rollout-max-response-len 100 in the model's context of 1,024 tokens"),
        (["--rollout-max-context-len", "1000"], "more than --rollout-max-context-len 1,000 leaves room for"),
        (["--rollout-max-context-len", "1002"], ""),
        (["--rollout-max-prompt-len", "924"], ""),
        (["--rollout-max-response-len", "23"], ""),
        (["--rollout-batch-size", "3"], ""),
    ],
    ids=["context", "--rollout-max-context-len", "fits it", "limited", "short responses", "not drawn"],
)
def test_prompts_that_leave_no_room_for_a_response_are_named_before_the_run(
    flags: list[str], warned: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Only the last of twelve prompts is too long; three rollouts of three do not draw it."""
    model = tiny.save_checkpoint(tmp_path / "model")
    long = "7" * 1001  # each digit is a token
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"input": text}) + "\n" for text in ["a b c"] * 11 + [long]))
    given = ["--hf-checkpoint", model, "--prompt-data", prompts, "--num-rollout", 3]
    defaults = {"--rollout-batch-size": "4", "--rollout-max-response-len": "100"} | dict(zip(flags[::2], flags[1::2], strict=True))
    RunData.open(parse([*map(str, given), *(part for option in defaults.items() for part in option)]).config)
    assert warned in caplog.text
    assert ("--rollout-max-prompt-len" in caplog.text) == bool(warned)
