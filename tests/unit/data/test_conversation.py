"""Supervised data: exactly the assistant's tokens are trained on."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import PreTrainedTokenizerFast

from fuligo.config.groups import DataFlags
from fuligo.data.conversation import Conversation, ConversationDataset, ConversationSource, MaskedTokens
from fuligo.data.dataset import PromptDataset
from fuligo.errors import DataError
from fuligo.types import SampleStatus

Write = Callable[..., Path]
CHAT = DataFlags(apply_chat_template=True)
GENERATION_MARKS = (
    "{% for m in messages %}<|{{ m.role }}|>{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|end|>{% endgeneration %}"
    "{% else %}{{ m.content }}<|end|>{% endif %}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
TRIMMED_MARKS = GENERATION_MARKS.replace("{% generation %}", "{%- generation -%}").replace("{% endgeneration %}", "{%- endgeneration -%}")


def turns(*contents: str, roles: tuple[str, ...] = ("user", "assistant")) -> list[dict[str, str]]:
    return [{"role": roles[position % len(roles)], "content": content} for position, content in enumerate(contents)]


def trained_text(conversation: Conversation, tokenizer: PreTrainedTokenizerFast) -> list[str]:
    """Return the runs of trained tokens as text."""
    return [text for part in conversation.parts for text in trained_runs(part, tokenizer)]


def trained_runs(part: MaskedTokens, tokenizer: PreTrainedTokenizerFast) -> list[str]:
    edges = np.flatnonzero(np.diff(part.loss_mask, prepend=0, append=0))
    return [tokenizer.decode(part.tokens[start:stop]) for start, stop in zip(edges[::2], edges[1::2], strict=True)]


OTHER_PROMPT = TRIMMED_MARKS.replace("<|assistant|>{% endif %}", "<|assistant|>?{% endif %}")
"""Only the marks identify the assistant's tokens: no turn continues the generation prompt."""


@pytest.mark.parametrize(
    "kwargs",
    [{}, {"add_generation_prompt": True}, *({"chat_template": marks} for marks in (GENERATION_MARKS, TRIMMED_MARKS, OTHER_PROMPT))],
)
def test_every_assistant_turn_is_trained_with_its_end_token(
    write_rows: Write, tokenizer: PreTrainedTokenizerFast, kwargs: dict[str, Any]
) -> None:
    """Rendered prefixes and the template's own marks give the same tokens."""
    messages = [{"role": "system", "content": "add"}, *turns("1+1", "2", "and 2+2", "it is 4")]
    dataset = ConversationDataset.open(
        write_rows({"input": messages}), DataFlags(apply_chat_template=True, apply_chat_template_kwargs=kwargs), tokenizer
    )
    conversation = dataset[0]
    assert trained_text(conversation, tokenizer) == ["2<|end|>", "it is 4<|end|>"]
    assert conversation.parts[0].tokens.tolist() == tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)


def test_what_follows_the_last_assistant_turn_is_left_out(write_rows: Write, tokenizer: PreTrainedTokenizerFast) -> None:
    conversation = ConversationDataset.open(write_rows({"input": turns("q", "a", "thanks")}), CHAT, tokenizer)[0]
    assert tokenizer.decode(conversation.parts[0].tokens) == "<|user|>q<|end|><|assistant|>a<|end|>"


@pytest.mark.parametrize("template", [False, True])
def test_a_prompt_with_its_answer_begins_with_the_ids_of_a_rollouts_prompt(
    write_rows: Write, tokenizer: PreTrainedTokenizerFast, template: bool
) -> None:
    path = write_rows({"input": "what is 1 + 1", "answer": 2})
    settings = DataFlags(apply_chat_template=template, label_key="answer")
    sample = ConversationDataset.open(path, settings, tokenizer)[0].as_samples(7)[0]
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
    settings = DataFlags(apply_chat_template=True, apply_chat_template_kwargs={"chat_template": template})
    conversation = ConversationDataset.open(write_rows({"input": turns("q", "a", "r", "b")}), settings, tokenizer)[0]
    assert trained_text(conversation, tokenizer) == ["a<|end|>", "b<|end|>"]
    assert "<|end|>\n<|user|>" in tokenizer.decode(conversation.parts[0].tokens)


REWRITES = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content if m.role == 'user' or loop.last else m.content[-1] }}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
"""Drops the thinking of all turns but the last, as Qwen3, Qwen3.5 and DeepSeek-R1 do."""


def rewriting(**settings: Any) -> DataFlags:
    return DataFlags(apply_chat_template=True, apply_chat_template_kwargs={"chat_template": REWRITES}, **settings)


def test_turns_that_the_template_rewrites_are_trained_as_the_model_writes_them(
    write_rows: Write, tokenizer: PreTrainedTokenizerFast
) -> None:
    """No token is trained that the model would not see: each turn has the context that a rollout would give it."""
    path = write_rows({"input": turns("q", "thinking a", "r", "b")})
    conversation = ConversationDataset.open(path, rewriting(), tokenizer)[0]
    assert [tokenizer.decode(part.tokens) for part in conversation.parts] == [
        "<|user|>q<|end|><|assistant|>thinking a<|end|>",
        "<|user|>q<|end|><|assistant|>a<|end|><|user|>r<|end|><|assistant|>b<|end|>",
    ]
    assert trained_text(conversation, tokenizer) == ["thinking a<|end|>", "b<|end|>"]
    samples = conversation.as_samples(5)
    assert [sample.index for sample in samples] == [5, 5], "parts of one trajectory"
    assert [tokenizer.decode(sample.response_ids) for sample in samples] == ["thinking a<|end|>", "b<|end|>"]


