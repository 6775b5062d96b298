"""A signed connection delivers the peer's messages once and in order, and nothing else."""

import socket
import struct
import threading
from collections.abc import Iterator

import pytest

from fuligo.trainer.ranks.signed import ForgedMessageError, SignedConnection

KEY = b"a key of 32 characters at least."
SIGNATURE_BYTES = 32


class Wire:
    """Connection between driver and rank through an attacker, who sees and may change every byte to the rank."""

    def __init__(self) -> None:
        self._to_driver, driver_end = _tcp_pair()
        self.to_rank, rank_end = _tcp_pair()
        made: list[SignedConnection] = []
        making = threading.Thread(target=lambda: made.append(SignedConnection(driver_end, KEY, "driver")))
        making.start()
        self.to_rank.sendall(self._to_driver.recv(32, socket.MSG_WAITALL))
        self.rank = SignedConnection(rank_end, KEY, "rank")
        self._to_driver.sendall(self.to_rank.recv(32, socket.MSG_WAITALL))
        making.join()
        [self.driver] = made
        rank_end.settimeout(10)

    def sent(self, message: bytes) -> bytes:
        """Return the bytes of a message that the driver sends."""
        self.driver.send_bytes(message)
        return self._to_driver.recv(8 + SIGNATURE_BYTES + len(message) + SIGNATURE_BYTES, socket.MSG_WAITALL)

    def close(self) -> None:
        for end in (self._to_driver, self.to_rank, self.rank, self.driver):
            end.close()


def _tcp_pair() -> tuple[socket.socket, socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        client = socket.create_connection(listener.getsockname())
        return client, listener.accept()[0]


@pytest.fixture
def wire() -> Iterator[Wire]:
    wire = Wire()
    yield wire
    wire.close()


def test_messages_arrive_in_order(wire: Wire) -> None:
    for message in (b"first", b"", b"x" * 100_000):
        wire.to_rank.sendall(wire.sent(message))
        assert wire.rank.recv_bytes() == message


def test_a_replayed_message_is_refused(wire: Wire) -> None:
    frame = wire.sent(b"train")
    wire.to_rank.sendall(frame + frame)
    assert wire.rank.recv_bytes() == b"train"
    with pytest.raises(ForgedMessageError, match="not signed"):
        wire.rank.recv_bytes()


def test_a_message_of_another_connection_is_refused(wire: Wire) -> None:
    other = Wire()
    wire.to_rank.sendall(other.sent(b"train"))
    with pytest.raises(ForgedMessageError, match="not signed"):
        wire.rank.recv_bytes()
    other.close()


def test_a_message_of_the_rank_itself_is_refused(wire: Wire) -> None:
    wire.rank.send_bytes(b"answer")
    wire.to_rank.sendall(wire.to_rank.recv(8 + 2 * SIGNATURE_BYTES + len(b"answer"), socket.MSG_WAITALL))
    with pytest.raises(ForgedMessageError, match="not signed"):
        wire.rank.recv_bytes()


def test_messages_out_of_order_are_refused(wire: Wire) -> None:
    wire.sent(b"first")
    wire.to_rank.sendall(wire.sent(b"second"))
    with pytest.raises(ForgedMessageError, match="not signed"):
        wire.rank.recv_bytes()


@pytest.mark.parametrize("position", [0, 7, 8, 39, 40, 44, 45, 76])
def test_a_changed_byte_is_refused(wire: Wire, position: int) -> None:
    frame = bytearray(wire.sent(b"train"))
    frame[position] ^= 1
    wire.to_rank.sendall(frame)
    with pytest.raises(ForgedMessageError, match="not signed"):
        wire.rank.recv_bytes()


def test_an_oversized_length_is_refused_before_memory_is_taken(wire: Wire) -> None:
    wire.to_rank.sendall(struct.pack("!Q", 2**60) + bytes(SIGNATURE_BYTES))
    with pytest.raises(ForgedMessageError, match="not signed"):
        wire.rank.recv_bytes()


def test_a_message_longer_than_expected_is_refused(wire: Wire) -> None:
    wire.to_rank.sendall(wire.sent(b"x" * 11))
    with pytest.raises(ForgedMessageError, match="a message has 11 bytes, but at most 10 are allowed"):
        wire.rank.recv_bytes(10)
