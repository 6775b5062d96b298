"""Arguments of Megatron that its trainer does not read are refused by name before a start."""

import pytest

from fuligo.cli.megatron_arguments import require_read_arguments, unread_arguments
from fuligo.config import Config
from fuligo.config.command_line import parse
from fuligo.config.validate import validate
from fuligo.errors import ConfigError

SOUND = "--hf-checkpoint m --prompt-data p.jsonl --label-key label --rm-type deepscaler --num-rollout 2"
SEPARATE = "--actor-num-gpus-per-node 4 --rollout-num-gpus 4"


def config_of(more: str) -> Config:
    return parse(f"{SOUND} {more}".split()).config


@pytest.mark.parametrize(
    ("more", "text"),
    [
        (
            f"{SEPARATE} --swiglu --seq-length 4096 --fp8-param-gather",
            "--fp8-param-gather, --seq-length 4096: not supported by the Megatron trainer",
        ),
        (
            f"{SEPARATE} --seq-length 4096 --deterministic-mode --fp8-margin 1 --fp8-interval 2 --make-vocab-size-divisible-by 64",
            "--deterministic-mode, --fp8-interval 2, --fp8-margin 1, --make-vocab-size-divisible-by 64, --seq-length 4096: not",
        ),
        (f"{SEPARATE} --train-backend megatron --attention-dropout 0.1", "--attention-dropout 0.1: not supported by the Megatron trainer"),
        (
            f"{SEPARATE} --train-backend megatron --attention-output-gate --use-gated-attention",
            "--attention-output-gate, --use-gated-attention: --train-backend megatron cannot train models with such gates",
        ),
    ],
)
def test_unread_arguments_are_valid_and_refused(more: str, text: str) -> None:
    config = config_of(more)
    assert validate(config) == []
    (problem,) = unread_arguments(config)
    assert text in problem
    with pytest.raises(ConfigError):
        require_read_arguments(config)


@pytest.mark.parametrize(
    "more",
    [
        "",
        SEPARATE,
        f"{SEPARATE} --tensor-model-parallel-size 2 --sequence-parallel --swiglu --attention-dropout 0.0 --overlap-grad-reduce",
        f"{SEPARATE} --train-backend megatron --advantage-estimator ppo",
    ],
)
def test_arguments_that_are_read_are_not_refused(more: str) -> None:
    require_read_arguments(config_of(more))
