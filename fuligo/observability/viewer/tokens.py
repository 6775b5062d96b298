"""The text of single tokens, by the run's tokenizer; where it is not on this machine, tokens are shown by their ids."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any


class TokenTexts:
    """Loaded when first asked."""

    def __init__(self, candidates: Iterable[Path]) -> None:
        self._candidates = list(candidates)
        self._tokenizer: Any = None
        self._searched = False

    def texts(self, ids: Sequence[int]) -> list[str] | None:
        """One text a token; None without a tokenizer. A token that is a part of a character has the replacement character."""
        tokenizer = self._load()
        if tokenizer is None:
            return None
        known = {token: tokenizer.decode([token], skip_special_tokens=False) for token in set(ids)}
        return [known[token] for token in ids]

    def _load(self) -> Any:
        if not self._searched:
            self._searched = True
            self._tokenizer = next(filter(None, map(_tokenizer, self._candidates)), None)
        return self._tokenizer


@lru_cache(maxsize=4)
def _tokenizer(directory: Path) -> Any:
    from tokenizers import Tokenizer

    file = directory / "tokenizer.json"
    try:
        return Tokenizer.from_file(str(file)) if file.is_file() else None
    except Exception:  # the library raises plain Exceptions for files it cannot read
        return None
