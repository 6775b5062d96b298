"""The GSM8K recipe, run with the commands of its README."""

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e.command import REPOSITORY, succeed
from tests.e2e.records import evaluations, metrics, sample_rows
from tests.gsm8k import save_problems


def readme_commands(begin: str) -> str:
    """Return the code block of the README that begins with `begin`."""
    blocks = re.findall(r"^```bash\n(.*?)^```$", (REPOSITORY / "examples" / "gsm8k" / "README.md").read_text(), re.MULTILINE | re.DOTALL)
    (block,) = [block for block in blocks if block.startswith(begin)]
    return block


def run(commands: str) -> None:
    """Run commands of the README in this directory; `fuligo` and `python -c` where their imports are already done."""
    for line in commands.replace("\\\n", " ").splitlines():
        program, *arguments = shlex.split(line)
        if program == "fuligo":
            succeed(*arguments)
        elif arguments[0] == "-c":
            exec(arguments[1], {})
        else:
            assert program == "python"
            subprocess.run([sys.executable, *arguments], check=True, timeout=240)


def test_convert_and_train(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "examples").symlink_to(REPOSITORY / "examples")
    (tmp_path / "problems").mkdir()
    problems = save_problems(tmp_path / "problems")
    _, _, convert = readme_commands("git clone").partition("\n")
    run(convert.replace("grade-school-math/grade_school_math/data", str(problems)))
    first = json.loads((tmp_path / "data" / "gsm8k" / "train.jsonl").open().readline())
    assert first["prompt"][0]["role"] == "user"
    assert float(first["label"]) == float(json.loads((problems / "train.jsonl").open().readline())["answer"].split()[-1].replace(",", ""))

    run(readme_commands("python -c").replace("[:16]", "[:8]"))
    run_dir = tmp_path / "runs" / "gsm8k-smoke"
    assert len(metrics(run_dir)) == 2, "8 problems in rollouts of 4"
    assert {row["status"] for row in sample_rows(run_dir, "status")} <= {"completed", "truncated"}
    assert [record["num_rollouts"] for record in evaluations(run_dir)] == [0, 2]
