"""No process of a run on one host takes connections from other machines."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.e2e.command import DEADLINE_S, environment, train_command
from tests.e2e.processes import descendants
from tests.e2e.warm_children import ForkServer

LOOPBACK = {"0100007F", "00000000000000000000000001000000"}
"""127.0.0.1 and ::1 as the kernel prints them."""


def listening() -> dict[str, str]:
    """Return the local address (hexadecimal) of every listening TCP socket of this machine, by what a descriptor of it links to."""
    rows = [line.split() for kind in ("tcp", "tcp6") for line in Path(f"/proc/self/net/{kind}").read_text().splitlines()[1:]]
    return {f"socket:[{row[9]}]": row[1].partition(":")[0] for row in rows if row[3] == "0A"}


def listeners(pid: int, sockets: dict[str, str]) -> set[str]:
    """Return the local addresses of those of the `sockets` that a process has."""
    try:
        links = {os.readlink(file) for file in Path(f"/proc/{pid}/fd").iterdir()}  # noqa: PTH115
    except OSError:  # it has ended
        return set()
    return {sockets[link] for link in links & sockets.keys()}


@pytest.mark.skipif(not Path("/proc/self/net/tcp").exists(), reason="needs /proc")
# On one host, ranks of torchrun connect by a Unix socket, which tests/unit/trainer/test_torchrun.py tests.
@pytest.mark.parametrize("launcher", ["the driver", pytest.param("torchrun", marks=pytest.mark.slow)])
def test_every_listener_of_a_run_is_on_loopback(
    checkpoint: Path, prompts: Path, warm_commands: ForkServer, tmp_path: Path, launcher: str
) -> None:
    """Ranks started by torchrun use torchrun's own store, which listens everywhere (SECURITY.md)."""
    start = [sys.executable, "-m", *(["torch.distributed.run", "--nproc-per-node", "2", "-m"] if launcher == "torchrun" else []), "fuligo"]
    command = [*start, *train_command(checkpoint, prompts, run_dir=tmp_path / "run", actor_num_gpus_per_node=2, num_rollout=1)]
    found: dict[str, set[str]] = {}
    deadline = time.monotonic() + DEADLINE_S
    with (
        warm_commands.serving(),
        (tmp_path / "output").open("w") as output,
        subprocess.Popen(command, stdout=output, stderr=output, env=environment()) as run,
    ):
        while run.poll() is None and time.monotonic() < deadline:
            sockets = listening()
            processes = descendants(run.pid) | ({} if launcher == "torchrun" else {run.pid: "driver"})
            for pid, name in processes.items():
                if "torch.distributed.run" not in name:  # a child of torchrun has its name and its store until it starts the rank
                    found.setdefault(name, set()).update(listeners(pid, sockets))
            time.sleep(0.1)
        run.kill()
    assert run.returncode == 0, (tmp_path / "output").read_text()
    assert any(found.values()), "no process listened at all"
    assert {name: addresses - LOOPBACK for name, addresses in found.items() if addresses - LOOPBACK} == {}
