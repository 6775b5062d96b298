"""The helpers that inspect and start processes."""

import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from tests.e2e import warm_start
from tests.e2e.command import REPOSITORY, environment, fuligo
from tests.e2e.processes import SHARED_MEMORY, alive, descendants, interrupt, nothing_left_in_shared_memory, wait_until
from tests.e2e.warm_children import same_for_imports
from tests.e2e.warm_start import WarmStart


def test_descendants_and_neighbors_may_have_names_of_any_bytes(tmp_path: Path) -> None:
    program = os.fsencode(tmp_path) + b"/\xff\xfe"
    os.symlink("/bin/sleep", program)  # noqa: PTH211
    with subprocess.Popen([program, "600"]) as process:
        found = descendants(os.getpid())
        was_alive = alive(found)
        process.kill()
    assert found[process.pid] == f"{tmp_path}/\ufffd\ufffd 600 "
    assert process.pid in was_alive
    assert process.pid not in alive(found)


def test_descendants_include_grandchildren() -> None:
    script = "import subprocess; subprocess.run(['sh', '-c', 'echo started; sleep 600; true'])"
    with subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"started\n"
        found = descendants(process.pid)
        for pid in (process.pid, *found):
            os.kill(pid, signal.SIGKILL)
    assert next(iter(found.values())).startswith("sh -c ")


@pytest.mark.parametrize("ignored_here", [False, True])
@pytest.mark.parametrize("ignored", [False, True])
def test_a_process_starts_with_or_without_sigint(ignored_here: bool, ignored: bool) -> None:
    before = signal.signal(signal.SIGINT, signal.SIG_IGN) if ignored_here else signal.getsignal(signal.SIGINT)
    try:
        with interrupt(ignored=ignored):
            done = subprocess.run(
                [sys.executable, "-c", "import signal; print(signal.getsignal(signal.SIGINT) is signal.SIG_IGN)"],
                capture_output=True,
                text=True,
                check=True,
            )
        assert done.stdout == f"{ignored}\n"
        assert (signal.getsignal(signal.SIGINT) is signal.SIG_IGN) == (ignored_here or before is signal.SIG_IGN)
    finally:
        signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("arguments", [["--version"], ["train", "--num-rollout", "many"], ["serve", "--help"]], ids=" ".join)
