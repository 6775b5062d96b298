"""Tests of the questions of `examples/smollm2`: the reward accepts a right answer to each, and the short ones allow a collapse."""

import json
import runpy
import sys
from pathlib import Path

import pytest

from fuligo.rollout.rewards.instructions import judge

SCRIPT = Path(__file__).parents[3] / "examples" / "smollm2" / "make_tasks.py"
ANSWERS = {
    "punctuation:no_comma": "Everyone knows them{}.",
    "startend:quotation": '"Everyone knows them{}."',
    "detectable_format:number_bullet_lists": "* one{}\n* two\n* three",
    "detectable_format:title": "<<Well known>>\nEveryone knows them{}.",
    "detectable_content:postscript": "Everyone knows them{}.\nP.S. Yes.",
}
"""A short answer that follows the instruction, with a place for more words."""


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict]]:
    directory = tmp_path_factory.mktemp("tasks")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "argv", [str(SCRIPT), str(directory)])
        runpy.run_path(str(SCRIPT), run_name="__main__")
    return {file.stem: [json.loads(line) for line in file.read_text().splitlines()] for file in directory.glob("*.jsonl")}


def test_a_short_answer_suffices_only_without_the_minimum_length(rows):
    for length, split in (("short", "train"), ("short", "test"), ("long", "train"), ("long", "test")):
        for row in rows[f"{length}-{split}"]:
            answer = ANSWERS[row["metadata"]["instruction_id_list"][0]]
            assert judge(answer.format(""), row["metadata"]) == (length == "short")
            assert judge(answer.format(" and more" * 20), row["metadata"])
            assert not judge("No, thanks, " + "never " * 50, row["metadata"])


def test_the_subjects_of_the_test_are_new(rows):
    def words(split: str) -> set[str]:
        return {word.strip(".?") for row in rows[f"short-{split}"] for word in row["prompt"].split()}

    assert len(rows["short-test"]) == 128
    assert len(words("test") - words("train")) == 16, "its subjects"
