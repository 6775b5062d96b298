"""Supervised data through the templates of our families. Expected texts are written by hand; trained tokens stand in double brackets."""

from collections.abc import Callable
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
from transformers import PreTrainedTokenizerFast

from fuligo.config.groups import DataFlags
from fuligo.data.conversation import ConversationDataset, MaskedTokens
from fuligo.errors import DataError
from tests import tiny
from tests.unit.data.family_templates import (
    CHATML,
    DEEPSEEK_R1,
    DEEPSEEK_V3,
    GLM4,
    GLM45,
    GLM47,
    LLAMA3,
    PLAIN_TOKENS,
    QWEN3,
    SPECIAL_TOKENS,
)

Write = Callable[..., Path]
GLM_ENDS = ["<|endoftext|>", "<|user|>", "<|observation|>"]
"""Tokens at which GLM's generation configs stop."""

SYSTEM = {"role": "system", "content": "s"}
TURNS = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a"}, {"role": "user", "content": "r"}]
MULTI_TURN = [SYSTEM, *TURNS, {"role": "assistant", "content": "b"}]
CALL = {"role": "assistant", "content": "", "tool_calls": [{"type": "function", "function": {"name": "f", "arguments": {"x": 1}}}]}
RESULT = {"role": "tool", "content": "7"}
TOOL_USE = [TURNS[0], CALL, RESULT, RESULT, TURNS[1]]
IN_TEXT = [
    TURNS[0],
    {"role": "assistant", "content": "<think>\nt\n</think>\n\na"},
    TURNS[2],
    {"role": "assistant", "content": "<think>\nu\n</think>\n\nb"},
]
IN_FIELD = [TURNS[0], {**TURNS[1], "reasoning_content": "t"}, TURNS[2], {"role": "assistant", "content": "b", "reasoning_content": "u"}]

