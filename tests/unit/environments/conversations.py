"""Chat templates of our families, the ones that TRL ships among them, and what a model writes by them."""

import functools
from importlib.resources import files
from typing import Any

from transformers import PreTrainedTokenizerFast

from fuligo.data.template import ChatTemplate, rendered_ids
from fuligo.environments.environment import Tool
from fuligo.environments.rendering import Renderer
from fuligo.errors import DataError
from tests import tiny
from tests.unit.data import family_templates

PUBLISHED = (
    *("qwen2_5", "qwen3", "qwen3_instruct_2507", "qwen3_5_think", "qwen3_5_nothink", "glm4moe"),
    *("llama3", "llama3_1", "llama3_2", "deepseekv3", "deepseek_r1_distill", "gptoss", "gemma3", "qwen3_vl", "qwen2_5_vl"),
    *("qwen3_6", "qwen3_8", "nemotron_3_nano"),
)
OURS = ("CHATML", "QWEN3", "LLAMA3", "GLM4", "GLM45", "GLM47", "DEEPSEEK_V3", "DEEPSEEK_R1", "KIMI_K2", "MINIMAX_M2")
TEMPLATES = {name: getattr(family_templates, name) for name in OURS} | {
    name: (files("trl") / "chat_templates" / f"{name}.jinja").read_text(encoding="utf-8") for name in PUBLISHED
}
ENDS = ["<|im_end|>", "<|eot_id|>", "<|endoftext|>", "<|user|>", "<|observation|>", "<｜end▁of▁sentence｜>", "<|return|>", "<|call|>"]
ENDS += ["<end_of_turn>", "[e~["]
ADD = Tool("add", "Add two numbers.", {"type": "object", "properties": {"a": {"type": "integer"}, "note": {"type": "string"}}})


@functools.cache
def tokenizer() -> PreTrainedTokenizerFast:
    """Return a tokenizer with the special tokens of all families."""
    tokenizer = tiny.tokenizer.__wrapped__()
    calls = [f"<｜tool▁{name}▁{edge}｜>" for name in ("calls", "call", "outputs", "output") for edge in ("begin", "end")]
    kimi = [f"<|tool_{name}_{edge}|>" for name in ("calls_section", "call") for edge in ("begin", "end")]
    kimi += ["<|tool_call_argument_begin|>", *(f"<|im_{name}|>" for name in ("system", "user", "assistant", "middle"))]
    others = ["<start_of_turn>", "<end_of_turn>", "]~b]", "[e~["]
    harmony = [f"<|{name}|>" for name in ("start", "channel", "message", "constrain", "call", "return")]
    tokenizer.add_special_tokens(
        {"additional_special_tokens": [*family_templates.SPECIAL_TOKENS, *calls, "<｜tool▁sep｜>", *harmony, *kimi, *others]}
    )
    tokenizer.add_tokens(family_templates.PLAIN_TOKENS)
    return tokenizer


def end_ids() -> frozenset[int]:
    return frozenset(tokenizer().convert_tokens_to_ids(ENDS))


@functools.cache
def template(name: str) -> ChatTemplate:
    return ChatTemplate(tokenizer(), {"chat_template": TEMPLATES[name]})


@functools.cache
def renderer(name: str) -> Renderer:
    return Renderer(tokenizer(), template(name), end_ids())


def ids(text: str) -> list[int]:
    return rendered_ids(tokenizer(), text)


def text(tokens: list[int]) -> str:
    return str(tokenizer().decode(tokens))


def as_read(name: str, message: dict[str, Any]) -> dict[str, Any]:
    """Put thinking that the template does not read from a field into the content."""
    reasoning = message.get("reasoning_content")
    if reasoning is None or "reasoning_content" in TEMPLATES[name]:
        return message
    if "message.thinking" in TEMPLATES[name]:
        return {"thinking": reasoning} | {key: value for key, value in message.items() if key != "reasoning_content"}
    content = f"<think>\n{reasoning}\n</think>\n\n{message['content']}"
    return {key: value for key, value in message.items() if key != "reasoning_content"} | {"content": content}


def written(name: str, messages: list[dict[str, Any]], message: dict[str, Any], tools: list[Tool]) -> list[int] | None:
    """Return the ids of an assistant message as the template itself writes it after its generation prompt; None if it does not.

    After a `<think>` that the prompt opens and the template drops, the thinking is written by hand.
    """
    render, shown = renderer(name), [tool.to_json() for tool in tools]
    before = text(render.prompt(messages, tools))
    try:
        whole = template(name).transcript([*messages, message], shown or None)
    except DataError:  # the template accepts no such call
        return None
    if not whole.startswith(before) and before.endswith("<think>\n") and not message.get("tool_calls"):
        whole = before + message["content"].removeprefix("<think>\n") + "<｜end▁of▁sentence｜>"
    if not whole.startswith(before):
        return None
    turn = ids(whole[len(before) :])
    end = next((place for place, token in enumerate(turn) if token in end_ids()), None)
    if end is not None:
        return turn[: end + 1]
    return [*turn, ids("<|observation|>" if message.get("tool_calls") else "<|user|>")[0]]


CALLS = {
    "hermes": '<tool_call>\n{"name": "add", "arguments": {"a": 1, "note": "é"}}\n</tool_call>',
    "qwen3-coder": "<tool_call>\n<function=add>\n<parameter=a>\n1\n</parameter>\n"
    "<parameter=note>\né\n</parameter>\n</function>\n</tool_call>",
    "glm-4.5": "<tool_call>add\n<arg_key>a</arg_key>\n<arg_value>1</arg_value>\n"
    "<arg_key>note</arg_key>\n<arg_value>é</arg_value>\n</tool_call>",
    "deepseek": "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>add\n```json\n"
    '{"a": 1, "note": "é"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>',
    "kimi-k2": "<|tool_calls_section_begin|><|tool_call_begin|>functions.add:0<|tool_call_argument_begin|>"
    '{"a": 1, "note": "é"}<|tool_call_end|><|tool_calls_section_end|>',
    "minimax-m2": '<minimax:tool_call>\n<invoke name="add">\n'
    '<parameter name="a">1</parameter>\n<parameter name="note">é</parameter>\n</invoke>\n'
    "</minimax:tool_call>",
    "llama3": '{"name": "add", "parameters": {"a": 1, "note": "é"}}',
    "glm-4": 'add\n{"a": 1, "note": "é"}',
    "harmony": '<|channel|>commentary to=functions.add <|constrain|>json<|message|>{"a": 1, "note": "é"}',
}
"""A call as each format writes it."""
ALONE = ("llama3", "glm-4", "harmony")
"""Formats in which a call has no text before it."""
