"""Saves are atomic; a failure leaves earlier checkpoints untouched."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fuligo.checkpoint.location import resolve
from fuligo.checkpoint.state import RunState
from fuligo.checkpoint.store import CheckpointStore, saving_to
from fuligo.errors import CheckpointError, CheckpointWriteError, ConfigError, TrainerError
from fuligo.formats.checkpoint_files import LOCK, TRACKER


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


async def test_what_is_saved_is_what_latest_gives(tmp_path: Path, state, weights) -> None:
    store = CheckpointStore(tmp_path / "checkpoints")
    assert resolve(store.directory) is store.newest is None
    saved = await store.save(20, weights(b"of twenty"), state(20))
    assert store.newest == 20
    assert CheckpointStore(tmp_path / "checkpoints").newest is None, "another run saved it"
    latest = resolve(store.directory)
    assert latest is not None and latest.directory == saved == tmp_path / "checkpoints" / "iter_0000020"
    assert latest.iteration == 20
    assert (latest.directory / "hf" / "model.safetensors").read_bytes() == b"of twenty"
    assert (tmp_path / "checkpoints" / TRACKER).read_text() == "20"
    assert names(tmp_path / "checkpoints") == ["iter_0000020", TRACKER]


async def test_only_the_newest_stay(tmp_path: Path, state, weights) -> None:
    store = CheckpointStore(tmp_path, keep=2)
    for iteration in (5, 10, 15, 20):
        await store.save(iteration, weights(), state(iteration))
    assert names(tmp_path) == ["iter_0000015", "iter_0000020", TRACKER]


async def test_those_that_flags_name_stay(tmp_path: Path, state, weights) -> None:
    store = CheckpointStore(tmp_path, keep=1, used=frozenset({5}))
    for iteration in (5, 10, 15):
        await store.save(iteration, weights(), state(iteration))
    assert names(tmp_path) == ["iter_0000005", "iter_0000015", TRACKER]


async def test_all_stay_by_default(tmp_path: Path, state, weights) -> None:
    store = CheckpointStore(tmp_path)
    for iteration in (1, 2, 3):
        await store.save(iteration, weights(), state(iteration))
    assert names(tmp_path)[:3] == ["iter_0000001", "iter_0000002", "iter_0000003"]


async def test_after_a_resume_from_an_earlier_one_the_new_branch_wins(tmp_path: Path, state, weights) -> None:
    """Later iterations of an abandoned branch are replaced when they are reached, and never deleted to save space."""
    store = CheckpointStore(tmp_path, keep=1)
    for iteration in (10, 20):
        await CheckpointStore(tmp_path).save(iteration, weights(b"old branch"), state(iteration))
    await store.save(15, weights(b"new branch"), state(15))
    latest = resolve(store.directory)
    assert latest is not None and latest.iteration == 15
    assert names(tmp_path) == ["iter_0000015", "iter_0000020", TRACKER]
    await store.save(20, weights(b"new branch"), state(20))
    latest = resolve(store.directory)
    assert latest is not None and (latest.directory / "hf" / "model.safetensors").read_bytes() == b"new branch"
    assert names(tmp_path) == ["iter_0000020", TRACKER]


async def test_a_full_disk_is_named_and_leaves_the_earlier_checkpoint(tmp_path: Path, state, weights) -> None:
    store = CheckpointStore(tmp_path)
    await store.save(10, weights(), state(10))

    async def write(directory: Path) -> None:
        (directory / "optimizer").write_bytes(b"half of it")
        await asyncio.to_thread(Path("/dev/full").write_bytes, b"the rest")

    with pytest.raises(
        CheckpointWriteError, match=r"cannot write checkpoint iter_0000020 .*No space left on device.*iter_0000010 is intact"
    ):
        await store.save(20, write, state(20))
    latest = resolve(store.directory)
    assert latest is not None and latest.iteration == 10
    assert names(tmp_path) == ["iter_0000010", TRACKER]


async def test_the_error_of_a_failing_trainer_is_raised_unchanged(tmp_path: Path, state) -> None:
    async def write(directory: Path) -> None:
        raise TrainerError("rank 1 died while saving")

    with pytest.raises(TrainerError, match="rank 1 died"):
        await CheckpointStore(tmp_path).save(1, write, state(1))
    assert names(tmp_path) == []


async def test_a_cancelled_save_leaves_nothing_half_done(tmp_path: Path, state) -> None:
    begun = asyncio.Event()

    async def write(directory: Path) -> None:
        (directory / "optimizer").write_bytes(b"half of it")
        begun.set()
        await asyncio.Event().wait()

    save = asyncio.create_task(CheckpointStore(tmp_path).save(1, write, state(1)))
    await begun.wait()
    save.cancel()
    with pytest.raises(asyncio.CancelledError):
        await save
    assert names(tmp_path) == []


async def test_a_start_clears_what_a_crash_left(tmp_path: Path, state, weights) -> None:
    await CheckpointStore(tmp_path).save(10, weights(), state(10))
    (tmp_path / ".tmp_iter_0000020").mkdir()
    (tmp_path / ".tmp_iter_0000020" / "model").write_bytes(b"half")
    (tmp_path / f".tmp_{TRACKER}").write_text("2")
    CheckpointStore(tmp_path)
    assert names(tmp_path) == ["iter_0000010", TRACKER]


def test_a_place_that_cannot_be_written_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match="use another directory with --save"):
        CheckpointStore(tmp_path / "file" / "checkpoints")


async def test_what_is_begun_appears_when_it_is_complete(tmp_path: Path, state, weights) -> None:
    store = CheckpointStore(tmp_path)
    await store.save(10, weights(b"ten"), state(10))
    written = asyncio.Event()
    driver = state(20)
    rest = await store.begin(20, weights(b"twenty"), written.wait, driver)
    driver.rollout.buffer.clear()  # the run goes on with its samples
    for _ in range(3):
        await asyncio.sleep(0)
    latest = resolve(store.directory)
    assert latest is not None and latest.iteration == 10 and not rest.done()
    written.set()
    assert await rest == tmp_path / "iter_0000020"
    latest = resolve(store.directory)
    assert latest is not None and latest.iteration == 20
    assert len(RunState.read(latest.directory).rollout.buffer) == 1


async def test_what_is_begun_and_fails_leaves_the_earlier_checkpoint(tmp_path: Path, state, weights) -> None:
    store = CheckpointStore(tmp_path)
    await store.save(10, weights(), state(10))

    async def fail() -> None:
        raise OSError("No space left on device")

    rest = await store.begin(20, weights(), fail, state(20))
    with pytest.raises(
        CheckpointWriteError, match=r"cannot write checkpoint iter_0000020 .* No space left on device .* iter_0000010 is intact"
    ):
        await rest
    assert names(tmp_path) == ["iter_0000010", TRACKER]


SAVES_UNTIL_STDIN_ENDS = (
    "import pathlib, sys; from fuligo.checkpoint.store import saving_to\n"
    "with saving_to(pathlib.Path(sys.argv[1])): print('locked', flush=True); sys.stdin.read()"
)


def test_saving_to_a_directory_of_a_running_job_is_refused(tmp_path: Path) -> None:
    """Also through a link, and only until that job ends, even if it is killed."""
    (tmp_path / "saves").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "saves")
    command = [sys.executable, "-c", SAVES_UNTIL_STDIN_ENDS, str(tmp_path / "saves")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as job:
        assert job.stdout is not None and job.stdout.readline() == b"locked\n"
        with (
            pytest.raises(ConfigError, match=r"^cannot save to .*link: a running job saves its checkpoints there; .* another --save$"),
            saving_to(tmp_path / "link"),
        ):
            pass
        job.kill()
        job.wait()
    with saving_to(tmp_path / "link"):
        assert resolve(tmp_path / "saves") is None, "a directory with nothing but the lock is empty"


@pytest.mark.skipif(os.geteuid() != 0, reason="makes a link for another user")
@pytest.mark.parametrize("name", [LOCK, f".tmp_{TRACKER}"])
def test_a_directory_with_links_of_another_user_is_refused_and_they_are_not_followed(tmp_path: Path, name: str) -> None:
    """In /tmp, another user can prepare the directory that a run is going to save to."""
    saves, precious = tmp_path / "saves", tmp_path / "precious"
    saves.mkdir(mode=0o777)
    (saves / name).symlink_to(precious)
    os.chown(saves / name, 65534, 65534, follow_symlinks=False)
    with pytest.raises(ConfigError, match=rf"^cannot save to {saves}: it has links of another user \({name}\)"), saving_to(saves):
        pass
    assert not precious.exists()


def test_saving_to_an_unwritable_place_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"cannot write checkpoints to .*Not a directory"), saving_to(tmp_path / "file" / "saves"):
        pass
