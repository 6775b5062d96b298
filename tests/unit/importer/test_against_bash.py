"""Arguments of train.py compared with those that plain bash hands to recording stubs, without a sandbox, on scripts that are trusted."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from fuligo.importer.run import import_script

BASH = shutil.which("bash")
pytestmark = [pytest.mark.skipif(BASH is None, reason="no bash on this machine to compare with"), pytest.mark.usefixtures("sandbox")]

HERE = Path(__file__).parent
SCRIPTS = HERE.parents[2] / "scripts"
STUBBED = "python python3 ray torchrun ssh scp pkill killall nvidia-smi sleep curl wget pip git hostname pgrep conda hf".split()  # noqa: SIM905
STUB = r"""#!/bin/bash
case "${0##*/} $*" in
  *train.py* | *train_async.py* | "python3 -m fuligo train "*) printf '%s\0' "$@" >>"$RECORDED" ;;
  "nvidia-smi topo"*) printf 'GPU0\tX\tNV18\n' ;;
  "hostname -I"*) echo 127.0.0.1 ;;
  pgrep*) exit 1 ;;
esac
"""


def parts(file: str) -> dict[str, str]:
    return dict(re.findall(r"^### (.*)\n((?:(?!###).*\n?)*)", (HERE / file).read_text(), re.MULTILINE))


def by_bash(script: Path, folder: Path, variables: dict[str, str]) -> list[str]:
    """Return what follows train.py in the one call that has it."""
    assert BASH is not None
    stubs, recorded = folder / "stubs", folder / "recorded"
    stubs.mkdir()
    for name in STUBBED:
        (stubs / name).write_text(STUB)
        (stubs / name).chmod(0o755)
    environment = {"PATH": f"{stubs}:/usr/bin:/bin", "RECORDED": str(recorded), "HOME": "/root", "USER": "root", **variables}
    subprocess.run([BASH, script], env=environment, cwd=folder, timeout=240, check=False, capture_output=True)
    words = recorded.read_text().split("\0")[:-1]
    start = next(
        index
        for index, word in enumerate(words)
        if word.endswith(("train.py", "train_async.py")) or words[index - 1 : index + 1] == ["fuligo", "train"]
    )
    assert not any(word.endswith("train.py") for word in words[start + 1 :])
    return words[start + 1 :]


def by_us(script: Path, variables: dict[str, str], root: Path | None = None) -> list[str]:
    return list(import_script(script, given=variables, root=root).launch.arguments)


def test_same_words_of_every_snippet(tmp_path: Path):
    """All snippets in one script, each in a subshell of its own; what they would train with is handed on together."""
    text = 'all=$(mktemp); train() { printf "%s\\0" "$@" "|" >> $all; exit 0; }\n'
    for name, snippet in parts("snippets.sh").items():
        text += f"# {name}\n(\nT=$(mktemp)\n{snippet}\n)\n"
    script = tmp_path / "run.sh"
    script.write_text(text + 'mapfile -d "" words < $all\npython3 train.py "${words[@]}"\n')
    expected = by_bash(script, tmp_path, {})
    assert expected.count("|") >= 60
    assert by_us(script, {}) == expected


@pytest.mark.parametrize("script", parts("launch_scripts.sh").values(), ids=parts("launch_scripts.sh"))
def test_same_arguments_of_a_launch_script(script: str, tmp_path: Path):
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "moe.sh").write_text(parts("launch_scripts.sh")["the model of the others"])
    (tmp_path / "hosts").write_text("10.0.0.1 slots=8\n10.0.0.2 slots=8\n")
    path = tmp_path / "run.sh"
    path.write_text(script)
    variables = {"BASE_DIR": "/shared", "MASTER_ADDR": "10.0.0.1", "HOSTFILE": str(tmp_path / "hosts")}
    assert by_us(path, variables) == by_bash(path, tmp_path, variables)


@pytest.mark.parametrize("script", sorted(SCRIPTS.glob("run-*.sh")), ids=lambda path: path.name)
def test_same_arguments_of_our_own_scripts(script: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.chdir(tmp_path)
    variables = {"BASE_DIR": "/shared", "SOCKET_IFNAME": "eth1", "MODEL_ARGS": "--rotary-base 10000"}
    assert by_us(script, variables, root=SCRIPTS.parent) == by_bash(script, tmp_path, variables)
