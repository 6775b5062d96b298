"""Order of the prompts, and its exact resume."""

import json
from collections import Counter
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerFast

from fuligo.config.groups import DataFlags
from fuligo.data.dataset import PromptDataset
from fuligo.data.source import PromptOrder, PromptSource
from fuligo.errors import DataChangedError, DataError
from tests import tiny

Write = Callable[..., Path]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> PromptDataset:
    """Seven rows, shuffled; row 2 is malformed, row 5 too long."""
    lines = [json.dumps({"input": f"question {row}" + "!" * 50 * (row == 5)}) for row in range(7)]
    lines[2] = "{"
    path = tmp_path_factory.mktemp("source") / "rows.jsonl"
    path.write_text("\n".join(lines))
    return PromptDataset.open(path, DataFlags(rollout_shuffle=True, skip_bad_rows=True, rollout_max_prompt_len=40), tiny.tokenizer())


def rows(source: PromptSource, count: int) -> list[int]:
    return [prompt.row for prompt in source.take(count)]


def test_every_epoch_draws_every_usable_row_once(dataset: PromptDataset) -> None:
    source = PromptSource(dataset)
    epochs = [rows(source, 5) for _ in range(4)]
    assert all(sorted(epoch) == [0, 1, 3, 4, 6] for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) > 1, "epochs are shuffled differently"
    source.take(1)
    assert source.epoch == 4
    assert source.counts.bad_rows in (4, 5) and source.counts.dropped_too_long in (4, 5)


def test_skipped_rows_are_reported_when_their_number_has_doubled(dataset: PromptDataset, caplog: pytest.LogCaptureFixture) -> None:
    source = PromptSource(dataset)
    for _ in range(5 * 4):
        source.take(1)
    told = [int(record.getMessage().split()[0]) for record in caplog.records]
    assert len(told) > 1 and all(later >= 2 * earlier for earlier, later in pairwise(told))
    assert "1 longer than --rollout-max-prompt-len 40" in caplog.text and "1 malformed (--skip-bad-rows)" in caplog.text
    caplog.clear()
    resumed = PromptSource(dataset)
    resumed.restore(source.state())
    resumed.take(1)
    assert not caplog.records, "a resume does not repeat the warning"


def test_without_shuffling_rows_come_in_the_order_of_the_file(write_rows: Write, tokenizer: PreTrainedTokenizerFast) -> None:
    source = PromptSource(PromptDataset.open(write_rows({"input": "a"}, {"input": "b"}, {"input": "c"}), DataFlags(), tokenizer))
    assert rows(source, 7) == [0, 1, 2, 0, 1, 2, 0]
    assert source.epoch == 2


def test_what_is_given_back_is_drawn_next_in_the_order_given(dataset: PromptDataset) -> None:
    source = PromptSource(dataset)
    taken = source.take(4)
    upcoming = PromptSource(dataset)
    after = rows(upcoming, 9)[4:]
    source.give_back(taken[1:3])
    source.give_back(taken[:1])
    assert rows(source, 8) == [taken[0].row, taken[1].row, taken[2].row, *after]


@settings(deadline=None)
@given(
    actions=st.lists(st.tuples(st.integers(0, 8), st.integers(0, 4)), max_size=8),
    saves=st.sets(st.integers(0, 7)),
)
def test_a_restored_source_continues_as_if_never_interrupted(
    dataset: PromptDataset, actions: list[tuple[int, int]], saves: set[int]
) -> None:
    """Includes prompts that were given back, and a state that went through JSON."""
    uninterrupted, interrupted = PromptSource(dataset), PromptSource(dataset)
    consumed: Counter[int] = Counter()
    for position, (num_taken, num_returned) in enumerate(actions):
        prompts = uninterrupted.take(num_taken)
        assert rows(interrupted, num_taken) == [prompt.row for prompt in prompts]
        uninterrupted.give_back(prompts[len(prompts) - num_returned :] if num_returned <= num_taken else prompts)
        interrupted.give_back(prompts[len(prompts) - num_returned :] if num_returned <= num_taken else prompts)
        kept = prompts[: max(0, num_taken - num_returned)]
        consumed.update(prompt.row for prompt in kept)
        if position in saves:
            state = json.loads(json.dumps(interrupted.state()))
            interrupted = PromptSource(dataset)
            interrupted.restore(state)
            assert interrupted.state() == uninterrupted.state()
            assert interrupted.counts == uninterrupted.counts
    waiting = Counter(uninterrupted.state()["returned"])  # type: ignore[arg-type]
    drawn = [row for row, count in (consumed + waiting).items() for _ in range(count)]
    oracle = PromptOrder([7], shuffle=True, seed=42)
    position = uninterrupted.state()
    expected = [oracle.next() for _ in range(7 * position["epoch"] + position["offset"])]  # type: ignore[operator]
    assert Counter(drawn) == Counter(row for row in expected if row not in (2, 5))