def test_a_forked_command_ends_as_a_fresh_one(arguments: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    forked, fresh = fuligo(*arguments), fuligo(*arguments, fresh=True)
    assert (forked.returncode, forked.stdout, forked.stderr) == (fresh.returncode, fresh.stdout, fresh.stderr)


PROBE = """
import os, signal, sys
print(sys.argv[1:], os.environ["PROBE"], os.getcwd())
print("to stderr", file=sys.stderr, flush=True)
sys.stdout.flush()
sys.exit(7) if sys.argv[1] == "exit" else signal.raise_signal(signal.SIGTERM) if sys.argv[1] == "signal" else signal.pause()
"""


@pytest.fixture
def forking(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WarmStart:
    """Return a warm start of another `fuligo`, which ends in the way that its first argument says."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "fuligo").mkdir()
    (tmp_path / "fuligo" / "__init__.py").touch()
    (tmp_path / "fuligo" / "__main__.py").write_text(PROBE)
    path = f"{tmp_path}{os.pathsep}{REPOSITORY}"
    return WarmStart({**environment(), "PYTHONPATH": path}, modules=())


def test_a_forked_command_has_its_arguments_environment_and_directory(forking: WarmStart, tmp_path: Path) -> None:
    for how, code in (("exit", 7), ("signal", -signal.SIGTERM)):
        done = forking.run([how, "a b"], {"PROBE": how}, 240)
        assert done.returncode == code
        assert done.stdout == f"['{how}', 'a b'] {how} {tmp_path}\n"
        assert done.stderr == "to stderr\n"


def test_a_forked_command_that_takes_too_long_is_killed(forking: WarmStart) -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        forking.run(["wait"], {"PROBE": "waits"}, 1)
    assert forking.run(["exit"], {"PROBE": "next"}, 240).returncode == 7


def test_an_interrupted_command_is_killed_and_later_ones_run_fresh(forking: WarmStart, monkeypatch: pytest.MonkeyPatch) -> None:
    numbers: list[int] = []
    receive = warm_start._receive_number

    def interrupted(connection: socket.socket) -> int:
        if numbers:
            raise KeyboardInterrupt
        numbers.append(receive(connection))
        return numbers[0]

    monkeypatch.setattr(warm_start, "_receive_number", interrupted)
    with pytest.raises(KeyboardInterrupt):
        forking.run(["wait"], {"PROBE": "waits"}, 240)
    assert not forking.suits(environment())
    wait_until(lambda: not Path(f"/proc/{numbers[0]}").exists(), "the command ends")


TESTS = """
import os
from tests.e2e.warm_start import WarmStart
WarmStart(dict(os.environ), modules=()).run(["wait"], {"PROBE": "waits"}, 240)
"""


@pytest.mark.usefixtures("forking")
def test_killed_tests_leave_no_command(tmp_path: Path) -> None:
    variables = {**environment(), "PYTHONPATH": f"{tmp_path}{os.pathsep}{REPOSITORY}"}
    tests = subprocess.Popen([sys.executable, "-c", TESTS], env=variables)
    wait_until(lambda: len(descendants(tests.pid)) == 3, "the server, a command, and that command's server run")
    family = descendants(tests.pid)
    tests.kill()
    tests.wait()
    wait_until(lambda: not alive(family), f"all of {family} have ended")


CHILDREN = """
import os, subprocess, sys
from pathlib import Path

def start(how, **options):
    reading, writing = os.pipe()
    command = [sys.executable, "-m", "fuligo", how, str(writing)]
    child = subprocess.Popen(command, stdin=-1, stdout=-1, stderr=subprocess.STDOUT, text=True, pass_fds=[writing], **options)
    os.close(writing)
    said, _ = child.communicate("a line")
    return child.returncode, said, os.read(reading, 100)

if sys.argv[1] == "start":
    os.environ |= {"PARENT": str(os.getpid()), "HOW": "inherited"}
    print(start("exit"), start("signal", process_group=0), start("exit", cwd="/", env={**os.environ, "HOW": "given"}))
    sys.exit()
os.write(int(sys.argv[2]), b"through the pipe")
print(sys.stdin.read(), os.environ["HOW"], Path.cwd(), os.getpgrp() == os.getpid(), os.getppid() == int(os.environ["PARENT"]))
print(Path("/proc/self/cmdline").read_bytes().split(bytes(1))[1:4], sys.argv[1], flush=True)
print("is forked" if "tests.e2e.warm_children" in sys.modules else "is fresh", file=sys.stderr, flush=True)
os.abort() if sys.argv[1] == "signal" else sys.exit(3)
"""


def test_forked_children_of_a_command_are_as_fresh_ones(forking: WarmStart, tmp_path: Path) -> None:
    (tmp_path / "fuligo" / "__main__.py").write_text(CHILDREN)
    variables = {**environment(), "PYTHONPATH": str(tmp_path)}
    fresh = subprocess.run([sys.executable, "-m", "fuligo", "start"], env=variables, capture_output=True, text=True, check=True)
    forked = forking.run(["start"], variables, 240)
    assert fresh.stdout.count("is fresh") == 3 and "through the pipe" in fresh.stdout
    assert forked.stdout == fresh.stdout.replace("is fresh", "is forked")


def test_children_with_other_variables_for_imports_are_fresh(forking: WarmStart, tmp_path: Path) -> None:
    (tmp_path / "fuligo" / "__main__.py").write_text(CHILDREN.replace('"HOW": "given"', '"HOW": "given", "OMP_NUM_THREADS": "2"'))
    said = forking.run(["start"], {**environment(), "PYTHONPATH": str(tmp_path)}, 240).stdout
    assert said.count("is forked") == 2 and said.count("is fresh") == 1


def test_variables_that_a_test_leaves_for_imports_are_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_AUTH_MODE", "mine")
    monkeypatch.setenv("HF_HOME", "here")
    before = dict(os.environ)
    with same_for_imports():
        os.environ |= {"RAY_AUTH_MODE": "token", "PYTHONBREAKPOINT": "ray.util.rpdb._driver_set_trace"}
        del os.environ["HF_HOME"]
    assert dict(os.environ) == before


OTHER = """
import sys, time
with open(sys.argv[1], "w"), open(sys.argv[2], "w") as note:
    print("ready", file=note, flush=True)
    time.sleep(600)
"""


@pytest.mark.skipif(not SHARED_MEMORY.is_dir(), reason="needs a POSIX shared memory file system")
def test_files_of_other_processes_in_shared_memory_do_not_count(tmp_path: Path) -> None:
    own, other, note = SHARED_MEMORY / f"own-{os.getpid()}", SHARED_MEMORY / f"other-{os.getpid()}", tmp_path / "note"
    shell = 'python=$1; shift; "$python" "$@" >/dev/null 2>&1 & echo $!'  # its child belongs to nobody once the shell has ended
    command = ["sh", "-c", shell, "sh", sys.executable, "-c", OTHER, str(other), str(note)]
    with nothing_left_in_shared_memory():
        pid = int(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
        wait_until(note.exists, "the other process has its file")
    try:
        with pytest.raises(AssertionError, match="shared memory is given back"), nothing_left_in_shared_memory(timeout_s=0.2):
            own.touch()
    finally:
        os.kill(pid, signal.SIGKILL)
        own.unlink(missing_ok=True)
        other.unlink()
