"""What is said of a Ray cluster that is not there."""

from __future__ import annotations

import socket
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
        with pytest.raises(ConfigError, match=rf"no Ray cluster at {address} takes this run \(.*refused\): start one by"):
            async with connected(num_slots=1, device="cpu", several_nodes=several_nodes, log_file=tmp_path / "ray.txt"):
                pass
