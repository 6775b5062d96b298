"""Text of token ids. For byte-level tokenizers, joining the bytes of the ids is several times as fast as the Rust tokenizer."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

import orjson

if TYPE_CHECKING:
    from tokenizers import Tokenizer

_FALLBACK_BYTE = re.compile(r"<0x[0-9A-Fa-f]{2}>")
_BEFORE_BYTES = frozenset({"ByteFallback", "Fuse", "Replace"})
"""Decoders that leave tokens alone whose characters all stand for bytes."""


def backend_decoder(backend: Tokenizer, *, skip_special_tokens: bool) -> Callable[[list[int]], str]:
    """Return `backend.decode` as a function of the ids. Tokens that are added to the tokenizer later are not special to it."""
    if _is_byte_level(backend):
        return ByteDecoder(backend, skip_special_tokens=skip_special_tokens)
    return lambda ids: backend.decode(ids, skip_special_tokens=skip_special_tokens)


def _is_byte_level(backend: Tokenizer) -> bool:
    """Return whether the text of ids is that of their bytes, except for tokens with characters that stand for no byte."""
    if backend.decoder is None:
        return False
    described: dict[str, Any] = orjson.loads(backend.decoder.__getstate__())
    *before, last = described.get("decoders") or [described]
    if last["type"] != "ByteLevel":
        return False
    patterns = [each["pattern"].get("String", "") for each in before if each["type"] == "Replace"]
    return all(each["type"] in _BEFORE_BYTES for each in before) and not any(set(text) <= _byte_of_character().keys() for text in patterns)


class ByteDecoder(dict[int, bytes | None]):
    """Function from ids to their text, with a table of the bytes of the ids that have occurred; None if a token must be decoded by Rust."""

    def __init__(self, backend: Tokenizer, *, skip_special_tokens: bool) -> None:
        super().__init__()
        self._backend = backend
        self._skips = skip_special_tokens
        added = backend.get_added_tokens_decoder().values()
        self._skipped = {token.content for token in added if token.special and skip_special_tokens}

    def __call__(self, ids: list[int]) -> str:
        found = list(map(self.__getitem__, ids))
        try:
            return b"".join(found).decode(errors="replace")  # pyright: ignore[reportArgumentType, reportCallIssue]
        except TypeError:
            return self._backend.decode(ids, skip_special_tokens=self._skips)

    def __missing__(self, id: int) -> bytes | None:
        """Look up an id. Ids that are not in the vocabulary have no text."""
        token = self._backend.id_to_token(id)
        if token is None or token in self._skipped:
            found = b""
        else:
            characters = _byte_of_character()
            is_plain = _FALLBACK_BYTE.fullmatch(token) is None and all(each in characters for each in token)
            found = bytes(characters[each] for each in token) if is_plain else None
        self[id] = found
        return found


@cache
def _byte_of_character() -> dict[str, int]:
    """Return the byte of each character of byte-level vocabularies: printable Latin-1 for itself, the others from U+0100 on."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(0x100 + place): byte for place, byte in enumerate(others)}
