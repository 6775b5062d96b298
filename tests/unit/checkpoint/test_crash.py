"""Crash safety: whenever a run is killed, the newest checkpoint in the tracker is complete and can be resumed."""

import os
import random
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from fuligo.checkpoint.location import resolve
from fuligo.checkpoint.state import RunState
from fuligo.checkpoint.store import CheckpointStore
from fuligo.formats.checkpoint_files import TRACKER

pytestmark = pytest.mark.long

SAVE = """
import asyncio, itertools, sys
from pathlib import Path
from fuligo.checkpoint.location import resolve
from fuligo.checkpoint.state import RunState
from fuligo.checkpoint.store import CheckpointStore
from fuligo.rollout.protocol import RolloutState

def state(iteration):
    return RunState(iteration, iteration, RolloutState({"offset": iteration}), "config: true")

async def save(store, iteration):
    async def write(directory):
        (directory / "hf").mkdir()
        for shard in range(3):
            (directory / "hf" / f"{shard}.safetensors").write_bytes(iteration.to_bytes(4, "little") * 10_000)
    await store.save(iteration, write, state(iteration))
"""
SAVE_FOR_EVER = (
    SAVE
    + """
async def main():
    store = CheckpointStore(Path(sys.argv[1]), keep=2)
    newest = resolve(store.directory)
    for iteration in itertools.count(newest.iteration + 1 if newest else 1):
        print(iteration, flush=True)
        await save(store, iteration)

asyncio.run(main())
"""
)
CRASH_AT_EVERY_STEP = (
    SAVE
    + """
import os
from fuligo.rollout.debug_data import encode_groups

encode_groups([])  # imports what it needs once, not in every child

os.fsync = lambda fd: None  # matters when the power fails, not when a process ends

TOUCHES = {"open", "os.rename", "os.mkdir", "os.remove", "os.rmdir"}

def crash_at(number, root):
    seen = 0
    def hook(event, arguments):
        nonlocal seen
        if event in TOUCHES and str(root) in str(arguments[0]):
            seen += 1
            if seen == number:
                os._exit(9)
    sys.addaudithook(hook)

async def main(directory, iterations):
    store = CheckpointStore(directory, keep=1)
    for iteration in iterations:
        await save(store, iteration)

for number in itertools.count(1):
    root = Path(sys.argv[1]) / f"{number:04d}"
    child = os.fork()
    if child == 0:
        asyncio.run(main(root, [1, 2]))
        crash_at(number, root)
        asyncio.run(main(root, [2, 3]))  # 2 takes the place of an earlier 2
        os._exit(0)
    if os.waitpid(child, 0)[1] == 0:
        break
"""
)


def assert_whole(directory: Path, script_step: str) -> int:
    """Return the newest checkpoint that a resume finds, checked before and after the cleanup."""
    found = resolve(directory)
    latest = resolve(CheckpointStore(directory).directory)
    assert found is not None and latest is not None, script_step
    assert latest.iteration == int((directory / TRACKER).read_text())
    assert RunState.read(latest.directory).rollout.source == {"offset": latest.iteration}
    content = latest.iteration.to_bytes(4, "little") * 10_000
    assert all((latest.directory / "hf" / f"{shard}.safetensors").read_bytes() == content for shard in range(3))
    assert not [path for path in directory.iterdir() if path.name.startswith(".")], script_step
    return latest.iteration


def test_a_run_killed_at_random_moments_resumes_from_the_newest(tmp_path: Path) -> None:
    moment = random.Random(0)
    reached = 0
    for _ in range(4):
        with subprocess.Popen([sys.executable, "-c", SAVE_FOR_EVER, str(tmp_path)], stdout=subprocess.PIPE, text=True) as run:
            assert run.stdout is not None
            begun = [int(run.stdout.readline()) for _ in range(moment.randint(2, 4))]
            with pytest.raises(subprocess.TimeoutExpired):
                run.wait(moment.random() * 0.02)
            run.send_signal(signal.SIGKILL)
        assert begun[0] == reached + 1, "it went on from the newest"
        reached = assert_whole(tmp_path, f"after {begun}")
        assert reached >= begun[-2]


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_crash_at_any_file_operation_loses_nothing_that_was_saved(tmp_path: Path) -> None:
    """Kill the process before its n-th operation on the checkpoint directory, for every n."""
    subprocess.run([sys.executable, "-c", CRASH_AT_EVERY_STEP, str(tmp_path)], timeout=300, check=True)
    crashes = sorted(tmp_path.iterdir())
    assert len(crashes) > 30, "there are that many operations in two saves"
    newest = [assert_whole(directory, f"crash before operation {directory.name}") for directory in crashes]
    assert newest == sorted(newest) and set(newest) == {2, 3}
