"""The process that starts those of episodes."""

import errno
import os
import socket
from contextlib import closing

import pytest

from fuligo.environments import EnvironmentSettings
from fuligo.environments.isolation.messages import HEADER, FailureError, decode_reply
from fuligo.environments.isolation.spawner import SpawnerSettings, _Spawner
from fuligo.environments.load import EnvironmentFactory
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


@pytest.mark.parametrize(
    "body", [b"", b"{}", b"[1]", b"[1, [], null, null, null]", b'["1", {}, null, null, null]', b"[1, {}, 2, null, null]"]
)
def test_a_reply_that_is_none_is_refused(body: bytes) -> None:
    with pytest.raises(FailureError, match="its process sent an invalid message"):
        decode_reply(body)