def test_a_bad_row_ends_the_run_unless_it_may_be_skipped(write_rows: Write, tokenizer: PreTrainedTokenizerFast) -> None:
    path = write_rows(*({"input": f"q{row}"} for row in range(10)), "broken")
    source = PromptSource(PromptDataset.open(path, DataFlags(), tokenizer))
    with pytest.raises(DataError, match=r"line 11: not JSON.*; resume or start with --skip-bad-rows to skip such rows"):
        source.take(11)
    source = PromptSource(PromptDataset.open(path, DataFlags(skip_bad_rows=True), tokenizer))
    assert len(source.take(11)) == 11
    assert source.counts.bad_rows == 1


def test_a_rewritten_file_ends_the_run_also_where_bad_rows_are_skipped(write_rows: Write, tokenizer: PreTrainedTokenizerFast) -> None:
    path = write_rows({"input": "first"}, {"input": "other"})
    source = PromptSource(PromptDataset.open(path, DataFlags(skip_bad_rows=True), tokenizer))
    path.write_text("x" * path.stat().st_size)
    with pytest.raises(DataChangedError, match="its content changed while it was read"):
        source.take(1)
    assert source.counts.bad_rows == 0


def test_a_file_whose_rows_became_unusable_ends_the_run_instead_of_looping(
    write_rows: Write, tokenizer: PreTrainedTokenizerFast, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = PromptSource(PromptDataset.open(write_rows({"input": "a"}, {"input": "b"}), DataFlags(skip_bad_rows=True), tokenizer))
    monkeypatch.setattr(tokenizer, "__class__", type("Broken", (), {"__call__": lambda *_, **__: {"input_ids": []}, "bos_token_id": None}))
    with pytest.raises(DataError, match="a whole epoch of 2 rows has no usable one"):
        source.take(1)


def test_a_state_of_other_data_is_refused(dataset: PromptDataset, write_rows: Write, tokenizer: PreTrainedTokenizerFast) -> None:
    other = PromptSource(PromptDataset.open(write_rows({"input": "a"}), DataFlags(), tokenizer))
    with pytest.raises(DataError, match="the dataset has 1 row, but the checkpoint's had 7"):
        other.restore(PromptSource(dataset).state())


def test_a_state_of_other_content_with_as_many_rows_is_refused(
    write_rows: Write, tokenizer: PreTrainedTokenizerFast, caplog: pytest.LogCaptureFixture
) -> None:
    def source(path: Path | str) -> PromptSource:
        return PromptSource(PromptDataset.open(path, DataFlags(), tokenizer))

    path = write_rows({"input": "a"}, {"input": "b"}, {"input": "c"})
    state = source(f"{path}@[:2]").state()
    source(f"{path}@[0:2]").restore(state)
    with pytest.raises(DataError, match="the dataset has 2 rows like the checkpoint's, but different content"):
        source(f"{path}@[1:]").restore(state)
    path.write_text(path.read_text().replace("b", "x"))
    with pytest.raises(
        DataError, match=r"but different content .*; resume with the same --prompt-data and --prompt-data-weights, or start a new run"
    ):
        source(f"{path}@[:2]").restore(state)
    del state["digest"]
    source(f"{path}@[:2]").restore(state)
    assert "the checkpoint has no digest of its prompt file: only the number of rows was compared" in caplog.text


def test_the_order_depends_only_on_the_seed_and_the_epoch() -> None:
    def epoch_rows(seed: int, epoch: int) -> list[int]:
        order = PromptOrder([50], shuffle=True, seed=seed)
        order.seek(epoch, 0)
        return [order.next() for _ in range(50)]

    assert epoch_rows(1, 3) == epoch_rows(1, 3)
    assert len({tuple(epoch_rows(seed, epoch)) for seed in (1, 2) for epoch in (0, 1, 2)}) == 6
    # Frozen: a checkpoint must resume in the same order under any version of numpy.
    assert epoch_rows(42, 0)[:8] == [24, 25, 32, 47, 16, 2, 43, 9]
