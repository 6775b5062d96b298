"""Tests that unsupported settings are refused by name before a start, with an alternative."""

from pathlib import Path

import pytest

from fuligo.cli.not_yet import ROWS, not_yet, refuse
from fuligo.config import Config
from fuligo.config.command_line import parse
from fuligo.config.validate import validate
from fuligo.errors import ConfigError

SOUND = "--hf-checkpoint m --prompt-data p.jsonl --label-key label --rm-type deepscaler --num-rollout 2"
SEPARATE = "--actor-num-gpus-per-node 4 --rollout-num-gpus 4"

ASKED = [
    (f"{SEPARATE} --swiglu --seq-length 4096 --fp8-format e4m3", "--fp8-format e4m3, --seq-length 4096: the Megatron trainer with these"),
    (f"{SEPARATE} --train-backend megatron --attention-dropout 0.1", "--attention-dropout 0.1: the Megatron trainer with these arguments"),
    ("--rollout-backend sglang --colocate --update-weights-interval 2", "--update-weights-interval 2: this way of sharing GPUs"),
    ("--hostfile hosts", "--hostfile hosts: the launch by fuligo train"),
]


def config_of(more: str) -> Config:
    return parse(f"{SOUND} {more}".split()).config


@pytest.mark.parametrize(("more", "text"), ASKED)
def test_what_cannot_run_is_valid_and_refused(more: str, text: str) -> None:
    config = config_of(more)
    assert validate(config) == []
    (problem,) = not_yet(config)
    assert text in problem and "cannot run yet" in problem
    with pytest.raises(ConfigError):
        refuse(config)


def test_pairs_that_share_gpus_are_not_restarted(tmp_path: Path) -> None:
    groups = tmp_path / "engines.yaml"
    groups.write_text("sglang: [{server_groups: [{worker_type: prefill, num_gpus: 1}, {worker_type: decode, num_gpus: 1}]}]")
    shared = f"--rollout-backend sglang --actor-num-gpus-per-node 2 --rollout-num-gpus 2 --sglang-config {groups} --colocate"
    refuse(config_of(shared))
    (problem,) = not_yet(config_of(f"{shared} --use-fault-tolerance"))
    assert problem.startswith("--colocate with --use-fault-tolerance and engines that prefill or decode: this way of sharing GPUs")


def test_every_row_is_tested() -> None:
    parts = {row.part for row in ROWS}
    assert {part for part in parts if any(part in text for _, text in ASKED)} == parts


@pytest.mark.parametrize(
    "more",
    [
        "",
        SEPARATE,
        "--rollout-backend sglang --device cpu --use-fault-tolerance",
        f"{SEPARATE} --tensor-model-parallel-size 2 --sequence-parallel --swiglu --attention-dropout 0.0 --overlap-grad-reduce",
        "--rollout-backend sglang --colocate --actor-num-nodes 2",
        "--rollout-backend sglang --colocate --use-fault-tolerance",
        "--async-mode one-step",
        "--async-mode full --max-staleness 2",
        "--use-tis",
        "--use-opsm --use-rollout-logprobs",
        "--rm-type gpqa",
        "--advantage-estimator ppo --num-critic-only-steps 1",
        f"{SEPARATE} --train-backend megatron --advantage-estimator ppo",
        "--async-save",
        "--loss-type sft_loss",
        "--advantage-estimator rloo --kl-coef 0.1",
    ],
)
def test_what_runs_is_not_refused(more: str) -> None:
    refuse(config_of(more))
