"""What launch scripts do around the run and what says nothing about it: such commands are skipped, and a note says so."""

from __future__ import annotations

import re
from collections.abc import Sequence

SKIPPED = {"pkill", "killall", "sleep", "wait", "ulimit", "umask", "trap", "clear", "mkdir"} | {
    *("pip", "pip3", "nvidia-smi", "nvcc", "huggingface-cli", "hf")
}
"""Cleaning up before a rerun, waiting, downloads. The first words of `ray start`, `ray stop`, `git clone` are judged by `is_chore`."""

_FIRST_WORDS = {
    "ray": ("start", "stop", "status"),
    "git": ("clone",),
    "modelscope": ("download",),
}
PRINTS = {"ray", "git", "pip", "pip3", "nvidia-smi", "nvcc", "huggingface-cli", "hf", "modelscope"}
"""Skipped only where nobody uses what they print."""
SILENT = {"sleep", "wait", "ulimit", "umask", "clear"}
"""Not worth a note."""


def is_chore(name: str, arguments: Sequence[str]) -> bool:
    """Whether the command is skipped."""
    if name in SKIPPED:
        return True
    return bool(arguments) and arguments[0] in _FIRST_WORDS.get(name, ())


def conversion(words: Sequence[str]) -> str | None:
    """The script's name where the command converts a checkpoint: another job than training."""
    return next((word for word in words if re.search(r"(^|/)convert_\w+\.py$", word)), None)


def nvlink_topology(has_nvlink: bool) -> str:
    """What `nvidia-smi topo -m` would say, as far as scripts count the word NV18 in it (an H100 node has 18 links a GPU)."""
    return "GPU0\tX\tNV18\n" if has_nvlink else "GPU0\tX\tPHB\n"
