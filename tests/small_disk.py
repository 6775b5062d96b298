"""Small file system (tmpfs) that a test fills and enlarges. Mounting it needs root; without, the test is skipped."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

BLOCK_BYTES = 4096
BALLAST = "ballast"


@dataclass(frozen=True)
class SmallDisk:
    path: Path
    """Mount point."""

    def fill(self) -> None:
        """Write until no block is free."""
        with (self.path / BALLAST).open("ab", buffering=0) as ballast:
            try:
                while True:
                    ballast.write(bytes(BLOCK_BYTES))
            except OSError:
                return

    def free(self) -> None:
        """Give back what `fill` took."""
        (self.path / BALLAST).unlink(missing_ok=True)

    def enlarge(self, num_bytes: int) -> None:
        """Enlarge it to `num_bytes` in total."""
        _run("mount", "-o", f"remount,size={num_bytes}", self.path)


@contextmanager
def mounted(path: Path, num_bytes: int) -> Iterator[SmallDisk]:
    path.mkdir()
    try:
        _run("mount", "-t", "tmpfs", "-o", f"size={num_bytes}", "tmpfs", path)
    except (OSError, subprocess.CalledProcessError) as error:
        pytest.skip(f"a file system cannot be mounted here: {error}")
    try:
        yield SmallDisk(path)
    finally:
        _run("umount", "--lazy", path)


def _run(*command: object) -> None:
    subprocess.run(list(map(str, command)), capture_output=True, timeout=240, check=True)
