"""Errors of a Ray cluster that is not there."""

import socket
import subprocess
import sys
from pathlib import Path

import pytest

from fuligo.cluster.connection import connected
from fuligo.errors import ConfigError


@pytest.mark.parametrize("several_nodes", [False, True])
async def test_an_address_where_nothing_listens_is_named_at_once(several_nodes: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr("ray.init", lambda **_: pytest.fail("Ray would try for minutes"))
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{deaf.getsockname()[1]}"
        monkeypatch.setenv("RAY_ADDRESS", address)
        with pytest.raises(ConfigError, match=rf"cannot connect to a Ray cluster at {address} \(.*refused\); start one with"):
            async with connected(num_slots=1, device="cpu", several_nodes=several_nodes, log_file=tmp_path / "ray.txt"):
                pass


async def test_a_killed_cluster_that_left_its_address_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    monkeypatch.setattr("ray.init", lambda **_: pytest.fail("Ray would try for minutes"))
    monkeypatch.setattr("ray._private.services.find_gcs_addresses", set)
    monkeypatch.setattr("ray._private.utils.get_ray_address_file", lambda _: str(tmp_path / "ray_current_cluster"))
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        address = f"127.0.0.1:{deaf.getsockname()[1]}"
        (tmp_path / "ray_current_cluster").write_text(address)
        with pytest.raises(ConfigError, match=rf"cannot connect to a Ray cluster at {address}"):
            async with connected(num_slots=1, device="cpu", several_nodes=True, log_file=tmp_path / "ray.txt"):
                pass


PRINT = """
import sys
import fuligo.cluster.connection
from ray._private.worker import print_to_stdstream
for line in sys.argv[1:]:
    print_to_stdstream({"lines": [line], "pid": "raylet", "is_err": False}, ignore_prefix=False)
"""


def test_a_lost_node_is_reported_only_by_the_run() -> None:
    """The message is Ray's own (src/ray/gcs/gcs_node_manager.cc), which its driver prints with others."""
    dead = "The node with node id: f00 and address: 10.0.0.2 and node name: 10.0.0.2 has been marked dead because the detector has missed"
    printed = subprocess.run(
        [sys.executable, "-c", PRINT, dead, "3 workers were killed"], capture_output=True, text=True, check=True
    ).stdout
    assert "3 workers were killed" in printed and "marked dead" not in printed
