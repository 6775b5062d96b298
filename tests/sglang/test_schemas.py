"""The schema files, and the command lines made from them, against the pinned packages."""

import json
from typing import Any

import pytest

from fuligo.config.flag import Flag, Kind
from fuligo.config.flags import passthrough_flags
from fuligo.config.passthrough import RouterArguments, SglangArguments, command_line
from fuligo.config.schemas import BACKENDS
from tests.sglang.engines import ROOT, run_program

KINDS = {"sglang": SglangArguments, "router": RouterArguments}
OWN_TYPES = {"lora_paths", "selector", "prefill_selector", "decode_selector"}
"""Arguments whose texts the packages turn into objects."""


def example(flag: Flag) -> Any:
    """Return a value that differs from the default if possible."""
    numbers = {bound.split()[0]: float(bound.split()[1]) for bound in flag.bounds.split(" and ") if bound}
    one = flag.choices[-1] if flag.choices else "a"
    whole = int(one) if one.isdigit() else int(numbers.get(">=", 1)) + 1
    part = 0.5 if numbers.get("<", numbers.get("<=", 1)) <= 1 else 1.5
    return {
        Kind.BOOL: flag.default is not True,
        Kind.INT: whole,
        Kind.SIZE: whole,
        Kind.FLOAT: part,
        Kind.TEXT: one,
        Kind.CHOICE: one,
        Kind.TEXT_LIST: [one, one],
        Kind.INT_LIST: [whole, whole],
        Kind.FLOAT_LIST: [part, part],
        Kind.JSON: {"decode": {"backend": "full"}} if flag.name == "cuda_graph_config" else {"a": 1},
        Kind.JSON_LIST: ["a"],
    }[flag.kind]


def given_values(group: str) -> dict[str, Any]:
    return {name: example(flag) for name, flag in passthrough_flags(group).items() if name not in OWN_TYPES}


@pytest.fixture(scope="module")
def found() -> tuple[dict[str, int], dict[str, dict[str, Any]]]:
    """Import the packages once; return the exit code of the check of each schema, and the values that each parser reads."""
    words = {
        group: {name: command_line(group, kind({name: value})) for name, value in given_values(group).items()}
        for group, kind in KINDS.items()
    }
    lines = run_program("schema_reader", ROOT / "scripts", *BACKENDS, text=json.dumps(words))
    codes, values = json.loads(lines[-1])
    return codes, values


@pytest.mark.parametrize("group", BACKENDS)
def test_a_schema_is_what_the_installed_package_says(group: str, found: tuple[dict[str, int], dict[str, dict[str, Any]]]) -> None:
    assert found[0][group] == 0


@pytest.mark.parametrize("group", KINDS)
def test_the_package_reads_our_command_line_as_the_same_values(group: str, found: tuple[dict[str, int], dict[str, dict[str, Any]]]) -> None:
    assert found[1][group] == given_values(group)
