"""Entries of --prompt-data: files, patterns, folders of `datasets`; several of them as one dataset."""

import json
from pathlib import Path

import pytest
from datasets import Dataset, DatasetDict
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from fuligo.config.groups import DataFlags
from fuligo.data.check import check_file
from fuligo.data.dataset import PromptDataset
from fuligo.data.locate import locate
from fuligo.data.source import PromptSource
from fuligo.errors import DataError
from tests import tiny


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """Directory with a.jsonl (3 rows: a0 a1 a2), b.jsonl (2 rows) and c.csv (4 rows)."""
    for name, count in (("a", 3), ("b", 2)):
        (tmp_path / f"{name}.jsonl").write_text("".join(json.dumps({"input": f"{name}{row}"}) + "\n" for row in range(count)))
    (tmp_path / "c.csv").write_text("input\nc0\nc1\nc2\nc3\n")
    return tmp_path


def prompts(paths: list[str], tokenizer: PreTrainedTokenizerFast) -> list[object]:
    dataset = PromptDataset.open(paths, DataFlags(), tokenizer)
    return [dataset[row].prompt for row in range(len(dataset))]


def test_a_pattern_is_its_files_in_the_order_of_their_names(files: Path) -> None:
    assert locate(f"{files}/*.jsonl") == [files / "a.jsonl", files / "b.jsonl"]
    (files / "x[1].jsonl").touch()
    assert locate(f"{files}/x[1].jsonl") == [files / "x[1].jsonl"], "a file of this very name"
    with pytest.raises(DataError, match="no file matches"):
        locate(f"{files}/*.parquet")


def test_a_slice_counts_through_all_files_of_its_entry(files: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    assert prompts([f"{files}/*.jsonl@[1:-1]", f"{files}/c.csv@[-2:]"], tokenizer) == ["a1", "a2", "b0", "c2", "c3"]
    assert prompts([f"{files}/*.jsonl@[3:]"], tokenizer) == ["b0", "b1"]


def test_the_first_rows_of_every_file_are_checked(files: Path) -> None:
    (files / "d.jsonl").write_text('{"other": 1}\n')
    with pytest.raises(DataError, match=r"d\.jsonl, line 1: no key 'input'"):
        check_file([f"{files}/*.jsonl"], DataFlags())


def test_a_folder_of_several_splits_asks_for_one(tmp_path: Path) -> None:
    rows = Dataset.from_list([{"input": "q"}])
    DatasetDict(train=rows, test=rows).save_to_disk(tmp_path / "saved")
    with pytest.raises(DataError, match=f"holds the splits train, test; choose one of them: {tmp_path}/saved/train"):
        locate(f"{tmp_path}/saved")
    assert check_file(f"{tmp_path}/saved/test", DataFlags()) == 1
    with pytest.raises(DataError, match="not one that `datasets` saved; name its files as a pattern"):
        locate(str(tmp_path))


@settings(max_examples=max(15, settings().max_examples // 4))
@given(
    weights=st.lists(st.sampled_from([0.5, 1.0, 1.7, 2.0, 3.0]), min_size=3, max_size=3), shuffle=st.booleans(), drawn=st.integers(0, 40)
)
def test_weighted_rows_are_drawn_as_often_as_told_and_resume_exactly(
    tmp_path_factory: pytest.TempPathFactory, weights: list[float], shuffle: bool, drawn: int
) -> None:
    directory = tmp_path_factory.mktemp("weights")
    sizes = {"a": 4, "b": 3, "c": 6}
    for name, count in sizes.items():
        (directory / f"{name}.jsonl").write_text("".join(json.dumps({"input": f"{name}{row}"}) + "\n" for row in range(count)))

    def source() -> PromptSource:
        settings = DataFlags(prompt_data_weights=weights, rollout_shuffle=shuffle)
        return PromptSource(PromptDataset.open([f"{directory}/{name}.jsonl" for name in sizes], settings, tiny.tokenizer()))

    first, resumed = source(), source()
    expected = [max(1, round(size * weight)) for size, weight in zip(sizes.values(), weights, strict=True)]
    assert len(first) == sum(expected)
    num_epochs = 12
    names = [str(prompt.prompt) for prompt in first.take(num_epochs * len(first))]
    assert first.epoch == num_epochs
    for (name, size), count in zip(sizes.items(), expected, strict=True):
        epochs = [names[start : start + len(first)] for start in range(0, len(names), len(first))]
        assert {sum(text.startswith(name) for text in epoch) for epoch in epochs} == {count}
        times = [names.count(f"{name}{row}") for row in range(size)]
        assert max(times) - min(times) <= 1, "all rows of a file are drawn equally often"
    begun = source()
    begun.take(drawn)
    resumed.restore(json.loads(json.dumps(begun.state())))
    assert [prompt.row for prompt in resumed.take(30)] == [prompt.row for prompt in begun.take(30)]


def test_other_weights_or_files_do_not_resume(files: Path, tokenizer: PreTrainedTokenizerFast) -> None:
    def source(paths: list[str], *weights: float) -> PromptSource:
        return PromptSource(PromptDataset.open(paths, DataFlags(prompt_data_weights=weights), tokenizer))

    a, b, c = (f"{files}/{name}" for name in ("a.jsonl", "b.jsonl", "c.csv"))
    state = source([a, b]).state()
    source([f"{files}/*.jsonl"], 1.0).restore(state)
    with pytest.raises(DataError, match="but different content"):
        source([b, a]).restore(state)
    with pytest.raises(DataError, match="had 5"):
        source([a, c]).restore(state)
    weighted = source([a, b], 2.0, 1.0).state()
    with pytest.raises(DataError, match="but different content"):
        source([a, a, b]).restore(weighted)