CASES: dict[str, tuple[str, list[str], list[dict[str, Any]], dict[str, Any], list[str]]] = {
    "chatml, several turns": (
        CHATML,
        ["<|im_end|>"],
        MULTI_TURN,
        {},
        [
            "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n[[a<|im_end|>]]\n"
            "<|im_start|>user\nr<|im_end|>\n<|im_start|>assistant\n[[b<|im_end|>]]"
        ],
    ),
    "chatml, tools": (
        CHATML,
        ["<|im_end|>"],
        TOOL_USE,
        {},
        [
            "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"
            '[[<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call><|im_end|>]]\n'
            "<|im_start|>user\n<tool_response>\n7\n</tool_response>\n<tool_response>\n7\n</tool_response><|im_end|>\n"
            "<|im_start|>assistant\n[[a<|im_end|>]]"
        ],
    ),
    "qwen3, thinking": (
        QWEN3,
        ["<|im_end|>"],
        IN_TEXT,
        {},
        [
            "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n[[<think>\nt\n</think>\n\na<|im_end|>]]",
            "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\na<|im_end|>\n"
            "<|im_start|>user\nr<|im_end|>\n<|im_start|>assistant\n[[<think>\nu\n</think>\n\nb<|im_end|>]]",
        ],
    ),
    "qwen3, thinking between tools": (
        QWEN3,
        ["<|im_end|>"],
        [TURNS[0], {**CALL, "content": "<think>\nt\n</think>\n\n"}, RESULT, IN_TEXT[3]],
        {},
        [
            "<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n"
            '[[<think>\nt\n</think>\n\n<tool_call>\n{"name": "f", "arguments": {"x": 1}}\n</tool_call><|im_end|>]]\n'
            "<|im_start|>user\n<tool_response>\n7\n</tool_response><|im_end|>\n"
            "<|im_start|>assistant\n[[<think>\nu\n</think>\n\nb<|im_end|>]]"
        ],
    ),
    "qwen3, without thinking": (
        QWEN3,
        ["<|im_end|>"],
        TURNS[:2],
        {"enable_thinking": False},
        ["<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n[[a<|im_end|>]]"],
    ),
    "llama3, several turns": (
        LLAMA3,
        ["<|eot_id|>"],
        MULTI_TURN,
        {},
        [
            "<|begin_of_text|><|start_header_id|>system<|end_header_id|>\n\ns<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nq<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n[[a<|eot_id|>]]<|start_header_id|>user<|end_header_id|>\n\nr<|eot_id|>"
            "<|start_header_id|>assistant<|end_header_id|>\n\n[[b<|eot_id|>]]"
        ],
    ),
    "llama3, tools": (
        LLAMA3,
        ["<|eot_id|>"],
        [*TOOL_USE[:3], TURNS[1]],
        {},
        [
            "<|begin_of_text|><|start_header_id|>user<|end_header_id|>\n\nq<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n"
            '[[{"name": "f", "arguments": {"x": 1}}<|eot_id|>]]<|start_header_id|>ipython<|end_header_id|>\n\n7<|eot_id|>'
            "<|start_header_id|>assistant<|end_header_id|>\n\n[[a<|eot_id|>]]"
        ],
    ),
    "glm4, several turns": (
        GLM4,
        GLM_ENDS,
        MULTI_TURN,
        {},
        ["[gMASK]<sop><|system|>\ns<|user|>\nq<|assistant|>[[\na<|user|>]]\nr<|assistant|>[[\nb<|user|>]]"],
    ),
    "glm4, tools": (
        GLM4,
        GLM_ENDS,
        [*TOOL_USE[:3], TURNS[1]],
        {},
        ['[gMASK]<sop><|user|>\nq<|assistant|>[[f\n{"x": 1}<|observation|>]]\n7<|assistant|>[[\na<|user|>]]'],
    ),
    "glm4.5, several turns": (
        GLM45,
        GLM_ENDS,
        MULTI_TURN,
        {},
        [
            "[gMASK]<sop><|system|>\ns<|user|>\nq<|assistant|>[[\n<think></think>\na<|user|>]]\nr"
            "<|assistant|>[[\n<think></think>\nb<|user|>]]"
        ],
    ),
    "glm4.5, without thinking": (
        GLM45,
        GLM_ENDS,
        MULTI_TURN,
        {"enable_thinking": False},
        [
            "[gMASK]<sop><|system|>\ns<|user|>\nq/nothink<|assistant|>\n<think></think>[[\na<|user|>]]\nr/nothink"
            "<|assistant|>\n<think></think>[[\nb<|user|>]]"
        ],
    ),
    "glm4.5, thinking": (
        GLM45,
        GLM_ENDS,
        IN_FIELD,
        {},
        [
            "[gMASK]<sop><|user|>\nq<|assistant|>[[\n<think>t</think>\na<|user|>]]",
            "[gMASK]<sop><|user|>\nq<|assistant|>\n<think></think>\na<|user|>\nr<|assistant|>[[\n<think>u</think>\nb<|user|>]]",
        ],
    ),
    "glm4.5, tools": (
        GLM45,
        GLM_ENDS,
        [TURNS[0], {**CALL, "reasoning_content": "t"}, RESULT, RESULT, TURNS[1]],
        {},
        [
            "[gMASK]<sop><|user|>\nq<|assistant|>[[\n<think>t</think>\n<tool_call>f\n<arg_key>x</arg_key>\n<arg_value>1</arg_value>\n"
            "</tool_call><|observation|>]]\n<tool_response>\n7\n</tool_response>\n<tool_response>\n7\n</tool_response>"
            "<|assistant|>[[\n<think></think>\na<|user|>]]"
        ],
    ),
    "glm4.7, thinking": (
        GLM47,
        GLM_ENDS,
        IN_FIELD,
        {},
        [
            "[gMASK]<sop><|user|>q<|assistant|><think>[[t</think>a<|user|>]]",
            "[gMASK]<sop><|user|>q<|assistant|></think>a<|user|>r<|assistant|><think>[[u</think>b<|user|>]]",
        ],
    ),
    "glm4.7, without thinking": (
        GLM47,
        GLM_ENDS,
        MULTI_TURN,
        {"enable_thinking": False},
        ["[gMASK]<sop><|system|>s<|user|>q<|assistant|></think>[[a<|user|>]]r<|assistant|></think>[[b<|user|>]]"],
    ),
    "deepseek-v3, several turns": (
        DEEPSEEK_V3,
        ["<｜end▁of▁sentence｜>"],
        MULTI_TURN,
        {},
        [
            "<｜begin▁of▁sentence｜>s<｜User｜>q<｜Assistant｜>[[a<｜end▁of▁sentence｜>]]"
            "<｜User｜>r<｜Assistant｜>[[b<｜end▁of▁sentence｜>]]"
        ],
    ),
    "deepseek-r1, thinking": (
        DEEPSEEK_R1,
        ["<｜end▁of▁sentence｜>"],
        IN_TEXT,
        {},
        [
            "<｜begin▁of▁sentence｜><｜User｜>q<｜Assistant｜><think>\n[[t\n</think>\n\na<｜end▁of▁sentence｜>]]",
            "<｜begin▁of▁sentence｜><｜User｜>q<｜Assistant｜>\n\na<｜end▁of▁sentence｜>"
            "<｜User｜>r<｜Assistant｜><think>\n[[u\n</think>\n\nb<｜end▁of▁sentence｜>]]",
        ],
    ),
}


