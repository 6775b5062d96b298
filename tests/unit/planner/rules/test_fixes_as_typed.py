"""A shown fix works as typed: bash splits the text, the command line parses it, and the rule is satisfied."""

import re
import shutil
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from fuligo.config import Config
from fuligo.config.changes import apply_changes, change_text
from fuligo.config.command_line import parse
from fuligo.config.findings import Finding
from fuligo.config.flag import PREFIXES
from fuligo.config.validate import findings
from fuligo.planner.check import violations
from fuligo.quantities import as_typed
from tests.unit.config.broken import BROKEN as BROKEN_FLAGS
from tests.unit.config.conftest import config_of
from tests.unit.planner.rules.broken_runs import CASES, checked

pytestmark = pytest.mark.skipif(shutil.which("bash") is None, reason="bash splits what is typed")


def words(text: str) -> list[str]:
    """Return the arguments that bash makes of a text."""
    printed = subprocess.run(["bash", "-c", f"printf '%s\\0' {text}"], capture_output=True, check=True, text=True)
    assert not printed.stderr
    return printed.stdout.split("\0")[:-1]


def shown(finding: Finding, config: Config) -> str:
    """Split a fix as the report shows it: flags to add, and after each `;` something else to change."""
    return as_typed(change_text(change, config) for change in finding.fix)


def edited(values: dict[str, Any], step: str) -> None:
    """Apply a fix in words to a config file."""
    if match := re.fullmatch(r"drop --(?:no-)?(\S+)", step):
        name = match[1].replace("-", "_")
        for group, given in values.items():
            given.pop(name.removeprefix(PREFIXES.get(group, "")) if name.startswith(PREFIXES.get(group, "")) else name, None)
    elif match := re.fullmatch(r"cluster\.env: drop (\S+)", step):
        del values["cluster"]["env"][match[1]]
    elif match := re.fullmatch(r"sglang_config: model (\S+), group (\d+): (\S+) (\S+)", step):
        model = next(each for each in values["engine"]["sglang_config"] if each.get("name", "default") == match[1])
        *parents, last = match[3].split(".")
        place = model["server_groups"][int(match[2]) - 1]
        for parent in parents:
            place = place[parent]
        place[last] = yaml.safe_load(match[4])
    else:
        raise AssertionError(f"not understood: {step}")


def fixed_as_typed(config: Config, finding: Finding, file: Path) -> Config:
    """Return the config after typing the fix and editing the config file as it says."""
    values = config.model_dump(mode="json", exclude_defaults=True)
    for group, name, environment in (("cluster", "env", config.cluster.env), ("engine", "engine_env", config.engine.engine_env)):
        if name in values.get(group, {}):
            values[group][name] = environment.reveal()
    typed: list[str] = []
    for step in filter(None, shown(finding, config).split("; ")):
        if step.startswith("--"):
            typed += words(step)
        else:
            edited(values, step)
    file.write_text(yaml.dump(values, Dumper=getattr(yaml, "CSafeDumper", yaml.SafeDumper)), encoding="utf-8")
    return parse(["--config", str(file), *typed]).config


@pytest.mark.parametrize(("rule", "number"), CASES)
def test_a_fix_of_the_planner_mends_the_run(rule: str, number: int, tmp_path: Path) -> None:
    subject, found = checked(rule, number)
    for finding in found:
        fixed = fixed_as_typed(subject.config, finding, tmp_path / "run.yaml")
        assert fixed == apply_changes(subject.config, finding.fix)
        if len(found) > 1:  # else test_rules.py checks the same run
            left = {each.text for each in violations(replace(subject, config=fixed)) if each.id == rule}
            assert finding.text not in left or not finding.fix


@pytest.mark.parametrize("values", [values for cases in BROKEN_FLAGS.values() for values, _ in cases], ids=str)
def test_a_fix_of_the_flags_is_what_is_typed(values: dict[str, Any], tmp_path: Path) -> None:
    config = config_of(values)
    for finding in findings(config):
        assert fixed_as_typed(config, finding, tmp_path / "run.yaml") == apply_changes(config, finding.fix)
