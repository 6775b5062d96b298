"""TCP connection between the driver and a rank on another host, on which every message is signed.

Messages are pickled commands, so anyone who could forge one could run code. Only the processes of the run know the key
(`FULIGO_RANKS_KEY`). Messages are not encrypted.
"""

from __future__ import annotations

import hmac
import secrets
import socket
import struct
from typing import Literal

Side = Literal["driver", "rank"]
_LENGTH = struct.Struct("!Q")
_NUMBER = struct.Struct("!Q?")
"""Index of the message in its direction, and whether the signature covers its body instead of its length."""
_SIGNATURE_BYTES = 32
_NONCE_BYTES = 32


class ForgedMessageError(ConnectionError):
    """Raised for a message without a valid signature of the peer: another process sent it, or it was changed or replayed."""


class SignedConnection:
    """Connection with the interface of `multiprocessing.connection.Connection`.

    A message consists of its length, a signature of the length, the body and a signature of the body. A signature is the HMAC-SHA256 of the
    message's index and the signed bytes, with a key for this connection and direction. Messages of other connections, replayed messages
    and messages that are too long are refused before their body is read.

    Args:
        stream: socket connected to the peer, which wraps its end in a `SignedConnection` too.
        key: secret of the run.
        side: side of this process.
    """

    def __init__(self, stream: socket.socket, key: bytes, side: Side) -> None:
        stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._stream = stream
        own = secrets.token_bytes(_NONCE_BYTES)
        stream.sendall(own)
        theirs = bytes(self._read(_NONCE_BYTES))
        nonces = own + theirs if side == "driver" else theirs + own
        keys = {name: hmac.digest(key, b"fuligo ranks " + name.encode() + nonces, "sha256") for name in ("driver", "rank")}
        self._own_key = keys.pop(side)
        [self._peers_key] = keys.values()
        self._num_sent = 0
        self._num_received = 0

    def send_bytes(self, message: bytes) -> None:
        length = _LENGTH.pack(len(message))
        self._stream.sendall(length + _signature(self._own_key, self._num_sent, length, is_body=False))
        self._stream.sendall(message)
        self._stream.sendall(_signature(self._own_key, self._num_sent, message, is_body=True))
        self._num_sent += 1

    def recv_bytes(self, maxlength: int | None = None) -> bytearray:
        """Return the next message of the peer.

        Raises ForgedMessageError if its signature is wrong, or it is longer than `maxlength`, and EOFError if the peer closed the
        connection.
        """
        length = self._signed(_LENGTH.size, is_body=False)
        (num_bytes,) = _LENGTH.unpack(length)
        if maxlength is not None and num_bytes > maxlength:
            raise ForgedMessageError(f"a message has {num_bytes} bytes, but at most {maxlength} are allowed")
        message = self._signed(num_bytes, is_body=True)
        self._num_received += 1
        return message

    def settimeout(self, timeout_s: float | None) -> None:
        self._stream.settimeout(timeout_s)

    def fileno(self) -> int:
        return self._stream.fileno()

    def close(self) -> None:
        self._stream.close()

    def _signed(self, num_bytes: int, *, is_body: bool) -> bytearray:
        """Read bytes and their signature; return the bytes if the peer signed them, else raise ForgedMessageError."""
        content = self._read(num_bytes)
        expected = _signature(self._peers_key, self._num_received, content, is_body=is_body)
        if not hmac.compare_digest(expected, self._read(_SIGNATURE_BYTES)):
            raise ForgedMessageError("a message is not signed with the key of this run (FULIGO_RANKS_KEY)")
        return content

    def _read(self, num_bytes: int) -> bytearray:
        content = bytearray(num_bytes)
        left = memoryview(content)
        while left:
            num_read = self._stream.recv_into(left)
            if num_read == 0:
                raise EOFError
            left = left[num_read:]
        return content


def _signature(key: bytes, number: int, content: bytes | bytearray, *, is_body: bool) -> bytes:
    signature = hmac.new(key, _NUMBER.pack(number, is_body), "sha256")
    signature.update(content)
    return signature.digest()
