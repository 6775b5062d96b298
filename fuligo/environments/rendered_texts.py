"""Cache of rendered conversations, so that each turn is rendered once: the text rendered for one turn is the prefix of the next one's."""

import threading
from collections import OrderedDict
from collections.abc import Sequence
from hashlib import blake2b

import orjson

from fuligo.environments.environment import Tool
from fuligo.types import Messages

MAX_CHARS = 32 * 2**20
"""Limit of all cached texts together, in characters. Texts of ended conversations stay until newer texts need the space."""


class RenderedTexts:
    """Cache of rendered texts by conversation. Methods may be called from several threads.

    All texts together have at most `max_chars` characters; the oldest ones are dropped.
    """

    def __init__(self, max_chars: int = MAX_CHARS) -> None:
        self._max_chars = max_chars
        self._num_chars = 0
        self._texts: OrderedDict[bytes, tuple[str, int]] = OrderedDict()
        """Text by key, with the number of conversations that still need it: samples of one prompt begin with the same text."""
        self._lock = threading.Lock()

    def add(self, messages: Messages, tools: Sequence[Tool], text: str) -> None:
        """Remember the text of a conversation, unless it is longer than the cache, or its messages cannot be written as JSON."""
        key = _key(messages, tools)
        if key is None or len(text) > self._max_chars:
            return
        with self._lock:
            old, num = self._texts.pop(key, ("", 0))
            self._num_chars += len(text) - len(old)
            self._texts[key] = text, num + 1
            while self._num_chars > self._max_chars:
                self._num_chars -= len(self._texts.popitem(last=False)[1][0])

    def find(self, messages: Messages, tools: Sequence[Tool]) -> str | None:
        """Return the text of a conversation; None if it is not known."""
        key = _key(messages, tools)
        with self._lock:
            return None if key is None or key not in self._texts else self._texts[key][0]

    def take(self, messages: Messages, tools: Sequence[Tool]) -> str | None:
        """Return the text of a conversation that continues, and forget it if no other sample needs it; None if it is not known."""
        key = _key(messages, tools)
        with self._lock:
            known = None if key is None else self._texts.pop(key, None)
            if known is None:
                return None
            text, num = known
            if num > 1 and key is not None:
                self._texts[key] = text, num - 1
            else:
                self._num_chars -= len(text)
            return text


def _key(messages: Messages, tools: Sequence[Tool]) -> bytes | None:
    """Return a digest of everything that a template may show, the order of keys included; None if it is not JSON data."""
    try:
        return blake2b(orjson.dumps([messages, [tool.to_json() for tool in tools]]), digest_size=16).digest()
    except (orjson.JSONEncodeError, RecursionError):
        return None
