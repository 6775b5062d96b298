"""The command `fuligo` (`python -m fuligo` is the same)."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import sys
import threading
from collections.abc import Sequence
from typing import NoReturn

from fuligo.errors import ConfigError, FuligoError

COMMANDS = {
    "quickstart": "GRPO with a tiny model, here and now: about a minute, no GPU",
    "train": "the job: fuligo train --config run.yaml, or flags, or both",
    "eval": "a checkpoint on the evaluation data sets, without training; the same arguments",
    "plan": "what train would do to a cluster, without one: rules, layout, memory, time; the same arguments",
    "convert": "a checkpoint from one format to another: Hugging Face, distributed, FP8; or two compared",
    "view": "a page over run directories: curves, samples, time, health; live, or a report in one file",
    "import-script": "the config file of a bash launch script, which runs in a sandbox with stand-ins",
    "launch": "train on the nodes of a hostfile: Ray is started there, and ended; or make this machine one of them",
    "serve": "the embedded engine alone",
    "doctor": "what this machine has, and lacks for a run: the arguments of train, or none",
}
"""Each is a module here with `main(arguments) -> exit code`, imported when it is asked for."""

INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells have it: 128 + SIGINT."""


def program(argv: Sequence[str] | None = None) -> NoReturn:
    """`main` as a process.

    After an error or Ctrl-C a thread may still be in the middle of a long computation, or of a reward that hangs. The interpreter's own end
    would pull it out of C++ code, which aborts the process; so the process ends without.
    """
    # Engine and trainer take turns on the same cores: threads that wait by spinning for long (GNU OpenMP's way, milliseconds) would take
    # them from whoever works; some ten microseconds bridge the gaps between parallel regions of one training step.
    os.environ.setdefault("GOMP_SPINCOUNT", "20000")
    code = main(argv)
    if any(thread.daemon for thread in threading.enumerate()):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)
    sys.exit(code)


def main(argv: Sequence[str] | None = None) -> int:
    """Run a command; its exit code: 0, 1 after a failure at run time, 2 after bad input, 130 after Ctrl-C.

    A deliberate error is shown as its text; with FULIGO_DEBUG=1 in the environment, with its traceback.
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
    if command not in COMMANDS:
        from fuligo.config.flags import did_you_mean, nearest

        hint = did_you_mean(nearest(command, COMMANDS)) or f"; the commands are {', '.join(COMMANDS)}"
        raise ConfigError(f"there is no command {command!r}{hint}")
    try:
        module = importlib.import_module(f"fuligo.cli.{command.replace('-', '_')}")
    except ModuleNotFoundError as error:
        if error.name is None or error.name.startswith("fuligo"):
            raise
        # Plain: what shows other errors may be missing, too.
        print(f"error: {sys.executable} has no {error.name}: take the Python that fuligo is installed in, or install it", file=sys.stderr)
        return 2
    return module.main(rest)


def overview() -> str:
    """The commands, one line each."""
    width = max(map(len, COMMANDS))
    lines = [f"  fuligo {command:<{width}}  {text}" for command, text in COMMANDS.items()]
    return "\n".join(["fuligo: reinforcement-learning post-training of language models", "", *lines, "", "More: fuligo train --help"])
