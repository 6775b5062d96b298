"""Process of one of several runs, before it has a configuration."""

import os
import pickle
import signal
import socket
import subprocess
import sys

REPORT = """\
import fuligo.job, os, pickle, signal, sys
from fuligo.cli.run_of_many import main

def report(config, lent):
    print([os.get_inheritable(int(number)) for number in sys.argv[2:6:2]], signal.getsignal(signal.SIGINT) is signal.default_int_handler)
    raise SystemExit

fuligo.job.run_to_end = report
main(sys.argv[1:])
"""


def test_children_get_no_descriptors_and_sigint_is_not_ignored() -> None:
    """Below `nohup ... &` the process inherits an ignored SIGINT, which is how the process of all runs ends it."""
    (ours, control), (_, trainer) = socket.socketpair(), socket.socketpair()
    message = pickle.dumps("config")
    ours.sendall(len(message).to_bytes(4, "big") + message)
    given = [control.fileno(), trainer.fileno()]
    arguments = ["--control", str(given[0]), "--trainer", str(given[1]), "--num-runs", "2", "--parent-pid", str(os.getpid())]
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        done = subprocess.run([sys.executable, "-c", REPORT, *arguments], pass_fds=given, capture_output=True, text=True, check=False)
    finally:
        signal.signal(signal.SIGINT, before)
    assert done.stdout == "[False, False] True\n", done.stderr
