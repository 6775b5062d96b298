from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed import HashStore, ProcessGroupGloo

from fuligo.trainer.ranks.world import join_world, leave_world


@pytest.fixture
def joined(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    join_world(0, 1, "cpu", store=HashStore(), key=None, timeout_s=60)
    yield
    leave_world()


def listening_sockets() -> set[str]:
    """Return the sockets of this process that listen; each gloo device has one."""
    rows = [line.split() for name in ("tcp", "tcp6") for line in Path("/proc/self/net", name).read_text().splitlines()[1:]]
    inodes = {f"socket:[{row[9]}]" for row in rows if row[3] == "0A"}
    return {str(link.readlink()) for link in Path("/proc/self/fd").iterdir() if link.exists()} & inodes


def gloo_of(group: dist.ProcessGroup) -> ProcessGroupGloo:
    backend = group._get_backend(torch.device("cpu"))
    assert isinstance(backend, ProcessGroupGloo)
    return backend


def test_groups_of_a_rank_share_one_device_and_add_up(joined: None) -> None:
    before = listening_sockets()
    groups = [dist.new_group([0], timeout=timedelta(seconds=30 + n)) for n in range(5)]
    assert listening_sockets() == before
    for number, group in enumerate(groups):
        assert isinstance(group, dist.ProcessGroup)
        assert gloo_of(group).options._timeout == timedelta(seconds=30 + number)
        value = torch.tensor([number])
        dist.all_reduce(value, group=group)
        assert value.tolist() == [number]


def test_an_interface_that_the_user_names_is_used(joined: None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "lo")
    before = listening_sockets()
    groups = [dist.new_group([0]) for _ in range(2)]
    assert all(isinstance(group, dist.ProcessGroup) for group in groups)
    assert len(listening_sockets() - before) <= 1
    monkeypatch.setenv("GLOO_SOCKET_IFNAME", "none-such")
    with pytest.raises(RuntimeError, match="none-such"):
        dist.new_group([0])
