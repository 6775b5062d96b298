"""Tests of the comparison of a teacher's vocabulary with its student's."""

import json
from pathlib import Path

import pytest

from fuligo.cli.weight_problems import vocabulary_difference

WORDS = {"a": 0, "b": 1, "c": 2}


def model(directory: Path, size: int, vocabulary: object = None, added: tuple[tuple[int, str], ...] = ()) -> Path:
    directory.mkdir()
    (directory / "config.json").write_text(json.dumps({"model_type": "qwen3", "vocab_size": size}))
    if vocabulary is not None:
        tokens = [{"id": number, "content": content, "special": True} for number, content in added]
        (directory / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}, "added_tokens": tokens}))
    return directory


@pytest.mark.parametrize(
    ("teacher", "student"),
    [
        ((4, WORDS), (4, WORDS)),
        ((4, WORDS, ((3, "<end>"),)), (4, {**WORDS, "<end>": 3})),
        ((3, [["a", -1.0], ["b", -2.0], ["c", -3.0]]), (3, WORDS)),
        ((8, WORDS), (4, WORDS)),
        ((4,), (4, WORDS)),
    ],
    ids=["equal", "another file of the same tokens", "unigram", "padded further", "not to be seen"],
)
def test_equal_tokens_are_fine(tmp_path: Path, teacher: tuple, student: tuple) -> None:
    assert vocabulary_difference(model(tmp_path / "t", *teacher), model(tmp_path / "s", *student)) is None


@pytest.mark.parametrize(
    ("teacher", "student", "text"),
    [
        ((4, {**WORDS, "d": 3}), (4, {**WORDS, "D": 3}), "have different tokenizers: 3 is 'd' and 'D' (differing ids: 1)"),
        ((4, WORDS), (4, WORDS, ((3, "<think>"),)), "3 is None and '<think>'"),
        ((4, WORDS), (8, WORDS), "has a vocabulary of 4 tokens and"),
        ((8,), (4, WORDS), "has a vocabulary of 8 tokens and"),
    ],
    ids=["a token", "an added token", "too small", "sizes alone"],
)
def test_others_are_named(tmp_path: Path, teacher: tuple, student: tuple, text: str) -> None:
    difference = vocabulary_difference(model(tmp_path / "t", *teacher), model(tmp_path / "s", *student))
    assert difference is not None and text in difference
