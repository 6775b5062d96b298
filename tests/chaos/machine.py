"""Machine of a run under faults: its own network, disk, /dev/shm, temporary directory and clock. It needs root and a C compiler."""

import os
import shutil
import struct
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tests.e2e.command import environment, warm_start
from tests.e2e.processes import command_line, wait_until
from tests.e2e.warm_children import ForkServer
from tests.small_disk import BALLAST, SmallDisk, mounted

DISK_BYTES = 64 * 1024**2
MEMORY_BYTES = 256 * 1024**2
_BOOT = 'ip link set lo up && mount --bind "$CHAOS_SHM" /dev/shm && exec "$@"'


@dataclass(slots=True, frozen=True)
class Machine:
    """Disk, memory and clock for one run only: faults affect nothing else, and everything that the run leaves behind is found."""

    disk: SmallDisk
    """File system of the run directory."""
    memory: SmallDisk
    """File system that the run sees as /dev/shm."""
    temporary: Path
    clock: Path
    """File with the shift of the wall clock in seconds, int64."""
    clock_library: Path

    def command(self, *arguments: object) -> list[str]:
        """Return the command that runs the arguments on this machine, in the process that is started."""
        return ["unshare", "--net", "--mount", "sh", "-c", _BOOT, "sh", *map(str, arguments)]

    def environment(self) -> dict[str, str]:
        return environment(
            CHAOS_SHM=str(self.memory.path), CHAOS_CLOCK=str(self.clock), LD_PRELOAD=str(self.clock_library), TMPDIR=str(self.temporary)
        )

    @contextmanager
    def warm(self) -> Iterator[ForkServer]:
        """Serve forks of runs and their processes on this machine, from the tests' warm process. Their clock cannot be stepped."""
        inside = subprocess.Popen(self.command("sleep", "infinity"), env=self.environment())
        try:
            wait_until(lambda: command_line(inside.pid).startswith("sleep "), "the machine has started")
            with ExitStack() as stack:
                files = [stack.enter_context(Path(f"/proc/{inside.pid}/ns/{kind}").open("rb")) for kind in ("net", "mnt")]
                server = warm_start().fork_server(self.environment(), [file.fileno() for file in files])
            try:
                yield server
            finally:
                server.close()
        finally:
            inside.kill()
            inside.wait()

    def step_clock(self, seconds: int) -> None:
        """Set the wall clock to this many seconds from the true time."""
        with self.clock.open("r+b") as file:
            file.write(struct.pack("=q", seconds))

    def shared_memory(self) -> list[str]:
        """Return the names of the files in /dev/shm."""
        return [path.name for path in self.memory.path.iterdir() if path.name != BALLAST]


def why_not() -> str | None:
    """Return the reason why there can be no such machine here, or None."""
    if os.geteuid() != 0:
        return "a disk and a network of its own need root"
    missing = [tool for tool in ("ip", "unshare", "nsenter", "cc") if shutil.which(tool) is None]
    return f"not installed: {', '.join(missing)}" if missing else None


@contextmanager
def machine(directory: Path) -> Iterator[Machine]:
    """Prepare the parts of a machine below `directory`."""
    library, clock, temporary = directory / "clock.so", directory / "clock", directory / "tmp"
    source = Path(__file__).with_name("clock.c")
    subprocess.run(["cc", "-shared", "-fPIC", "-O2", "-o", str(library), str(source)], check=True, capture_output=True)
    clock.write_bytes(struct.pack("=q", 0))
    temporary.mkdir()
    with mounted(directory / "disk", DISK_BYTES) as disk, mounted(directory / "shm", MEMORY_BYTES) as memory:
        yield Machine(disk, memory, temporary, clock, library)
