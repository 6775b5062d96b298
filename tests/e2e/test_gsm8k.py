"""The GSM8K recipe, run with the commands of its README."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

from tests.e2e.command import REPOSITORY, environment, in_own_process
from tests.e2e.records import evaluations, metrics, sample_rows
from tests.gsm8k import save_problems


def readme_commands(begin: str) -> str:
    """Return the code block of the README that begins with `begin`."""
    blocks = re.findall(r"^```bash\n(.*?)^```$", (REPOSITORY / "examples" / "gsm8k" / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    (block,) = [block for block in blocks if block.startswith(begin)]
    return block


def shell(commands: str, directory: Path) -> None:
    """Run commands of the README. `fuligo` imports as usual, and its engine forks from it."""
    command = directory / "bin" / "fuligo"
    command.parent.mkdir(exist_ok=True)
    command.write_text(f'#!/bin/sh\nexec {shlex.join(in_own_process())} "$@"\n')
    command.chmod(0o755)
    path = f"{command.parent}:{Path(sys.executable).parent}:{os.environ['PATH']}"
    done = subprocess.run(
        ["bash", "-euc", commands], cwd=directory, capture_output=True, text=True, timeout=240, env=environment(PATH=path), check=False
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


def test_convert_and_train(tmp_path: Path) -> None:
    (tmp_path / "examples").symlink_to(REPOSITORY / "examples")
    (tmp_path / "problems").mkdir()
    problems = save_problems(tmp_path / "problems")
    _, _, convert = readme_commands("git clone").partition("\n")
    shell(convert.replace("grade-school-math/grade_school_math/data", str(problems)), tmp_path)
    first = json.loads((tmp_path / "data" / "gsm8k" / "train.jsonl").open().readline())
    assert first["prompt"][0]["role"] == "user"
    assert float(first["label"]) == float(json.loads((problems / "train.jsonl").open().readline())["answer"].split()[-1].replace(",", ""))

    shell(readme_commands("python -c").replace("[:16]", "[:8]"), tmp_path)
    run_dir = tmp_path / "runs" / "gsm8k-smoke"
    assert len(metrics(run_dir)) == 2, "8 problems in rollouts of 4"
    assert {row["status"] for row in sample_rows(run_dir, "status")} <= {"completed", "truncated"}
    assert [record["num_rollouts"] for record in evaluations(run_dir)] == [0, 2]
