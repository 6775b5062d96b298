"""Process of a rank: its connection to the driver, and its end without one."""

import socket
import subprocess
import sys
from pathlib import Path

KILLED_DRIVER = """
import socket, struct
from concurrent.futures import Future
from multiprocessing.connection import Connection
from fuligo.trainer.ranks.commands import Answer
from fuligo.trainer.ranks.connected import serve

class Executor:
    class rank:
        number, has_left = 1, False
    def answer(self, command, *, is_queued):
        driver.close()  # killed; its peers notice in their collective
        answered = Future()
        answered.set_result(Answer(error=RuntimeError("Connection closed by peer")))
        return answered

driver, ours = socket.socketpair()
driver = Connection(driver.detach())
driver.send_bytes(struct.pack("!q?", 0, True))
driver.send_bytes(b"train")
serve(Connection(ours.detach()), Executor())
"""

REPORT = """
import os, sys
from fuligo.trainer.ranks import connected, rank_process

connected.serve = lambda connection, executor: print(os.get_inheritable(connection.fileno()))
rank_process.main()
"""


def test_a_rank_starts_without_torch() -> None:
    """Importing it takes seconds, in which a rank would answer no ping."""
    script = "import sys, fuligo.trainer.ranks.connected, fuligo.trainer.ranks.executor; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=240, check=False)
    assert done.stdout == "False\n", done.stderr


def test_children_of_hooks_do_not_get_the_connection() -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        arguments = ["--rank", "0", "--size", "1", "--connection", str(theirs.fileno())]
        command = [sys.executable, "-c", REPORT, *arguments]
        done = subprocess.run(command, pass_fds=[theirs.fileno()], capture_output=True, text=True, timeout=240, check=False)
    assert done.stdout == "False\n", done.stderr


def test_a_rank_of_a_killed_driver_ends_without_a_traceback(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-c", KILLED_DRIVER], capture_output=True, text=True, timeout=240, check=False)
    assert (done.returncode, done.stderr) == (1, "")
