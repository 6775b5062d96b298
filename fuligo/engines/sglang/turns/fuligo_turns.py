"""Plugin for SGLang 0.5.15 under --colocate: an engine is imported while the trainer loads, and waits before it uses a GPU.

SGLang loads it in each of its processes (`sglang.srt.plugins`), and in the schedulers, which alone use GPUs, after all imports.
"""

import multiprocessing
import os
import time
from pathlib import Path

VARIABLE = "FULIGO_TURN"
"""Environment variable with the path of a file that exists once the engine may use its GPUs."""
WAITING = "Imported. Waiting until the trainer has loaded and left the GPUs."
"""Line of the engine's log."""
POLL_S = 0.05


def wait() -> None:
    """Wait for the file. Return at once in the main process, which starts the schedulers."""
    if multiprocessing.parent_process() is None:
        return
    file = Path(os.environ[VARIABLE])
    if not file.exists():
        print(WAITING, flush=True)
    while not file.exists():
        time.sleep(POLL_S)
