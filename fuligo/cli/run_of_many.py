"""Process of one run of `fuligo train-many`; that command starts it."""

import argparse
import os
import pickle
import signal
from collections.abc import Sequence
from multiprocessing.connection import Connection

from fuligo.cli.first_process import end_with_parent


def main(arguments: Sequence[str]) -> int:
    """Run the configuration received over `--control` with the shared trainer and engines; return the exit code `COMPLETE`."""
    parser = argparse.ArgumentParser(prog="fuligo run-of-many", description=__doc__)
    parser.add_argument(
        "--control", type=int, required=True, help="file descriptor that receives the configuration, then the access to the engines"
    )
    parser.add_argument("--trainer", type=int, required=True, help="file descriptor connected to the run's rank in the trainer")
    parser.add_argument("--num-runs", type=int, required=True, help="number of runs that share the trainer and the engines")
    parser.add_argument("--resume", action="store_true", help="the run may replace recorded steps if it has no checkpoint")
    parser.add_argument("--parent-pid", type=int, required=True, help="process that started all runs")
    options = parser.parse_args(arguments)
    for descriptor in (options.control, options.trainer):
        os.set_inheritable(descriptor, False)  # else the children of hooks would keep them open, and could command the trainer
    signal.signal(
        signal.SIGINT, signal.default_int_handler
    )  # may be inherited as ignored, but the parent process ends this one with SIGINT
    # At once, so that repeating the command of all runs finds no run directory in use.
    end_with_parent(options.parent_pid, lambda: os._exit(1))
    control = Connection(options.control)
    config = pickle.loads(control.recv_bytes())

    from fuligo.job import run_to_end, show_end
    from fuligo.job.lent import LentParts
    from fuligo.job.many import COMPLETE

    outcome = run_to_end(config, LentParts(control, Connection(options.trainer), options.num_runs, resume=options.resume))
    show_end(config, outcome.run_dir)
    return COMPLETE
