"""Supervised data: exactly the assistant's tokens are trained on."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from fuligo.data import Conversation, ConversationDataset, ConversationSource, DataSettings, PromptDataset
from fuligo.errors import DataError
from fuligo.types import SampleStatus

Write = Callable[..., Path]
CHAT = DataSettings(apply_chat_template=True)
GENERATION_MARKS = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|end|>{% endgeneration %}"
    "{% else %}{{ m.content }}<|end|>{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TRIMMED_MARKS = GENERATION_MARKS.replace("{% generation %}", "{%- generation -%}").replace("{% endgeneration %}", "{%- endgeneration -%}")


def turns(*contents: str, roles: tuple[str, ...] = ("user", "assistant")) -> list[dict[str, str]]:
    return [{"role": roles[position % len(roles)], "content": content} for position, content in enumerate(contents)]


def trained_text(conversation: Conversation, tokenizer: PreTrainedTokenizerFast) -> list[str]:
    """Return the runs of trained tokens as text."""
    edges = np.flatnonzero(np.diff(conversation.loss_mask, prepend=0, append=0))
    return [tokenizer.decode(conversation.tokens[start:stop]) for start, stop in zip(edges[::2], edges[1::2], strict=True)]


@pytest.mark.parametrize("kwargs", [{}, {"chat_template": GENERATION_MARKS}, {"chat_template": TRIMMED_MARKS}])
def test_every_assistant_turn_is_trained_with_its_end_token(
    write_rows: Write, tokenizer: PreTrainedTokenizerFast, kwargs: dict[str, Any]
) -> None:
    """Rendered prefixes and the template's own marks give the same tokens."""
    messages = [{"role": "system", "content": "add"}, *turns("1+1", "2", "and 2+2", "it is 4")]
    dataset = ConversationDataset.open(
        write_rows({"input": messages}), DataSettings(apply_chat_template=True, apply_chat_template_kwargs=kwargs), tokenizer
    )
    conversation = dataset[0]
    assert trained_text(conversation, tokenizer) == ["2<|end|>", "it is 4<|end|>"]
    assert conversation.tokens.tolist() == tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)


def test_what_follows_the_last_assistant_turn_is_left_out(write_rows: Write, tokenizer: PreTrainedTokenizerFast) -> None:
    conversation = ConversationDataset.open(write_rows({"input": turns("q", "a", "thanks")}), CHAT, tokenizer)[0]
    assert tokenizer.decode(conversation.tokens) == "<|user|>q<|end|><|assistant|>a<|end|>"


@pytest.mark.parametrize("template", [False, True])
def test_a_prompt_with_its_answer_begins_with_the_ids_of_a_rollouts_prompt(
    write_rows: Write, tokenizer: PreTrainedTokenizerFast, template: bool
) -> None:
    path = write_rows({"input": "what is 1 + 1", "answer": 2})
    settings = DataSettings(apply_chat_template=template, label_key="answer")
    sample = ConversationDataset.open(path, settings, tokenizer)[0].as_sample(7)
    assert sample.prompt_ids.tolist() == PromptDataset.open(path, settings, tokenizer)[0].prompt_ids.tolist()
    assert tokenizer.decode(sample.response_ids) == ("2<|end|>" if template else "2<eos>")
    assert sample.loss_mask.tolist() == [1, 1]
    assert (sample.index, sample.status, sample.reward) == (7, SampleStatus.COMPLETED, 0.0)
    assert len(sample.engine_logprobs) == len(sample.versions) == sample.response_length


def test_a_newline_that_the_template_writes_after_the_end_token_is_not_trained(
    write_rows: Write, tokenizer: PreTrainedTokenizerFast
) -> None:
    template = (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|end|>\n{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    settings = DataSettings(apply_chat_template=True, apply_chat_template_kwargs={"chat_template": template})
    conversation = ConversationDataset.open(write_rows({"input": turns("q", "a", "r", "b")}), settings, tokenizer)[0]
    assert trained_text(conversation, tokenizer) == ["a<|end|>", "b<|end|>"]
    assert "<|end|>\n<|user|>" in tokenizer.decode(conversation.tokens)


def test_a_template_that_rewrites_earlier_turns_is_refused(write_rows: Write, tokenizer: PreTrainedTokenizerFast) -> None:
    """Some templates drop the thinking of all turns but the last, so the assistant's tokens cannot be found."""
    template = (
        "{% for m in messages %}<|{{ m.role }}|>{{ m.content if m.role == 'user' or loop.last else m.content[-1] }}<|end|>{% endfor %}"
        "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    )
    settings = DataSettings(apply_chat_template=True, apply_chat_template_kwargs={"chat_template": template})
    with pytest.raises(DataError, match="line 1: message 2 of 4: cannot find the tokens of this assistant turn"):
        ConversationDataset.open(write_rows({"input": turns("q", "thinking a", "r", "b")}), settings, tokenizer)


@pytest.mark.parametrize(
    ("row", "settings", "problem"),
    [
        ({"input": turns("q")}, CHAT, "no assistant turn to train on"),
        ({"input": "q"}, DataSettings(), "a plain prompt has no answer to train on; give --label-key"),
    ],
)
def test_a_row_without_anything_to_train_on_is_refused(
    write_rows: Write, tokenizer: PreTrainedTokenizerFast, row: dict, settings: DataSettings, problem: str
) -> None:
    with pytest.raises(DataError, match=problem):
        ConversationDataset.open(write_rows(row), settings, tokenizer)


def test_conversations_are_drawn_like_prompts(write_rows: Write, tokenizer: PreTrainedTokenizerFast) -> None:
    path = write_rows(*({"input": turns(f"q{row}", "a")} for row in range(3)))
    source = ConversationSource(ConversationDataset.open(path, CHAT, tokenizer))
    assert [conversation.row for conversation in source.take(4)] == [0, 1, 2, 0]
