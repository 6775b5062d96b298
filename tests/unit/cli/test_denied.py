"""Paths that the user of a command may not use: one sentence names the flag, the path and the directory in the way."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import NamedTuple

import pytest

from tests import tiny
from tests.e2e.command import environment, train_command
from tests.e2e.conftest import save_prompts

pytestmark = pytest.mark.skipif(os.geteuid() != 0 or not shutil.which("setpriv"), reason="needs root and setpriv to lose root's rights")

WITHOUT_RIGHTS = ["setpriv", "--bounding-set", "-dac_override,-dac_read_search"]
"""Without these capabilities, root has only the rights of any user on files of others."""
RUN_ALL = """
import contextlib, io, json, sys, traceback
from fuligo.cli import main
said = {}
for name, command in json.load(sys.stdin).items():
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as errors:
        try:
            code = main(command)
        except BaseException:
            code = traceback.format_exc()
    said[name] = [code, errors.getvalue()]
json.dump(said, sys.stdout)
"""


class Given(NamedTuple):
    """Place of a path in a command line: a command, and the flag or the position of the path."""

    command: str
    flag: str

    def line(self, path: Path, model: Path, prompts: Path) -> list[str]:
        """Return the command line with this path; all of its other paths can be used."""
        ours = prompts.parent / "ours"
        match (self.command, self.flag):
            case ("train" | "eval" | "plan" | "doctor", _):
                flags: dict[str, object] = {"run_dir": ours} if self.command in ("train", "eval") else {}
                flags |= {"eval_prompt_data": ["name", prompts]} if self.command == "eval" and self.flag != "--eval-config" else {}
                flags |= _NEEDS.get(self.flag, {})
                flags[self.flag.removeprefix("--").replace("-", "_")] = f"{path}{_SUFFIXES.get(self.flag, '')}"
                return [self.command, *train_command(model, prompts, **flags)[1:]]
            case ("view", "--export"):
                run = prompts.parent / "run"
                return ["view", str(run), "--export", str(path)]
            case ("import-script", "--map"):
                return ["import-script", str(prompts), "--map", f"/data={path}"]
            case ("import-script", "--root"):
                return ["import-script", str(prompts), "--root", str(path)]
            case ("convert hf-to-dist", "--hf-checkpoint"):
                return [*self.command.split(), self.flag, str(path), "--save", str(ours)]
            case ("convert hf-to-dist", "--save"):
                return [*self.command.split(), "--hf-checkpoint", str(model), self.flag, str(path)]
            case ("convert fp8", "--model-dir"):
                return [*self.command.split(), self.flag, str(path), "--save-dir", str(ours)]
            case ("convert fp8", "--save-dir"):
                return [*self.command.split(), "--strategy", "channel", "--model-dir", str(model), self.flag, str(path)]
            case ("convert compare", ""):
                return ["convert", "compare", str(path), str(model)]
            case ("convert dist-to-hf" | "convert value-to-hf", ""):
                return [*self.command.split(), str(path), "--save", str(ours)]
        return [*self.command.split(), *([self.flag] if self.flag else []), str(path)]


_HOOKS = ("--custom-rm-path", "--custom-generate-function-path", "--data-source-path", "--dynamic-sampling-filter-path", "--sink-path")
_SUFFIXES = {**dict.fromkeys(_HOOKS, ".py:hook"), "--save-hf": "/{rollout_id}"}
_NEEDS = {
    "--custom-rm-path": {"rm_type": None},
    "--critic-load": {"advantage_estimator": "ppo"},
    "--opd-teacher-load": {"use_opd": True, "opd_type": "megatron"},
    "--save-hf": {"save_interval": 1},
}
_FILES = (
    "--config",
    "--hf-checkpoint",
    "--prompt-data",
    "--load",
    "--ref-load",
    "--critic-load",
    "--opd-teacher-load",
    "--save",
    "--save-hf",
)
GIVEN = [
    *(Given("train", flag) for flag in (*_FILES, "--run-dir", "--eval-config", "--sglang-config", *_HOOKS)),
    *(Given("eval", flag) for flag in ("--config", "--hf-checkpoint", "--load", "--run-dir", "--eval-config")),
    *(Given("plan", flag) for flag in ("--config", "--hf-checkpoint", "--ref-load", "--sglang-config", "--json", "--html")),
    Given("doctor", "--hf-checkpoint"),
    Given("serve", "--model-path"),
    Given("view", ""),
    Given("view", "--export"),
    *(Given("import-script", flag) for flag in ("", "--root", "--map")),
    *(Given("convert hf-to-dist", flag) for flag in ("--hf-checkpoint", "--save")),
    *(Given("convert fp8", flag) for flag in ("--model-dir", "--save-dir")),
    *(Given(f"convert {name}", "") for name in ("compare", "dist-to-hf", "value-to-hf")),
]


@pytest.fixture(scope="module")
def said(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[int | str, str]]:
    """Run every command as a user without rights, in one process; return exit code (or traceback) and standard error of each."""
    place = tmp_path_factory.mktemp("place")
    model, prompts = tiny.save_checkpoint(place / "model"), save_prompts(place / "prompts.jsonl")
    (place / "run").mkdir()
    (place / "run" / "metrics.jsonl").write_text('{"step": 0}\n')
    locked = place / "locked"
    (locked / "inside").mkdir(parents=True)
    os.chown(locked, 65534, 65534)
    locked.chmod(0o700)
    shutil.copytree(place / "run", place / "runs" / "ours")
    shutil.copytree(place / "run", place / "runs" / "locked" / "theirs")
    os.chown(place / "runs" / "locked", 65534, 65534)
    (place / "runs" / "locked").chmod(0o700)
    lines = {str(given): given.line(locked / "inside" / "it", model, prompts) for given in GIVEN}
    lines["runs"] = ["view", str(place / "runs"), "--export", str(place / "report.html")]
    done = subprocess.run(
        [*WITHOUT_RIGHTS, sys.executable, "-c", RUN_ALL],
        input=json.dumps(lines),
        capture_output=True,
        text=True,
        env=environment(),
        check=True,
        timeout=240,
    )
    return json.loads(done.stdout)


@pytest.mark.parametrize("given", GIVEN, ids=lambda given: f"{given.command} {given.flag}".strip())
def test_a_path_below_a_locked_directory_is_one_sentence(given: Given, said: dict[str, tuple[int | str, str]]) -> None:
    code, errors = said[str(given)]
    assert code == 2, code
    sentence = errors.strip().splitlines()[-1]
    assert sentence.startswith("error: ") and "Permission denied" in sentence
    assert "locked/inside/it" in sentence, "it names the path"
    assert given.flag in sentence or given.command.startswith("import-script"), "it names the flag"


def test_the_directory_in_the_way_is_named(said: dict[str, tuple[int | str, str]]) -> None:
    _, errors = said[str(Given("train", "--load"))]
    sentence = " ".join(errors.strip().splitlines()[-1].split())
    assert "cannot use --load " in sentence
    assert sentence.endswith("/locked is drwx------, owned by nobody); use a path that root can use")


def test_a_run_that_is_locked_is_left_out_beside_others(said: dict[str, tuple[int | str, str]]) -> None:
    assert said["runs"] == [0, ""]
