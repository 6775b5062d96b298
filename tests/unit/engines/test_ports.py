"""Port claims on one machine never collide."""

import socket
import subprocess
import sys

import pytest

from fuligo.engines.host import FIRST_PORT, LAST_PORT, PortClaims
from fuligo.errors import EngineError

CLAIM = "import sys; from fuligo.engines.host import PortClaims; c = PortClaims(); print(c.claim(4), flush=True); sys.stdin.read()"


def test_claims_do_not_overlap_whoever_makes_them() -> None:
    with PortClaims() as ours:
        other = subprocess.Popen([sys.executable, "-c", CLAIM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        assert other.stdout is not None
        theirs = int(other.stdout.readline())
        runs = [range(theirs, theirs + 4), *(range(first, first + 3) for first in (ours.claim(3), ours.claim(3)))]
        other.communicate("")
    ports = [port for run in runs for port in run]
    assert len(set(ports)) == len(ports)
    assert all(FIRST_PORT <= port < LAST_PORT for port in ports)


def test_a_port_in_use_is_passed_over() -> None:
    with PortClaims() as first:
        port = first.claim()
    with socket.socket() as server:
        server.bind(("", port))
        with PortClaims() as second:
            assert second.claim() != port


def test_closed_claims_are_free_again() -> None:
    with PortClaims() as first:
        port = first.claim(8)
    with PortClaims() as second:
        assert second.claim(8) == port


def test_more_ports_than_there_are_cannot_be_claimed() -> None:
    with PortClaims() as claims, pytest.raises(EngineError, match="cannot find 20000 consecutive free ports"):
        claims.claim(20_000)
