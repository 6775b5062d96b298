"""The schema files, and the command lines made from them, against the pinned packages."""

import json
import os
import subprocess
from typing import Any

import pytest

from fuligo.config.flag import Flag, Kind
from fuligo.config.flags import passthrough_flags
from fuligo.config.passthrough import RouterArguments, SglangArguments, command_line
from fuligo.config.schemas import BACKENDS
from tests.sglang.engines import ENVIRONMENT, ROOT, sglang_python

KINDS = {"sglang": SglangArguments, "router": RouterArguments}
OWN_TYPES = {"lora_paths", "selector", "prefill_selector", "decode_selector"}
"""Arguments whose texts the packages turn into objects."""
PROGRAM = """
import argparse, json, sys
sys.path.insert(0, sys.argv[1])
import generate_schemas
from sglang.srt.server_args import ServerArgs
from sglang_router.router_args import RouterArgs

def values(arguments, words):
    parser = argparse.ArgumentParser()
    arguments.add_cli_args(parser)
    required = ["--model-path", "M"] if any("--model-path" in a.option_strings and a.required for a in parser._actions) else []
    return {name: getattr(parser.parse_args([*required, *given]), name) for name, given in words.items()}

words = json.load(sys.stdin)
codes = {group: generate_schemas.main(["--check", group]) for group in sys.argv[2:]}
print(json.dumps([codes, {"sglang": values(ServerArgs, words["sglang"]), "router": values(RouterArgs, words["router"])}]))
"""


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
    done = subprocess.run(
        [str(sglang_python()), "-c", PROGRAM, str(ROOT / "scripts"), *BACKENDS],
        input=json.dumps(words),
        capture_output=True,
        text=True,
        timeout=500,
        check=False,
        env={**os.environ, **ENVIRONMENT},
    )
    assert done.returncode == 0, done.stderr[-2000:]
    codes, values = json.loads(done.stdout.splitlines()[-1])
    return codes, values


@pytest.mark.parametrize("group", BACKENDS)
def test_a_schema_is_what_the_installed_package_says(group: str, found: tuple[dict[str, int], dict[str, dict[str, Any]]]) -> None:
    assert found[0][group] == 0


@pytest.mark.parametrize("group", KINDS)
def test_the_package_reads_our_command_line_as_the_same_values(group: str, found: tuple[dict[str, int], dict[str, dict[str, Any]]]) -> None:
    assert found[1][group] == given_values(group)
