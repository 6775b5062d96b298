"""The command `fuligo`, also run as `python -m fuligo`."""

import atexit
import importlib
import importlib.metadata
import os
import select
import signal
import sys
import threading
from collections.abc import Sequence
from typing import NoReturn

from fuligo.cli.first_process import continue_below_init
from fuligo.errors import ConfigError, FuligoError
from fuligo.limits import raise_open_files

COMMANDS = {
    "quickstart": "train a tiny model with GRPO on this machine: about a minute, no GPU",
    "train": "run a training job: --config run.yaml, flags, or both",
    "train-many": "train several LoRA runs at once on one trainer and the same engines: a.yaml b.yaml, and flags for all",
    "eval": "evaluate a checkpoint without training; takes the arguments of train",
    "plan": "check a job and estimate layout, memory and time without a cluster; takes the arguments of train",
    "convert": "convert checkpoints between Hugging Face, distributed and FP8 formats, or compare two",
    "view": "show runs in a browser: curves, samples, time, health; live, or as a report in one file",
    "import-script": "turn a bash launch script into a config file",
    "launch": "start Ray on the nodes of a hostfile, train, and stop Ray; or join this machine to a cluster",
    "serve": "serve a model with the embedded engine",
    "check-hooks": "call the hooks of a job with made-up samples and check what they return; takes the arguments of train",
    "schema": "print the JSON schema of config files, for editors",
    "doctor": "check this machine, and what a job needs of it; takes the arguments of train, or none",
}
"""Command -> summary. Each is a module here with `main(arguments) -> exit code`, imported on use, which raises FuligoError if it fails."""

INTERNAL = ("run-of-many",)
"""Commands that only fuligo starts."""
INTERRUPTED = 130
"""Exit code after Ctrl-C, as in shells: 128 + SIGINT."""


def program(argv: Sequence[str] | None = None) -> NoReturn:
    """Run `main` and exit without finalizing the interpreter.

    After an error or Ctrl-C a daemon thread may still be inside a long computation or a reward that hangs. Finalization would abort the
    process while that thread is in C++ code. Without such a thread, it would spend 0.2 s on the objects of torch and transformers.
    """
    continue_below_init()
    # Engine and trainer take turns on the same cores. GNU OpenMP's idle threads spin for milliseconds by default, which takes cores from
    # the other side; tens of microseconds bridge the gaps between parallel regions of one training step.
    os.environ.setdefault("GOMP_SPINCOUNT", "20000")
    raise_open_files()  # also for engines, router and trainer ranks, which this process starts
    try:
        code = main(argv)
        print(end="", flush=True)
        threads = threading.enumerate()
        if not any(thread.daemon for thread in threads):
            if len(threads) > 1:
                sys.exit(code)  # which waits for the others
            if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # which would print a traceback and go on
                signal.signal(signal.SIGINT, lambda *_: os._exit(INTERRUPTED))
            atexit._run_exitfuncs()
            print(end="", flush=True)
    except BrokenPipeError:
        if not _reader_left():
            raise
        print("error: standard output was closed by its reader (as `| head` does); stopped", file=sys.stderr, flush=True)
        os._exit(1)  # skips flushing the buffer, which would fail again
    if sys.stderr is not None:  # None if it was closed before the start, as by `2>&-`
        sys.stderr.flush()
    os._exit(code)


def _reader_left() -> bool:
    """Return whether standard output is a pipe whose reader has closed it."""
    output = select.poll()
    output.register(sys.stdout.fileno(), 0)
    return any(event & select.POLLERR for _, event in output.poll(0))


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command and return its exit code: 0, 1 after a failure at run time, 2 after bad input, 130 after Ctrl-C.

    A `FuligoError`, or a path that this user cannot use, is printed without a traceback, unless FULIGO_DEBUG=1 is set in the environment.
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        return _run(arguments)
    except FuligoError as error:
        if os.environ.get("FULIGO_DEBUG") == "1":
            raise
        from fuligo.cli.console import show_error

        show_error(error)
        return error.exit_code
    except OSError as error:
        from fuligo.cli.console import denied, show_error

        text = None if os.environ.get("FULIGO_DEBUG") == "1" else denied(error, arguments)
        if text is None:
            raise
        show_error(ConfigError(text))
        return ConfigError.exit_code
    except KeyboardInterrupt:
        return INTERRUPTED


def _run(arguments: list[str]) -> int:
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(overview())
        return 0
    command, *rest = arguments
    if command in ("-V", "--version"):
        print(f"fuligo {importlib.metadata.version('fuligo')}")
        return 0
    if command not in COMMANDS and command not in INTERNAL:
        from fuligo.config.flags import did_you_mean, nearest

        hint = did_you_mean(nearest(command, COMMANDS)) or f"; the commands are {', '.join(COMMANDS)}"
        raise ConfigError(f"unknown command {command!r}{hint}")
    try:
        module = importlib.import_module(f"fuligo.cli.{command.replace('-', '_')}")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("fuligo"):
            raise
        # Printed plainly: the packages that format other errors may also be missing.
        print(
            f"error: {sys.executable} has no package {error.name}; use the Python that fuligo is installed in, or install the package",
            file=sys.stderr,
        )
        return 2
    return module.main(rest)


def overview() -> str:
    """List the commands, one line each."""
    width = max(map(len, COMMANDS))
    lines = [f"  fuligo {command:<{width}}  {text}" for command, text in COMMANDS.items()]
    return "\n".join(["fuligo: reinforcement-learning post-training of language models", "", *lines, "", "More: fuligo train --help"])
