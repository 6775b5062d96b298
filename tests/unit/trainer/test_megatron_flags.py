"""Megatron's arguments: the trainer reads all those that it claims to read."""

import re
from pathlib import Path

import pytest

from fuligo.config.placement import MegatronArguments
from fuligo.config.schemas import schema
from fuligo.trainer.megatron_backend import flags

PACKAGE = Path(flags.__file__).parent
SOURCES = "\n".join(
    path.read_text() for path in (*PACKAGE.rglob("*.py"), *PACKAGE.parents[1].glob("models/*/megatron.py")) if path.name != "flags.py"
)
ELSEWHERE = {"grad_reduce_in_bf16": "job/trainer_settings.py"}
"""Arguments that are read when the settings are built."""


def test_accepted_arguments_are_read_somewhere() -> None:
    tables = {*flags.LATENT_ATTENTION, *flags.EXPERTS}  # handed on as they are (tests/megatron/test_model_config.py)
    unread = {name for name in flags.READ - ELSEWHERE.keys() - tables if f'"{name}"' not in SOURCES}
    assert not unread
    for name, file in ELSEWHERE.items():
        assert f'"{name}"' in (PACKAGE.parents[1] / file).read_text()


def test_arguments_that_are_read_are_accepted() -> None:
    read = set(re.findall(r'flags(?:\.get\(|\[)"(\w+)"', SOURCES))
    assert len(read) > 20
    assert read <= flags.READ


def test_all_are_arguments_of_megatron() -> None:
    assert flags.READ | flags.DECIDED.keys() <= schema("megatron").flags.keys()
    assert not flags.READ & flags.DECIDED.keys()


@pytest.mark.parametrize(
    ("given", "refused"),
    [
        ({"swiglu": True, "num_layers": 4, "overlap_grad_reduce": True}, []),
        ({"attention_dropout": 0.0, "position_embedding_type": "rope"}, []),
        ({"attention_dropout": 0.1}, [("attention_dropout", 0.1, 0.0)]),
        (
            {"fp8_param_gather": True, "make_vocab_size_divisible_by": 64},
            [("fp8_param_gather", True, None), ("make_vocab_size_divisible_by", 64, None)],
        ),
        ({"make_vocab_size_divisible_by": 128, "fp16": False}, []),
    ],
    ids=["read", "as it is anyway", "decided otherwise", "not read", "Megatron's defaults"],
)
def test_an_argument_without_effect_is_named_unless_it_is_the_default(given: dict[str, object], refused: list[tuple]) -> None:
    assert sorted(flags.not_taken(MegatronArguments(given))) == refused
