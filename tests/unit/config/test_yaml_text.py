"""Malicious YAML is refused with one sentence wherever a command reads YAML, before it takes memory or time."""

import resource
from pathlib import Path

import pytest
import yaml

from fuligo.config.command_line import parse
from fuligo.config.files import read_yaml
from fuligo.config.topology_file import read_topology
from fuligo.config.yaml_text import MAX_CHARACTERS, load
from fuligo.errors import ConfigError
from fuligo.importer.calls import declared_environment
from fuligo.observability.viewer.settings import read_settings
from fuligo.rollout.eval_sets import eval_set_specs


def bomb(last: str) -> str:
    """Return 300 bytes whose aliases stand for 10^9 values."""
    lines = ["a0: &a0 [x, x, x, x, x, x, x, x, x, x]"]
    lines += [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]" for n in range(1, 9)]
    return "\n".join([*lines, last])


MERGED = "\n".join(["a0: &a0 {k0: 1}", *(f"a{n}: &a{n} {{<<: [{', '.join([f'*a{n - 1}'] * 10)}]}}" for n in range(1, 9))])
ATTACKS = {
    "aliases": bomb("b: *a8"),
    "merged mappings": MERGED,
    "contains itself": "a: &a [*a]",
    "deep": "a: " + "[" * 200_000,
    "deep mappings": "a: " + "{b: " * 200_000,
    "long": "a: [" + "x, " * MAX_CHARACTERS,
    "many digits": "a: " + "9" * 10_000,
    "no boolean": "a: !!bool maybe",
    "no integer": "a: !!int ''",
    "no time": "a: !!timestamp then",
    "time beyond all": "a: 9999-99-99",
    "code": "a: !!python/object/apply:os.system [id]",
}


@pytest.fixture(autouse=True)
def little_memory(monkeypatch: pytest.MonkeyPatch):
    """Let a bomb that goes off fail this process instead of the machine."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + 2**30, before[1]))
    yield
    resource.setrlimit(resource.RLIMIT_AS, before)


@pytest.mark.parametrize("text", ATTACKS.values(), ids=ATTACKS)
def test_attacks_are_refused_wherever_yaml_is_read(text: str, tmp_path: Path) -> None:
    file = tmp_path / "attack.yaml"
    file.write_text(text.replace("a:", "optimizer:", 1) if text.startswith("a:") else text)
    given = read_yaml(file)
    assert given.problems and not given.assignments
    file.write_text(text.replace("a:", "sglang:", 1) if text.startswith("a:") else text)
    assert read_topology(file).problems
    file.write_text(text.replace("a:", "eval:", 1) if text.startswith("a:") else text)
    with pytest.raises(ConfigError, match="--eval-config"):
        eval_set_specs(parse(["--eval-config", str(file)]).config)
    with pytest.raises(ConfigError, match="runtime environment"):
        declared_environment(text)
    assert read_settings(file) == {}
    for problem in given.problems:
        assert "Traceback" not in problem and len(problem) < 1000


def test_a_value_that_does_not_fit_its_tag_is_named_with_its_flag(tmp_path: Path) -> None:
    file = tmp_path / "run.yaml"
    file.write_text("optimizer: {lr: !!bool maybe}\n")
    (problem,) = read_yaml(file).problems
    assert problem == f"{file} line 1, optimizer.lr: a value does not fit its tag (line 1, column 17)"


def test_an_endless_file_is_refused(tmp_path: Path) -> None:
    (problem,) = read_yaml(Path("/dev/zero")).problems
    assert problem == "cannot read --config /dev/zero: it has more than 1,048,576 characters"


def test_few_aliases_are_expanded() -> None:
    assert load("a: &a {x: 1}\nb: {<<: *a, y: *a}") == {"a": {"x": 1}, "b": {"x": 1, "y": {"x": 1}}}
    assert load("") is None
    with pytest.raises(yaml.YAMLError, match="nested more than 100 deep"):
        load("[" * 102 + "]" * 102)
