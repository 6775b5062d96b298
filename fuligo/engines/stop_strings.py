"""Stop strings: finding one in a response, and cutting it off the text. Token ids are never changed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol


class Tokenizer(Protocol):
    """Part of a transformers tokenizer that is used."""

    def decode(self, token_ids: Any, skip_special_tokens: bool = False) -> Any: ...


def matched_stop(tokenizer: Tokenizer, ids: list[int], stops: Sequence[str]) -> str | None:
    """Return the stop string that the newest token completed, if any.

    Only the tail is decoded, because every token of a stop string holds at least one of its bytes.
    """
    longest = max(len(stop.encode()) for stop in stops)
    tail = tokenizer.decode(ids[-(longest + 1) :])
    return next((stop for stop in stops if stop in tail), None)


def trim(text: str, stops: Sequence[str], num_before: int = 0) -> str:
    """Return the text before the first stop string that ends after the first `num_before` characters."""
    starts = [text.find(stop, max(0, num_before - len(stop) + 1)) for stop in stops]
    return text[: min((start for start in starts if start >= 0), default=len(text))]
