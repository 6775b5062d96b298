"""Turns of episodes in sample files."""

from pathlib import Path

import pyarrow.parquet as pq
import pytest

from fuligo.observability import samples
from fuligo.observability.samples import sample_table, write_table
from fuligo.observability.viewer import sample_rows
from fuligo.observability.viewer.answers import sample_answer
from fuligo.observability.viewer.run import RunReader
from fuligo.observability.viewer.sample_rows import MAX_CHARACTERS
from fuligo.types import Episode, ToolUse, Turn

CALL = {"type": "function", "id": "call00001", "function": {"name": "add", "arguments": {"a": 1, "big": 2**70}}}


def episode() -> Episode:
    called = {"role": "assistant", "content": "", "reasoning_content": "use it", "tool_calls": [CALL]}
    return Episode(
        [{"role": "user", "content": "1 + 1?"}],
        [],
        [
            Turn(0, 0, 2, called, [{"role": "tool", "content": "2", "name": "add"}], 0.25, [ToolUse("add", "2", True, 0.5)], 1.0, 0.75),
            Turn(1, 0, 1, {"role": "assistant", "content": "2"}, [], 1.0, [], 2.0, 0.0),
        ],
    )


def test_turns_are_columns_of_values(tmp_path: Path, make_group) -> None:
    group = make_group(0)
    group.samples[1].episode = episode()
    write_table(tmp_path / "rollout_000000.parquet", sample_table([group]))
    none, (first, answer, result, last) = pq.read_table(tmp_path / "rollout_000000.parquet")["turns"].to_pylist()
    assert none is None
    assert (first["turn"], first["role"], first["content"], first["seconds"], first["reward"]) == (0, "user", "1 + 1?", None, None)
    assert answer["tool_calls"] == [{"id": "call00001", "name": "add", "arguments": '{"a":1,"big":"1180591620717411303424"}'}]
    assert (answer["turn"], answer["reasoning"], answer["reward"], answer["seconds"], answer["environment_s"]) == (
        1,
        "use it",
        0.25,
        1.0,
        0.75,
    )
    assert (result["turn"], result["name"], result["failed"], result["seconds"], result["content"]) == (1, "add", True, 0.5, "2")
    assert (last["turn"], last["sample"], last["first_token"], last["num_tokens"]) == (2, 1, 0, 1)


def test_results_without_a_message_each_are_kept(make_group) -> None:
    group = make_group(0, size=1)
    group.samples[0].episode = episode()
    group.samples[0].episode.turns[0].answers = [{"role": "user", "content": "the tool says 2"}]
    _, _, result, message, _ = sample_table([group]).to_pylist()[0]["turns"]
    assert (result["role"], result["name"], result["content"]) == ("tool", "add", "2")
    assert (message["role"], message["name"], message["content"]) == ("user", None, "the tool says 2")


def test_every_sample_of_an_episode_shows_its_turns_and_old_files_open(tmp_path: Path, make_group) -> None:
    (tmp_path / "samples").mkdir()
    first, last = make_group(0), make_group(1)
    for sample in first.samples:
        sample.index = 7
    first.samples[1].episode = episode()
    table = sample_table([first, last])
    write_table(tmp_path / "samples" / "rollout_000000.parquet", table)
    write_table(tmp_path / "samples" / "rollout_000001.parquet", table.drop_columns(["turns"]))
    run = RunReader(tmp_path, "run")
    answers = [sample_answer(run, 0, row) for row in range(4)]
    assert [(each["part"], each["num_parts"]) for each in answers if each] == [(0, 2), (1, 2), (0, 1), (0, 1)]
    assert [len(each["turns"] or ()) for each in answers if each] == [4, 4, 0, 0]
    old = sample_answer(run, 1, 0)
    assert old is not None and old["turns"] is None and old["response"] == "answer 0"


def test_values_that_are_no_text_are_written_as_text(tmp_path: Path, make_group) -> None:
    """Agents choose the ids of calls in their history; what a program printed may not be text."""
    group = make_group(0, size=1)
    sample = group.samples[0]
    sample.response, sample.error = "half \ud800", "cannot open \udcff"
    sample.episode = episode()
    sample.episode.messages = [{"role": "assistant", "content": "", "tool_calls": [CALL | {"id": 3}]}]
    sample.episode.turns[0].tools = [ToolUse("add", "\udcff", False, 0.5), ToolUse("add", "2", False, 0.5)]
    write_table(tmp_path / "rollout_000000.parquet", sample_table([group]))
    row = pq.read_table(tmp_path / "rollout_000000.parquet").to_pylist()[0]
    assert (row["response"], row["error"]) == ("half \\ud800", "cannot open \\udcff")
    assert row["turns"][0]["tool_calls"][0]["id"] == "3"
    assert [entry["content"] for entry in row["turns"][2:4]] == ["\\udcff", "2"]


def test_a_page_shows_the_beginning_of_huge_results(tmp_path: Path, make_group) -> None:
    (tmp_path / "samples").mkdir()
    group = make_group(0, size=1)
    group.samples[0].episode = episode()
    group.samples[0].episode.turns[0].answers[0]["content"] = "x" * (MAX_CHARACTERS + 1)
    write_table(tmp_path / "samples" / "rollout_000000.parquet", sample_table([group]))
    answer = sample_answer(RunReader(tmp_path, "run"), 0, 0)
    assert answer is not None and answer["turns"][2]["content"] == "x" * MAX_CHARACTERS
    assert answer["turns"][1]["tool_calls"][0]["name"] == "add"


def test_turns_of_many_bytes_are_divided_so_that_each_sample_opens(tmp_path: Path, make_group, monkeypatch: pytest.MonkeyPatch) -> None:
    """Long results of tools in every sample of a group of rows; the limits of a few are lowered to keep the file small."""
    monkeypatch.setattr(samples, "BYTES_PER_GROUP", 2**20)
    monkeypatch.setattr(sample_rows, "MAX_GROUP_BYTES", 2**21)
    groups = [make_group(number, size=2) for number in range(20)]
    for number, group in enumerate(groups):
        for sample in group.samples:
            sample.episode = episode()
            sample.episode.turns[0].answers[0] = {"role": "tool", "content": f"{number}" * 100_000, "name": "add"}
    (tmp_path / "samples").mkdir()
    path = tmp_path / "samples" / "rollout_000000.parquet"
    write_table(path, sample_table(groups))
    assert pq.read_metadata(path).num_row_groups > 1
    run = RunReader(tmp_path, "run")
    for row in range(40):
        answer = sample_answer(run, 0, row)
        assert answer is not None and answer["turns"][2]["content"].startswith(f"{row // 2}" * 100)
