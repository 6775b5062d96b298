"""Texts of single tokens by the run's tokenizer. If it is not on this machine, tokens are shown by id."""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

_BROKEN = "\ufffd"
"""Replacement character, which the tokenizer returns for an incomplete character."""
MAX_TOKENIZER_BYTES = 128 * 2**20
"""Largest tokenizer file that is loaded, because the run directory of a stranger may name one that fills the memory; real ones have up to
35 MB."""
MAX_PARTS = 8
"""Maximum number of tokens that are decoded together to complete a character."""


class TokenTexts:
    """Texts of tokens; the tokenizer is loaded on first use."""

    def __init__(self, candidates: Iterable[Path]) -> None:
        self._candidates = list(candidates)
        self._tokenizer: Any = None
        self._searched = False

    def texts(self, ids: Sequence[int]) -> list[str] | None:
        """Return one text per token; None without a tokenizer. Of the tokens that form one character, only the first has a text."""
        tokenizer = self._found()
        if tokenizer is None:
            return None
        known = {token: tokenizer.decode([token], skip_special_tokens=False) for token in set(ids)}
        texts = [known[token] for token in ids]
        at = 0
        while at < len(ids):
            at = _joined(tokenizer, ids, texts, at) if _BROKEN in texts[at] else at + 1
        return texts

    def text(self, ids: Sequence[int]) -> str | None:
        """Return the text of all tokens together; None without a tokenizer."""
        tokenizer = self._found()
        return None if tokenizer is None else tokenizer.decode(list(ids), skip_special_tokens=False)

    def markers(self, ids: Sequence[int]) -> list[bool]:
        """Return for each token whether it was added to the vocabulary, as `<|im_start|>` was, and so is not ordinary text."""
        tokenizer = self._found()
        added = set() if tokenizer is None else set(tokenizer.get_added_tokens_decoder())
        return [token in added for token in ids]

    def _found(self) -> Any:
        if not self._searched:
            self._searched = True
            self._tokenizer = next(filter(None, map(_tokenizer, self._candidates)), None)
        return self._tokenizer


def _joined(tokenizer: Any, ids: Sequence[int], texts: list[str], at: int) -> int:
    """Assign the characters of the tokens from `at` on to the first of them; return the position of the next token."""
    for end in range(at + 2, min(at + MAX_PARTS, len(ids)) + 1):
        text = tokenizer.decode(list(ids[at:end]), skip_special_tokens=False)
        if _BROKEN not in text:
            texts[at:end] = [text, *[""] * (end - at - 1)]
            return end
    return at + 1


@lru_cache(maxsize=4)
def _tokenizer(directory: Path) -> Any:
    from tokenizers import Tokenizer

    file = directory / "tokenizer.json"
    try:
        is_usable = file.is_file() and file.stat().st_size <= MAX_TOKENIZER_BYTES
        return Tokenizer.from_file(str(file)) if is_usable else None
    except Exception:  # the library raises plain Exception for unreadable files
        return None
