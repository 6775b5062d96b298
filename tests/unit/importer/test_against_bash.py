"""What a script hands to train.py, compared with the real bash on scripts that only expand and compute."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fuligo.importer import import_script

BASH = shutil.which("bash")
pytestmark = pytest.mark.skipif(BASH is None, reason="no bash on this machine to compare with")

SNIPPETS = Path(__file__).with_name("snippets.sh").read_text()
SCRIPTS = dict(re.findall(r"^### (.*)\n((?:(?!###).*\n?)*)", SNIPPETS, re.MULTILINE))


def by_bash(script: str, directory: Path) -> list[str]:
    assert BASH is not None
    start = 'train() { [ $# -eq 0 ] || printf "%s\\0" "$@"; exit 0; }\n'
    (directory / "real.sh").write_text(start + script)
    environment = {"PATH": "/usr/bin:/bin", "T": str(directory / "file")}
    result = subprocess.run([BASH, directory / "real.sh"], capture_output=True, check=False, env=environment, cwd=directory, timeout=240)
    assert result.returncode == 0, result.stderr
    return result.stdout.decode().split("\0")[:-1]


def by_us(script: str, directory: Path) -> list[str]:
    (directory / "run.sh").write_text('train() { python3 train.py "$@"; exit 0; }\n' + script)
    return list(import_script(directory / "run.sh", given={"T": "/virtual/file"}).launch.arguments)


@pytest.mark.parametrize("script", SCRIPTS.values(), ids=SCRIPTS)
def test_same_arguments(script: str, tmp_path: Path):
    assert by_us(script, tmp_path) == by_bash(script, tmp_path)


WORDS = st.sampled_from([
    "$x ", '"$x"', "${x}", "'$x'",
    '"a $x b"', "${e}", '"$e"', "${a[@]}", '"${a[@]}"', '"${a[*]}"', "${#a[@]}", "${y:-d e}", '"${y:-d e}"',
    "${x%b*}", "${x/b/_}", "$((n + 1))", "$(echo p q)", '"$(echo p  q)"', "${a[1]}", "plain", "--flag", "1", '"\\$x \\" \\\\"', 
    "\\$x", "a\\ b",
    "${x:1:2}", "${a[@]:1}", "${e:-$x}", "'single \" quote'", "${x:+yes}", '"${a[@]}"x', 'x"${a[@]}"', "$n${n}", "${x}_${n}", "$x$e${x}",
])  # fmt: skip


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(words=st.lists(st.lists(WORDS, min_size=1, max_size=3).map("".join), min_size=1, max_size=12))
def test_same_arguments_of_any_words(words: list[str], tmp_path: Path):
    script = f"x='ab  cab'; e=; n=4; a=(one 'two  2' three)\ntrain {' '.join(words)}\n"
    assert by_us(script, tmp_path) == by_bash(script, tmp_path)


OPERATORS = st.sampled_from(["+", "-", "*", "/", "%", "<", "<=", ">", ">=", "==", "!=", "&&", "||", "&", "|", "^"])
TERMS = st.recursive(
    st.integers(1, 50).map(str) | st.sampled_from(["n", "m", "$n"]),
    lambda inner: st.builds("({} {} {})".format, inner, OPERATORS, inner) | inner.map("(-{})".format) | inner.map("(!{})".format),
    max_leaves=8,
)


@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(terms=st.lists(TERMS, min_size=20, max_size=20))
def test_same_sums(terms: list[str], tmp_path: Path):
    """Each in a subshell of its own: a division by zero ends that alone (bash prints nothing, we say which line)."""
    whole = [f"$(( ({term}) % 1000 ))" for term in terms if "/" not in term and "%" not in term]
    script = f"n=3; m=7\ntrain {' '.join(whole)}\n"
    assert by_us(script, tmp_path) == by_bash(script, tmp_path)