def test_rewritten_turns_are_trained_as_the_whole_conversation_shows_them_if_asked(
    write_rows: Write, tokenizer: PreTrainedTokenizerFast
) -> None:
    path = write_rows({"input": turns("q", "thinking a", "r", "b")})
    conversation = ConversationDataset.open(path, rewriting(sft_rewritten_turns="rendered"), tokenizer)[0]
    assert len(conversation.parts) == 1
    assert trained_text(conversation, tokenizer) == ["a<|end|>", "b<|end|>"]


def test_rewritten_turns_are_refused_if_asked(write_rows: Write, tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(DataError, match="line 1: message 2 of 4: the chat template renders this assistant turn differently"):
        ConversationDataset.open(
            write_rows({"input": turns("q", "thinking a", "r", "b")}), rewriting(sft_rewritten_turns="refuse"), tokenizer
        )


ROLES_ALONE = "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"
"""Ends each turn only by the next role's token, as GLM-4.5 and its successors do."""
ROLES_WITH_MARKS = ROLES_ALONE.replace(
    "{{ m.content }}",
    "{% if m.role == 'assistant' %}{% generation %}{{ m.content }}{% endgeneration %}{% else %}{{ m.content }}{% endif %}",
)


@pytest.mark.parametrize("template", [ROLES_ALONE, ROLES_WITH_MARKS])
@pytest.mark.parametrize("thanks", [False, True])
def test_a_turn_that_the_next_role_ends_is_trained_with_that_roles_token(
    write_rows: Write, tokenizer: PreTrainedTokenizerFast, template: str, thanks: bool
) -> None:
    user = tokenizer.convert_tokens_to_ids("<|user|>")
    settings = DataFlags(apply_chat_template=True, apply_chat_template_kwargs={"chat_template": template})
    path = write_rows({"input": turns("q", "a", "r", "b", *(["thanks"] if thanks else []))})
    conversation = ConversationDataset.open(path, settings, tokenizer, end_ids=frozenset([user]))[0]
    assert trained_text(conversation, tokenizer) == ["a<|user|>", "b<|user|>"]
    assert tokenizer.decode(conversation.parts[0].tokens) == "<|user|>q<|assistant|>a<|user|>r<|assistant|>b<|user|>"


def test_a_tool_call_is_ended_by_the_token_of_its_result(write_rows: Write, tokenizer: PreTrainedTokenizerFast) -> None:
    template = ROLES_ALONE.replace("<|{{ m.role }}|>", "<|{{ 'end' if m.role == 'tool' else m.role }}|>")
    ends = frozenset(tokenizer.convert_tokens_to_ids(["<|user|>", "<|end|>"]))
    settings = DataFlags(apply_chat_template=True, apply_chat_template_kwargs={"chat_template": template})
    call = {"role": "assistant", "content": "look", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]}
    whole = [*turns("q"), call, {"role": "tool", "content": "7"}, {"role": "assistant", "content": "b"}]
    first, last = (
        ConversationDataset.open(write_rows({"input": messages}), settings, tokenizer, end_ids=ends)[0] for messages in (whole[:2], whole)
    )
    assert trained_text(first, tokenizer) == ["look<|end|>"]
    assert trained_text(last, tokenizer) == ["look<|end|>", "b<|user|>"]


def test_a_turn_that_has_its_own_end_token_gets_no_other(write_rows: Write, tokenizer: PreTrainedTokenizerFast) -> None:
    ends = frozenset(tokenizer.convert_tokens_to_ids(["<|end|>", "<|user|>"]))
    conversation = ConversationDataset.open(write_rows({"input": turns("q", "a", "r", "b")}), CHAT, tokenizer, end_ids=ends)[0]
    assert trained_text(conversation, tokenizer) == ["a<|end|>", "b<|end|>"]


@pytest.mark.parametrize(
    ("row", "settings", "problem"),
    [
        ({"input": turns("q")}, CHAT, "no assistant turn to train on"),
        ({"input": "q"}, DataFlags(), "a plain prompt has no answer to train on; use --label-key"),
    ],
)
def test_a_row_without_anything_to_train_on_is_refused(
    write_rows: Write, tokenizer: PreTrainedTokenizerFast, row: dict, settings: DataFlags, problem: str
) -> None:
    with pytest.raises(DataError, match=problem):
        ConversationDataset.open(write_rows(row), settings, tokenizer)


def test_conversations_are_drawn_like_prompts(write_rows: Write, tokenizer: PreTrainedTokenizerFast) -> None:
    path = write_rows(*({"input": turns(f"q{row}", "a")} for row in range(3)))
    source = ConversationSource(ConversationDataset.open(path, CHAT, tokenizer))
    assert [conversation.row for conversation in source.take(4)] == [0, 1, 2, 0]
