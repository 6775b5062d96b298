"""Runs find SGLang in the environment beside fuligo's, where `make install-gpu` puts it."""

import sys
from pathlib import Path

import pytest

from fuligo.config.command_line import parse

RUN = ["--hf-checkpoint", "model", "--prompt-data", "prompts.jsonl", "--rm-type", "math", "--num-rollout", "1"]


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr(sys, "prefix", str(tmp_path / ".venv"))
    return tmp_path


def with_engines(checkout: Path) -> Path:
    python = checkout / ".venv-sglang" / "bin" / "python"
    python.parent.mkdir(parents=True)
    python.touch()
    return python


def test_the_environment_beside_is_taken(checkout: Path) -> None:
    assert parse(RUN).config.engine.interpreter == sys.executable
    python = with_engines(checkout)
    assert parse(RUN).config.engine.interpreter == str(python)


def test_a_named_interpreter_wins(checkout: Path) -> None:
    with_engines(checkout)
    assert parse([*RUN, "--engine-python", "/opt/sglang/bin/python"]).config.engine.interpreter == "/opt/sglang/bin/python"


def test_an_environment_with_sglang_keeps_it(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_engines(checkout)
    (checkout / "sglang").mkdir()
    (checkout / "sglang" / "__init__.py").touch()
    monkeypatch.syspath_prepend(str(checkout))
    assert parse(RUN).config.engine.interpreter == sys.executable
