"""Ray's processes: a directory that no other user can write to, unlike Ray's own, and the time until a lost host is noticed."""

import os
import sys
from pathlib import Path

import pytest

pytest.importorskip("ray")
from fuligo.cluster.node import MAX_ROOT_LENGTH, session_root, start_node
from fuligo.trainer.ranks.supervision import HEARTBEAT_TIMEOUT_S


@pytest.fixture
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Directory that every user can write to, like /tmp."""
    tmp_path.chmod(0o1777)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setattr("fuligo.cluster.node.MAX_ROOT_LENGTH", len(str(tmp_path)))
    return tmp_path


def test_nobody_else_can_enter_it_and_the_next_run_finds_it(temporary: Path) -> None:
    root = session_root()
    assert root == session_root() == temporary / f"fuligo-ray-{os.geteuid()}" / "ray"
    assert root.parent.stat().st_mode & 0o777 == 0o700


@pytest.mark.skipif(os.geteuid() != 0, reason="gives a directory to another user")
def test_a_directory_that_another_user_made_first_is_not_used(temporary: Path) -> None:
    taken = temporary / f"fuligo-ray-{os.geteuid()}"
    taken.mkdir()
    os.chown(taken, 65534, 65534)
    root = session_root()
    assert taken not in root.parents and root.parent.stat().st_mode & 0o777 == 0o700


def test_the_paths_of_sockets_fit() -> None:
    """Unix sockets have paths of at most 107 bytes."""
    root = f"{'x' * MAX_ROOT_LENGTH}/fuligo-ray-{2**32 - 1}-abcdefgh/ray"
    assert len(f"{root}/session_2026-11-23_20-19-12_184166_4194304/sockets/plasma_store") <= 107


async def setting(name: str, directory: Path) -> int:
    """Return a setting of Ray's processes."""
    command = [sys.executable, "-c", f"import os; print(os.environ['RAY_{name}'])"]
    process = start_node("Ray", command, directory / "log.txt")
    await process.ended()
    return int((directory / "log.txt").read_text())


async def health_timeout_s(directory: Path) -> float:
    """Return the time that Ray's processes have to answer a check."""
    return await setting("health_check_timeout_ms", directory) / 1000


async def test_ray_notices_a_lost_host_as_soon_as_its_rank_is_missed(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("RAY_health_check_timeout_ms", raising=False)
    checks, period_s = 5, 3  # Ray's own
    assert checks * (await health_timeout_s(temporary) + period_s) <= HEARTBEAT_TIMEOUT_S


async def test_a_health_timeout_of_the_environment_stays(temporary: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("RAY_health_check_timeout_ms", "7000")
    assert await health_timeout_s(temporary) == 7.0


@pytest.mark.parametrize(("given", "expected"), [(None, 0), ("1", 1)])
async def test_ray_starts_no_workers_ahead_unless_the_user_wants_it(
    given: str | None, expected: int, temporary: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """tests/cluster/test_launch.py sees that none are idle."""
    monkeypatch.delenv("RAY_prestart_worker_first_driver", raising=False)
    if given is not None:
        monkeypatch.setenv("RAY_prestart_worker_first_driver", given)
    assert await setting("prestart_worker_first_driver", temporary) == expected
