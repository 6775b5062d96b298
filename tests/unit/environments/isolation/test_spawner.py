"""The process that starts those of episodes."""

import errno
import fcntl
import os
import resource
import socket
from contextlib import closing

import pytest

from fuligo.environments import EnvironmentSettings
from fuligo.environments.isolation.messages import HEADER, FailureError, decode_reply
from fuligo.environments.isolation.spawner import SpawnerSettings, _Spawner
from fuligo.environments.isolation.spawner_process import SpawnerProcess
from fuligo.environments.load import EnvironmentFactory
from fuligo.errors import ConfigError
from tests.unit.environments.isolation.misbehaving import Misbehaving


def test_a_fork_that_fails_is_reported_to_its_episode(monkeypatch: pytest.MonkeyPatch) -> None:
    def fork() -> int:
        raise BlockingIOError(errno.EAGAIN, os.strerror(errno.EAGAIN))

    monkeypatch.setattr(os, "fork", fork)
    control, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    ours, theirs = socket.socketpair()
    with control, other, closing(ours):
        spawner = _Spawner(control, EnvironmentFactory(Misbehaving, EnvironmentSettings()), SpawnerSettings("", {}, (), None, os.getpid()))
        spawner._start(theirs.detach(), ())
        answer = ours.makefile("rb").read()
    failure = decode_reply(answer[HEADER.size :]).failure
    assert failure is not None
    assert failure.startswith("cannot start its process: Resource temporarily unavailable; raise the limit of processes or memory")


async def test_a_run_with_many_open_files_is_told_how_a_process_ended() -> None:
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    process = SpawnerProcess(SpawnerSettings("", {}, (), None, os.getpid()), {})
    control, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(limits[0], min(4096, limits[1])), limits[1]))
    try:
        process._control = socket.socket(fileno=fcntl.fcntl(control, fcntl.F_DUPFD, 1024))
        with control, other:
            other.send(b'{"pid": 812, "status": 3}')
            assert await process.status(812) == "ended with exit status 3"
    finally:
        process.end()
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


def test_settings_that_are_too_large_are_named() -> None:
    process = SpawnerProcess(SpawnerSettings("a.Game", {"text": "x" * 140_000}, (), None, os.getpid()), {})
    with pytest.raises(
        ConfigError, match=r"isolate the environment a\.Game: its --environment-settings take 140,\d+ bytes, more than 131,072;"
    ):
        process.start()
    assert process.process is None


@pytest.mark.parametrize(
    "body", [b"", b"{}", b"[1]", b"[1, [], null, null, null]", b'["1", {}, null, null, null]', b"[1, {}, 2, null, null]"]
)
def test_a_reply_that_is_none_is_refused(body: bytes) -> None:
    with pytest.raises(FailureError, match="its process sent an invalid message"):
        decode_reply(body)
