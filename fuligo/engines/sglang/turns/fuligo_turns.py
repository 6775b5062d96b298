"""Plugin for SGLang 0.5.15 under --colocate: engines import SGLang while the trainer loads, then wait before they use a GPU.

SGLang loads it (`sglang.srt.plugins`) in its main process and, after all imports, in the schedulers, which alone use GPUs.
"""

import importlib
import multiprocessing
import os
import time
from contextlib import suppress
from importlib.metadata import entry_points
from pathlib import Path

VARIABLE = "FULIGO_TURN"
"""Environment variable with the path of a file that exists once the engine may use its GPUs."""
WAITING = "Imported. Waiting for the GPUs until the trainer has loaded."
"""Line of the engine's log."""
MODELS = "sglang.srt.models.registry"
"""Module that imports all models, which takes about 2 s; SGLang imports it when it loads the weights."""
PLUGINS = "sglang.srt.plugins"
"""Group of entry points in which SGLang looks for plugins."""
POLL_S = 0.05


def wait() -> None:
    """Wait until the file `$FULIGO_TURN` exists. Return at once in the main process, which starts the schedulers.

    Raises SystemExit if the main process ends first.
    """
    parent = multiprocessing.parent_process()
    if parent is None:
        return
    file = Path(os.environ[VARIABLE])
    if not file.exists():
        print(WAITING, flush=True)
        # The user's plugins, which SGLang loads after this one, may replace what the models import.
        if all(plugin.name.startswith("fuligo_") for plugin in entry_points(group=PLUGINS)):
            with suppress(Exception):  # SGLang imports it again and reports the error
                importlib.import_module(MODELS)
    while not file.exists():
        if not parent.is_alive():  # SGLang has the kernel end schedulers with their parent, but only after it has loaded its plugins
            raise SystemExit("The engine's main process ended before the engine could use its GPUs.")
        time.sleep(POLL_S)
