import os
import stat
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from fuligo.errors import WeightSyncError
from fuligo.formats.private import filling, scratch_directory
from fuligo.formats.weight_manifest import WeightTarget
from fuligo.weights.senders import WeightSender
from tests.small_disk import SmallDisk

USER = """
import sys
from pathlib import Path
from fuligo.formats.private import scratch_directory

with scratch_directory(Path(sys.argv[1])) as directory:
    (directory / "model.safetensors").write_bytes(b"weights")
    print(directory, flush=True)
    sys.stdin.read()
"""


def test_it_is_gone_at_the_end_also_after_an_error(tmp_path: Path) -> None:
    with pytest.raises(RuntimeError), scratch_directory(tmp_path) as directory:
        (directory / "model.safetensors").write_bytes(b"weights")
        raise RuntimeError("the engine is gone")
    assert list(tmp_path.iterdir()) == []


def test_a_full_one_is_named_and_removed(small_disk: SmallDisk) -> None:
    """Weights and their config fail alike, whether torch or safetensors writes."""
    weights = [("large", torch.ones(2000, 1000))]
    full = rf"No space left on device.* of 4 MiB are free on the file system {small_disk.path}\); free some space or use another --up"
    with pytest.raises(WeightSyncError, match=full), scratch_directory(small_disk.path) as directory:
        WeightSender().send(weights, WeightTarget("disk", 1, 10**8, directory=str(directory)))
    assert list(small_disk.path.iterdir()) == []
    with pytest.raises(WeightSyncError, match=full), scratch_directory(small_disk.path) as directory, filling(directory):
        (directory / "config.json").write_bytes(bytes(5_000_000))
    assert list(small_disk.path.iterdir()) == []


def test_what_a_killed_process_left_is_removed_by_the_next_and_nothing_in_use_is(tmp_path: Path) -> None:
    users = [
        subprocess.Popen([sys.executable, "-c", USER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    killed, in_use = (Path(user.stdout.readline().strip()) for user in users if user.stdout is not None)
    users[0].kill()
    users[0].communicate()
    assert killed.exists()

    with scratch_directory(tmp_path) as own:
        assert set(tmp_path.iterdir()) == {own, in_use}
        assert (in_use / "model.safetensors").read_bytes() == b"weights"
    users[1].communicate()
    assert list(tmp_path.iterdir()) == []


def test_what_others_planted_is_neither_followed_nor_waited_for(tmp_path: Path) -> None:
    root, elsewhere = tmp_path / "shm", tmp_path / "elsewhere"
    root.mkdir(mode=0o1777)
    elsewhere.mkdir()
    (elsewhere / "precious").write_bytes(b"kept")
    os.mkfifo(root / "fuligo-weights-pipe")
    (root / "fuligo-weights-link").symlink_to(elsewhere)
    (root / "fuligo-weights-dangling").symlink_to(root / "nowhere")
    (root / "fuligo-weights-file").write_bytes(b"")
    planted = set(root.iterdir())
    # In a process of its own, so that a pipe that is waited for does not hold up the tests.
    user = subprocess.run(
        [sys.executable, "-c", USER, str(root)], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True, timeout=240
    )
    assert Path(user.stdout.strip()).parent == root
    assert set(root.iterdir()) == planted
    assert (elsewhere / "precious").read_bytes() == b"kept"


@pytest.mark.skipif(os.geteuid() != 0, reason="only root may give a directory away")
def test_a_directory_of_another_user_is_not_touched(tmp_path: Path) -> None:
    foreign = tmp_path / "fuligo-weights-foreign"
    foreign.mkdir(mode=0o777)
    (foreign / "model.safetensors").write_bytes(b"weights")
    os.chown(foreign, 65534, 65534)
    with scratch_directory(tmp_path):
        pass
    assert (foreign / "model.safetensors").exists()


def test_no_other_user_may_enter_whatever_the_umask_says(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        with scratch_directory(tmp_path) as directory:
            assert stat.S_IMODE(directory.stat().st_mode) == 0o700
    finally:
        os.umask(before)


def test_a_root_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    with (
        pytest.raises(WeightSyncError, match=r"cannot write weights for the engines to .*missing"),
        scratch_directory(tmp_path / "missing"),
    ):
        pass
