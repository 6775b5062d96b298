"""Prompts from rows; errors name the file, the line and the fix."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import PreTrainedTokenizerFast

from fuligo.config.groups import DataFlags
from fuligo.data.check import check_file
from fuligo.data.dataset import PromptDataset, PromptTooLongError
from fuligo.errors import ConfigError, DataError

Write = Callable[..., Path]
USER = [{"role": "user", "content": "how many apples"}]


def test_a_string_is_tokenized_as_it_is(write_rows: Write, tokenizer: PreTrainedTokenizerFast) -> None:
    dataset = PromptDataset.open(write_rows({"input": "how many"}), DataFlags(), tokenizer)
    prompt = dataset[0]
    assert prompt.prompt == "how many"
    assert tokenizer.decode(prompt.prompt_ids) == "how many"
    assert (prompt.label, prompt.metadata) == (None, {})


@pytest.mark.parametrize("given", ["how many apples", USER])
def test_the_chat_template_is_the_tokenizers(write_rows: Write, tokenizer: PreTrainedTokenizerFast, given: Any) -> None:
    """A plain string is one user message. Oracle: transformers."""
    prompt = PromptDataset.open(write_rows({"input": given}), DataFlags(apply_chat_template=True), tokenizer)[0]
    expected = tokenizer.apply_chat_template(USER, add_generation_prompt=True, tokenize=True, return_dict=False)
    assert prompt.prompt_ids.tolist() == expected
    assert prompt.prompt == USER


def test_template_arguments_and_tools_reach_the_template(write_rows: Write, tokenizer: PreTrainedTokenizerFast) -> None:
    template = "{{ tools[0].name if tools }}|{{ style }}|{{ messages[0].content }}|{{ add_generation_prompt }}"
    settings = DataFlags(
        apply_chat_template=True,
        apply_chat_template_kwargs={"chat_template": template, "style": "brief"},
        tool_key="tools",
        metadata_key="meta",
    )
    path = write_rows(
        {"input": "hi", "tools": '[{"name": "search"}]', "meta": {"source": "web"}}, {"input": "hi", "tools": None, "meta": None}
    )
    dataset = PromptDataset.open(path, settings, tokenizer)
    assert tokenizer.decode(dataset[0].prompt_ids) == "search|brief|hi|True"
    assert dataset[0].metadata == {"source": "web", "tools": [{"name": "search"}]}
    assert tokenizer.decode(dataset[1].prompt_ids) == "|brief|hi|True"
    assert dataset[1].metadata == {}


def test_the_generation_prompt_may_be_left_out(write_rows: Write, tokenizer: PreTrainedTokenizerFast) -> None:
    settings = DataFlags(apply_chat_template=True, apply_chat_template_kwargs={"add_generation_prompt": False})
    dataset = PromptDataset.open(write_rows({"input": "q"}), settings, tokenizer)
    assert tokenizer.decode(dataset[0].prompt_ids) == "<|user|>q<|end|>"


def test_parts_of_text_are_one_text(write_rows: Write, tokenizer: PreTrainedTokenizerFast) -> None:
    parts = [{"type": "text", "text": "how many "}, {"type": "text", "text": "apples"}]
    path = write_rows({"input": USER}, {"input": [{"role": "user", "content": parts}]})
    whole, joined = PromptDataset.open(path, DataFlags(apply_chat_template=True), tokenizer)
    assert joined.prompt == whole.prompt and joined.prompt_ids.tolist() == whole.prompt_ids.tolist()


def test_parquet_gives_the_same_prompts_as_jsonl(write_rows: Write, tokenizer: PreTrainedTokenizerFast, tmp_path: Path) -> None:
    """Columnar files fill missing fields of a message with null."""
    rows = [
        {
            "input": [{"role": "system", "content": "add"}, {"role": "user", "content": "1+1", "name": "eve"}],
            "label": "2",
            "meta": {"level": 1},
        },
        {"input": [{"role": "user", "content": "2+2"}], "label": "4", "meta": {"level": 2}},
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    settings = DataFlags(label_key="label", metadata_key="meta", apply_chat_template=True)
    jsonl, parquet = (PromptDataset.open(path, settings, tokenizer) for path in (write_rows(*rows), tmp_path / "rows.parquet"))
    for row in range(2):
        assert jsonl[row].prompt_ids.tolist() == parquet[row].prompt_ids.tolist()
        assert (jsonl[row].prompt, jsonl[row].label, jsonl[row].metadata) == (
            parquet[row].prompt,
            parquet[row].label,
            parquet[row].metadata,
        )


@pytest.mark.parametrize("label", ["42", 42, 0.5, ["a", "b"], "", 0, False])
def test_labels_are_kept_as_they_are(write_rows: Write, tokenizer: PreTrainedTokenizerFast, label: Any) -> None:
    dataset = PromptDataset.open(write_rows({"input": "q", "answer": label}), DataFlags(label_key="answer"), tokenizer)
    assert dataset[0].label == label


def test_the_bos_token_is_added_once_where_the_tokenizer_adds_one(write_rows: Write, tokenizer: PreTrainedTokenizerFast) -> None:
    class AddsBos:
        """Return a tokenizer that begins every text with `<bos>`."""

        bos_token_id = tokenizer.bos_token_id

        def __call__(self, text: str, add_special_tokens: bool = True) -> dict[str, list[int]]:
            ids = tokenizer(text)["input_ids"]
            return {"input_ids": [self.bos_token_id, *ids] if add_special_tokens else ids}

    dataset = PromptDataset.open(write_rows({"input": "hi"}, {"input": "<bos>hi"}), DataFlags(), AddsBos())  # type: ignore[arg-type]
    assert dataset[0].prompt_ids.tolist() == dataset[1].prompt_ids.tolist() == [tokenizer.bos_token_id, *tokenizer("hi")["input_ids"]]


@pytest.mark.parametrize(
    ("row", "settings", "problem"),
    [
        ({"question": "q", "label": 1}, DataFlags(), "no key 'input' (--input-key); the row has 'question', 'label'"),
        ({"input": "q"}, DataFlags(label_key="label"), "no key 'label' (--label-key)"),
        ({"q": "q"}, DataFlags(label_key="answer"), "no key 'input' (--input-key), 'answer' (--label-key); the row has 'q'"),
        ({"input": "q", "label": None}, DataFlags(label_key="label"), "'label' (--label-key) is null"),
        ({"input": ""}, DataFlags(), "'input' is an empty string"),
        ({"input": 3}, DataFlags(), "'input' must be a string or a list of chat messages, not 3"),
        ({"input": []}, DataFlags(apply_chat_template=True), "must be a string or a list of chat messages"),
        ({"input": [{"content": "q"}]}, DataFlags(apply_chat_template=True), "a chat message is"),
        ({"input": [{"role": "user"}]}, DataFlags(apply_chat_template=True), "the user message has no content"),
        (
            {"input": [{"role": "user", "content": [{"type": "text", "text": "what is "}, {"type": "image", "image": "a.png"}]}]},
            DataFlags(apply_chat_template=True),
            "the content of the user message must be text, or a list of",
        ),
        ({"input": USER}, DataFlags(), "use --apply-chat-template"),
        ({"input": "q", "meta": [1]}, DataFlags(metadata_key="meta"), "'meta' (--metadata-key) must be an object"),
        ({"input": "q", "tools": "{"}, DataFlags(tool_key="tools"), "'tools' (--tool-key) is not JSON"),
        ('{"input": "q"', DataFlags(), "not JSON"),
    ],
)
def test_a_bad_row_is_refused_when_the_file_is_opened(
    write_rows: Write, tokenizer: PreTrainedTokenizerFast, row: Any, settings: DataFlags, problem: str
) -> None:
    """`check_file`, which needs no tokenizer, and the dataset agree."""
    path = write_rows(row)
    for attempt in (lambda: check_file(path, settings), lambda: PromptDataset.open(path, settings, tokenizer)):
        with pytest.raises(DataError) as raised:
            attempt()
        assert f"{path}, line 1: " in str(raised.value)
        assert problem in str(raised.value)


def test_a_file_must_exist_hold_rows_and_be_of_a_known_format(tmp_path: Path) -> None:
    cases = {
        "missing.jsonl": "does not exist",
        "empty.jsonl": "has no rows",
        "blank.jsonl": "has no rows",
        "rows.tsv": "unknown format '.tsv'",
    }
    (tmp_path / "empty.jsonl").touch()
    (tmp_path / "blank.jsonl").write_text("\n\r\n\n")
    (tmp_path / "rows.tsv").write_text("a\tb\n")
    for name, problem in cases.items():
        with pytest.raises(DataError, match=problem):
            check_file(tmp_path / name, DataFlags())
    with pytest.raises(DataError, match="is a directory"):
        check_file(tmp_path, DataFlags())


def test_slices_renumber_rows_and_errors_name_the_line_of_the_file(write_rows: Write, tokenizer: PreTrainedTokenizerFast) -> None:
    path = write_rows(*({"input": f"q{row}"} for row in range(20)), "broken", {"input": "last"})
    dataset = PromptDataset.open(f"{path}@[10:]", DataFlags(), tokenizer)
    assert len(dataset) == 12
    assert (dataset[0].row, dataset[0].prompt) == (0, "q10")
    with pytest.raises(DataError, match="line 21"):
        dataset[10]
    assert check_file(f"{path}@[:-2]", DataFlags()) == 20


def test_prompts_over_the_limit_are_told_apart_from_bad_ones(write_rows: Write, tokenizer: PreTrainedTokenizerFast) -> None:
    dataset = PromptDataset.open(write_rows({"input": "7" * 9}, {"input": "7" * 8}), DataFlags(rollout_max_prompt_len=8), tokenizer)
    with pytest.raises(PromptTooLongError, match="line 1: 9 tokens, more than --rollout-max-prompt-len 8"):
        dataset[0]
    assert len(dataset[1].prompt_ids) == 8


@pytest.mark.parametrize("skip_bad_rows", [True, False])
def test_a_file_without_a_usable_row_is_refused(write_rows: Write, tokenizer: PreTrainedTokenizerFast, skip_bad_rows: bool) -> None:
    path = write_rows({"input": "7" * 9}, {"input": "8" * 9})
    settings = DataFlags(rollout_max_prompt_len=8, skip_bad_rows=skip_bad_rows)
    with pytest.raises(DataError, match=r"none of its rows \(2\) is usable; the first: .* 9 tokens"):
        PromptDataset.open(path, settings, tokenizer)


def test_a_template_that_is_missing_or_raises_is_a_clear_error(write_rows: Write, tokenizer: PreTrainedTokenizerFast) -> None:
    path = write_rows({"input": "q"})
    bare = PreTrainedTokenizerFast(tokenizer_object=tokenizer.backend_tokenizer)
    with pytest.raises(ConfigError, match="has no chat template"):
        PromptDataset.open(path, DataFlags(apply_chat_template=True), bare)
    raising = {"chat_template": "{{ raise_exception('roles must alternate') }}"}
    with pytest.raises(DataError, match=r"line 1: the chat template rejects the messages: .*roles must alternate"):
        PromptDataset.open(path, DataFlags(apply_chat_template=True, apply_chat_template_kwargs=raising), tokenizer)
    with pytest.raises(ConfigError, match="tokenize cannot be set"):
        PromptDataset.open(path, DataFlags(apply_chat_template=True, apply_chat_template_kwargs={"tokenize": True}), tokenizer)


def test_prompts_that_end_with_an_answer_are_warned_of_once(
    write_rows: Write, tokenizer: PreTrainedTokenizerFast, caplog: pytest.LogCaptureFixture
) -> None:
    answered = {"input": [*USER, {"role": "assistant", "content": "4"}]}
    settings = DataFlags(apply_chat_template=True)
    PromptDataset.open(write_rows({"input": USER}, answered, answered), settings, tokenizer)
    (record,) = caplog.records
    assert "line 2: the prompt ends with a message of the assistant" in record.getMessage()
    caplog.clear()
    PromptDataset.open(write_rows({"input": USER}, {"input": "q"}), settings, tokenizer)
    assert not caplog.records
