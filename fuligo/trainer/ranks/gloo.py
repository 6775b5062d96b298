"""Gloo devices of the ranks' process groups."""

import functools
import os
from datetime import timedelta

from torch.distributed import ProcessGroupGloo, Store  # pyright: ignore[reportPrivateImportUsage]


@functools.cache  # else a second call would wrap the first one's function
def share_devices() -> None:
    """Let all gloo groups that this process creates from now on use the same devices.

    By default, each group has devices of its own, and the thread of each looks for messages every 10 ms. A rank of Megatron is in about 20
    groups: on a machine with few cores, their threads would take most of the time of a small model.
    """
    create = ProcessGroupGloo.__init__

    def create_with_shared_devices(
        self: ProcessGroupGloo, store: Store, rank: int, size: int, timeout: timedelta = timedelta(minutes=30)
    ) -> None:
        options = ProcessGroupGloo._Options()  # pyright: ignore[reportAttributeAccessIssue]  # as torch names it
        options._devices = _devices(os.getpid(), os.environ.get("GLOO_SOCKET_IFNAME", ""))
        options._threads = 2 * len(options._devices)  # as torch does
        options._timeout = timeout
        create(self, store, rank, size, options)

    ProcessGroupGloo.__init__ = create_with_shared_devices


@functools.cache
def _devices(pid: int, interfaces: str) -> list[ProcessGroupGloo.Device]:
    """Return a device for each network interface that the user named (default: that of the host's name).

    Args:
        pid: this process; after a fork, the threads of its parent's devices are missing.
        interfaces: names, separated by commas.
    """
    if not interfaces:
        return [ProcessGroupGloo.create_default_device()]
    return [ProcessGroupGloo.create_device(interface=name) for name in interfaces.split(",")]
