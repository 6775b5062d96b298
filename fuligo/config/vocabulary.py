"""Comparison of the vocabularies of two models by their files."""

import json
from pathlib import Path
from typing import Any

from fuligo.formats.hugging_face import read_model_config

_TOKENIZER = "tokenizer.json"
_SHOWN = 3


def vocabulary_difference(teacher: Path, student: Path) -> str | None:
    """Return why a teacher cannot score the student's samples, or None.

    With equal tokenizers the teacher's matrices may be padded beyond the student's, because the padding is never sampled. If a
    tokenizer.json is missing, as for a model with its own tokenizer code, only the sizes are compared. Raises DamagedFileError if a
    config.json is missing or unreadable.
    """
    size, needed = (read_model_config(directory).get("vocab_size") for directory in (teacher, student))
    same = _differing(teacher / _TOKENIZER, student / _TOKENIZER)
    if same:
        shown = ", ".join(same[:_SHOWN])
        found = f"{teacher} and {student} have different tokenizers: {shown} ({len(same)} ids differ)"
        return f"{found}; use a teacher with the student's tokenizer"
    if size is None or needed is None or size == needed or (same is not None and size > needed):
        return None
    return f"{teacher} has a vocabulary of {size} tokens and {student} one of {needed}; use a teacher with the student's vocabulary"


def _differing(first: Path, second: Path) -> list[str] | None:
    """Return the ids whose tokens differ, with both tokens; None if a file is missing."""
    if not (first.is_file() and second.is_file()):
        return None
    texts = first.read_bytes(), second.read_bytes()
    if texts[0] == texts[1]:
        return []
    mine, theirs = (_tokens(json.loads(text)) for text in texts)
    return [
        f"{number} is {mine.get(number)!r} and {theirs.get(number)!r}"
        for number in sorted(mine.keys() | theirs.keys())
        if mine.get(number) != theirs.get(number)
    ]


def _tokens(tokenizer: dict[str, Any]) -> dict[int, str]:
    """Return the tokens by id. A unigram model has a list of (token, score)."""
    vocabulary = tokenizer.get("model", {}).get("vocab", {})
    known = {i: entry[0] for i, entry in enumerate(vocabulary)} if isinstance(vocabulary, list) else {i: t for t, i in vocabulary.items()}
    return known | {token["id"]: token["content"] for token in tokenizer.get("added_tokens") or []}
