"""Tests of the completions of `examples/gemma3-270m`, and of the tokenizer that `examples/fetch_model.py` builds for its model."""

import json
import runpy
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from fuligo.rollout.rewards.rules import f1_score

EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, str]]]:
    directory, script = tmp_path_factory.mktemp("tasks"), str(EXAMPLES / "gemma3-270m" / "make_tasks.py")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [script, str(directory)])
        runpy.run_path(script, run_name="__main__")
    return {file.stem: [json.loads(line) for line in file.read_text().splitlines()] for file in directory.glob("*.jsonl")}


def words(prompt: str) -> set[str]:
    return {word for word in prompt.replace('"', " ").replace(",", " ").split() if word.islower()} - {"last", "word", "of", "is", "and"}


def test_labels_are_the_answers_and_words_of_the_test_are_new(rows: dict[str, list[dict[str, str]]]) -> None:
    for row in (*rows["train"], *rows["test"]):
        *shown, question = row["prompt"].split("\n")
        assert len(shown) == 3 and question.endswith(" is")
        for line in (*shown, f"{question} {row['label']}"):
            asked, _, answer = line.partition(" is ")
            things = asked.replace('"', " ").replace(",", " ").replace(" and ", " ").split(" of ")[1].split()
            right = {"The last": things[-1], "The longest": max(things, key=len), "The largest": max(things)}
            assert answer == right[" ".join(asked.split()[:2])]
        assert f1_score(f" {row['label']}", row["label"]) == 1
    seen = set().union(*(words(row["prompt"]) for row in rows["train"]))
    kinds = {"longest", "largest"}
    assert not seen & set().union(*(words(row["prompt"]) for row in rows["test"])) - kinds


def fake_gguf(pieces: list[tuple[str, float, int]]) -> ModuleType:
    columns = dict(zip(("tokens", "scores", "token_type"), zip(*pieces, strict=True), strict=True))
    fields = {f"tokenizer.ggml.{name}": SimpleNamespace(contents=lambda values=values: list(values)) for name, values in columns.items()}
    module: Any = ModuleType("gguf")
    module.GGUFReader = lambda _: SimpleNamespace(fields=fields)
    return module


def test_merges_follow_the_scores_of_tokens(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """SentencePiece joins the two neighbors whose token has the highest score, wherever they stand, until no token is left."""
    control, normal, user, byte = 3, 1, 4, 6
    letters = [(letter, -100.0 - number, normal) for number, letter in enumerate("▁abc")]
    joined = [("bc", 0.0, normal), ("ab", -1.0, normal), ("▁a", -2.0, normal), ("abc", -3.0, normal), ("▁abc", -4.0, normal)]
    special = [(name, -1000.0, control) for name in ("<pad>", "<eos>", "<bos>", "<unk>")]
    pieces = [
        *special,
        ("\n", -1000.0, user),
        ("  ", -1000.0, user),
        *((f"<0x{n:02X}>", -1000.0, byte) for n in range(256)),
        *joined,
        *letters,
    ]
    monkeypatch.setitem(sys.modules, "gguf", fake_gguf(pieces))
    build = runpy.run_path(str(EXAMPLES / "fetch_model.py"))["merging_tokenizer"]
    model = SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=None))
    tokenizer = build(tmp_path / "model.gguf", model)

    def tokens(text: str) -> list[str]:
        return tokenizer.convert_ids_to_tokens(tokenizer(text).input_ids)

    assert tokens(" ab") == ["<bos>", "▁", "ab"]  # ab before ▁a
    assert tokens(" abc") == ["<bos>", "▁abc"]  # bc, then ▁a, then ▁abc
    assert tokens("abab\n  ac") == ["<bos>", "ab", "ab", "\n", "  ", "a", "c"]
    assert tokens("é") == ["<bos>", "<0xC3>", "<0xA9>"]
    assert tokenizer.decode(tokenizer(" ab\n  é").input_ids, skip_special_tokens=True) == " ab\n  é"
    assert (tokenizer.eos_token_id, model.generation_config.eos_token_id) == (1, 1)
