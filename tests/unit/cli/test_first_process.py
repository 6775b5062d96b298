"""Signals and exit codes of a command whose parent is the init process of a container."""

import os
import shutil
import signal
import subprocess
import sys

import pytest

PID_NAMESPACE = ["unshare", "--pid", "--fork", "--kill-child", "--mount-proc"]
COMMAND = """
import os, signal, sys, time
from fuligo.cli.first_process import continue_below_init
continue_below_init()
signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))
print(os.getpid(), os.getppid(), flush=True)
{then}
"""

pytestmark = pytest.mark.skipif(os.geteuid() != 0 or shutil.which("unshare") is None, reason="PID namespaces need root and unshare")


def start(then: str, *namespace: str) -> subprocess.Popen[str]:
    return subprocess.Popen([*namespace, sys.executable, "-c", COMMAND.format(then=then)], stdout=subprocess.PIPE, text=True)


@pytest.mark.parametrize(("then", "code"), [("", 0), ("sys.exit(3)", 3), ("os.kill(os.getpid(), signal.SIGKILL)", 128 + signal.SIGKILL)])
def test_the_first_process_ends_with_the_exit_code_of_the_command(then: str, code: int) -> None:
    with start(then, *PID_NAMESPACE) as process:
        said, _ = process.communicate(timeout=240)
    assert process.returncode == code
    pid, parent = map(int, said.split())
    assert (pid > 1, parent) == (True, 1)


def test_the_first_process_passes_signals_on() -> None:
    with start("time.sleep(600)", *PID_NAMESPACE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        first = int(subprocess.run(["pgrep", "-P", str(process.pid)], capture_output=True, text=True, check=True).stdout)
        os.kill(first, signal.SIGTERM)
        assert process.wait(timeout=240) == 7


def test_any_other_process_runs_the_command_itself() -> None:
    with start("") as process:
        said, _ = process.communicate(timeout=240)
    assert said == f"{process.pid} {os.getpid()}\n"