@pytest.fixture(scope="module")
def tokenizer() -> PreTrainedTokenizerFast:
    tokenizer = tiny.tokenizer()
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL_TOKENS})
    tokenizer.add_tokens(PLAIN_TOKENS)
    return tokenizer


def settings(template: str, **kwargs: Any) -> DataFlags:
    return DataFlags(apply_chat_template=True, apply_chat_template_kwargs={"chat_template": template, **kwargs})


def marked_text(part: MaskedTokens, tokenizer: PreTrainedTokenizerFast) -> str:
    """Return the text of a sequence, with the trained tokens in double brackets."""
    pairs = zip(part.tokens.tolist(), part.loss_mask.tolist(), strict=True)
    runs = [(mask, tokenizer.decode([token for token, _ in run])) for mask, run in groupby(pairs, key=lambda pair: pair[1])]
    return "".join(f"[[{text}]]" if mask else str(text) for mask, text in runs)


@pytest.mark.parametrize("case", CASES)
def test_the_model_is_trained_on_what_it_would_write(write_rows: Write, tokenizer: PreTrainedTokenizerFast, case: str) -> None:
    template, ends, messages, kwargs, expected = CASES[case]
    end_ids = frozenset(tokenizer.convert_tokens_to_ids(ends))
    dataset = ConversationDataset.open(write_rows({"input": messages}), settings(template, **kwargs), tokenizer, end_ids=end_ids)
    assert [marked_text(part, tokenizer) for part in dataset[0].parts] == expected


@pytest.mark.parametrize(("template", "messages"), [(DEEPSEEK_R1, TURNS[:2]), (DEEPSEEK_R1, MULTI_TURN), (GLM47, MULTI_TURN)])
def test_a_turn_without_the_thinking_that_its_prompt_opens_is_refused(
    write_rows: Write, tokenizer: PreTrainedTokenizerFast, template: str, messages: list[dict[str, Any]]
) -> None:
    """The model would write it after `<think>`; trained without, it would learn from a context that it never sees."""
    with pytest.raises(DataError, match="the chat template does not continue its generation prompt"):
        ConversationDataset.open(write_rows({"input": messages}), settings(template), tokenizer)


@pytest.mark.parametrize("messages", [MULTI_TURN[1:], IN_TEXT])
def test_turns_are_trained_as_the_whole_conversation_shows_them_where_the_prompt_opens_the_thinking(
    write_rows: Write, tokenizer: PreTrainedTokenizerFast, messages: list[dict[str, Any]]
) -> None:
    rendered = settings(DEEPSEEK_R1).model_copy(update={"sft_rewritten_turns": "rendered"})
    (part,) = ConversationDataset.open(write_rows({"input": messages}), rendered, tokenizer)[0].parts
    shown = [message["content"].split("</think>")[-1] for message in messages[1::2]]
    assert [text.split("]]")[0] for text in marked_text(part, tokenizer).split("[[")[1:]] == [
        f"{text}<｜end▁of▁sentence｜>" for text in shown
    ]
