"""Reward worker: a process that answers requests with one judge (`symbolic_judge.py`, `instructions.py`), in JSON lines.

It is run by path, so that it imports only what its judge needs, and not torch. A judge can compute forever in a single C call that Python
cannot interrupt (sympy, a regular expression). The kernel's alarm therefore ends the process, even if its parent is gone, and the parent
starts another.
"""

import json
import os
import resource
import runpy
import signal
import sys
from typing import TextIO

_MAX_MEMORY_BYTES = 4 * 1024**3
"""Maximum address space that judging may allocate, so that a huge power fails instead of exhausting the machine's memory."""


def main(judge_file: str, replies: TextIO) -> None:
    """Answer the requests on standard input until it ends. `judge_file` is a module with `prepare()` and `judge(**request) -> bool`."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent ends this process by closing its input
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    try:
        module = runpy.run_path(judge_file)
        module["prepare"]()
    except Exception as error:
        _reply(replies, {"error": f"a reward worker cannot import its judge: {error}"})
        return
    _limit_memory()
    _reply(replies, {"ready": True})
    for line in sys.stdin:
        request = json.loads(line)
        signal.setitimer(signal.ITIMER_REAL, request.pop("timeout_s"))
        try:
            reply: dict[str, object] = {"verdict": module["judge"](**request)}
        except Exception as error:
            reply = {
                "error": f"{type(error).__name__}: {str(error)[:400]}",
                "exhausted": isinstance(error, MemoryError | RecursionError),
            }
        signal.setitimer(signal.ITIMER_REAL, 0)
        _reply(replies, reply)


def _limit_memory() -> None:
    """Limit the address space to `_MAX_MEMORY_BYTES` beyond what the imports have mapped (GPU libraries map tens of gigabytes)."""
    try:
        with open("/proc/self/statm") as file:  # noqa: PTH123  # pathlib would be one more import
            mapped = int(file.read().split()[0]) * resource.getpagesize()
    except OSError:  # not Linux
        mapped = 0
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    wanted = mapped + _MAX_MEMORY_BYTES
    resource.setrlimit(resource.RLIMIT_AS, (wanted if hard == resource.RLIM_INFINITY else min(wanted, hard), hard))


def _reply(replies: TextIO, reply: dict[str, object]) -> None:
    replies.write(json.dumps(reply) + "\n")
    replies.flush()


if __name__ == "__main__":
    own_output = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # keeps text that a library prints out of the replies
    main(sys.argv[1], own_output)
