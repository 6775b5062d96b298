"""Formats in which model families write thinking and tool calls, as response schemas of transformers.

A tokenizer's own `response_schema` takes precedence. Otherwise a marker in the chat template selects the format.
"""

from dataclasses import dataclass
from typing import Any

_JSON = {"x-parser": "json", "x-parser-args": {"allow_non_json": True}}
THINKING = r"^\s*<think>(.*?)(?:</think>|\Z)"
REST = "rest"
"""Property of a call that holds the text outside its name and complete arguments, such as an incomplete argument."""
_REASONING = {"type": "string", "x-regex": THINKING}
_CALL_TAG = r"<tool_call>(.*?)(?:</tool_call>|\Z)"


def _schema(calls: str, items: dict[str, Any], removed: str | None = None) -> dict[str, Any]:
    """Return the schema of a format.

    Args:
        calls: regular expression of one tool call
        items: schema of the text that `calls` captures
        removed: regular expression of the text that is not content; None: `calls`
    """
    without_thinking = [[THINKING, ""]]
    return {
        "type": "object",
        "properties": {
            "reasoning_content": _REASONING,
            "content": {"type": "string", "x-regex-substitutions": [*without_thinking, [removed or calls, ""]]},
            "tool_calls": {"type": "array", "x-regex-substitutions": without_thinking, "x-regex-iterator": calls, "items": items},
        },
    }


def _tagged(name: str, argument: str, frame: tuple[str, ...]) -> dict[str, Any]:
    """Return the schema of a call whose name and arguments are in tags, the arguments as text.

    Args:
        argument: regular expression of one argument, with the groups `key` and `value`; it stops before the next argument begins, so
            that matching a repetitive turn takes linear time
        frame: regular expressions of the text around the arguments
    """
    arguments = {"type": "object", "x-regex-key-value": argument, "additionalProperties": {"type": "string"}}
    rest = {"type": "string", "x-regex-substitutions": [[each, ""] for each in (argument, *frame)]}
    return {"type": "object", "properties": {"name": {"type": "string", "x-regex": name}, "arguments": arguments, REST: rest}}


@dataclass(slots=True, frozen=True)
class ResponseFormat:
    """Format of a model family, recognized by a marker in the chat template."""

    name: str
    marker: str
    schema: dict[str, Any]
    has_text_arguments: bool = False
    """True if the model writes arguments as text, to be converted to the types that the tool declares."""
    is_tagged: bool = True
    """True if thinking and calls are in tags, so that a text without `<` is all content."""


_QWEN_CODER = ResponseFormat(
    "qwen3-coder",
    "<function=",
    _schema(
        _CALL_TAG,
        _tagged(
            r"<function=([^>\n]+)>",
            r"<parameter=(?P<key>[^>\n]+)>\n?(?P<value>(?:(?!<parameter=).)*?)\n?</parameter>",
            (r"\A\s*<function=[^>\n]+>", r"</function>\s*\Z"),
        ),
    ),
    has_text_arguments=True,
)
_GLM45 = ResponseFormat(
    "glm-4.5",
    "<arg_key>",
    _schema(
        _CALL_TAG,
        _tagged(
            r"^\s*([^\s<]+)",
            r"<arg_key>(?P<key>[^<]*)</arg_key>\s*<arg_value>(?P<value>(?:(?!<arg_key>).)*?)</arg_value>",
            (r"\A\s*[^\s<]+",),
        ),
    ),
    has_text_arguments=True,
)
_DEEPSEEK = ResponseFormat(
    "deepseek",
    "<｜tool▁call▁begin｜>",
    _schema(
        r"<｜tool▁call▁begin｜>(?:function<｜tool▁sep｜>)?(?P<name>[^\n<]+?)(?:\n```json\n|<｜tool▁sep｜>)(?P<arguments>.*?)"
        r"(?:\n```)?(?:<｜tool▁call▁end｜>|\Z)",
        {"type": "object", "properties": {"name": {"type": "string"}, "arguments": _JSON}},
        r"<｜tool▁calls▁begin｜>.*?(?:<｜tool▁calls▁end｜>|\Z)",
    ),
)
_KIMI = ResponseFormat(
    "kimi-k2",
    "<|tool_call_argument_begin|>",
    _schema(
        r"<\|tool_call_begin\|>\s*(?P<id>(?:functions\.)?(?P<name>[^\s:<]+)(?::\d+)?)\s*<\|tool_call_argument_begin\|>(?P<arguments>.*?)"
        r"(?:<\|tool_call_end\|>|\Z)",
        {"type": "object", "properties": {"id": {"type": "string"}, "name": {"type": "string"}, "arguments": _JSON}},
        r"<\|tool_calls_section_begin\|>.*?(?:<\|tool_calls_section_end\|>|\Z)",
    ),
)
_MINIMAX = ResponseFormat(
    "minimax-m2",
    "<minimax:tool_call>",
    _schema(
        r"<invoke (.*?)(?:</invoke>|\Z)",
        _tagged(
            r"\A\s*name=\"?([^>\n\"]+)",
            r"<parameter name=\"?(?P<key>[^>\n\"]+)\"?>(?P<value>(?:(?!<parameter name=).)*?)</parameter>",
            (r"\A\s*name=\"?[^>\n\"]+\"?>",),
        ),
        r"<minimax:tool_call>.*?(?:</minimax:tool_call>|\Z)",
    ),
    has_text_arguments=True,
)
HERMES = ResponseFormat("hermes", "<tool_call>", _schema(_CALL_TAG, _JSON))
_LLAMA = ResponseFormat(
    "llama3", "<|start_header_id|>", _schema(r"\A\s*(?:<\|python_tag\|>\s*)?(\{\s*\"name\"\s*:.*)\Z", _JSON), is_tagged=False
)
_GLM4 = ResponseFormat(
    "glm-4",
    "[gMASK]<sop>",
    _schema(
        r"\A\s*(?P<name>[A-Za-z_][\w.-]*)\n(?P<arguments>\{.*)\Z",
        {"type": "object", "properties": {"name": {"type": "string"}, "arguments": _JSON}},
    ),
    is_tagged=False,
)
_HARMONY_HEADER = r"[^<]{0,64}(?:<\|constrain\|>[^<]{0,64})?<\|message\|>"
_HARMONY_CALL = (
    r"(?:<\|start\|>assistant)?(?:<\|channel\|>(?:commentary|analysis))? ?to=functions\.(?P<name>[\w.:/-]{1,256})"
    rf"(?: ?<\|channel\|>(?:commentary|analysis))?{_HARMONY_HEADER}(?P<arguments>.*?)(?:<\|call\|>|\Z)"
)
_HARMONY_CONTENT = [
    [rf"\A.*?{_HARMONY_CALL}", ""],  # the template takes thinking or text before a call, not both
    [rf"(?:<\|start\|>assistant)?<\|channel\|>(?:analysis|commentary){_HARMONY_HEADER}.*?(?:<\|end\|>|\Z)", ""],
    [rf"(?:<\|start\|>assistant)?<\|channel\|>final{_HARMONY_HEADER}", ""],
    [r"<\|end\|>\Z", ""],
]
_HARMONY = ResponseFormat(
    "harmony",
    "<|channel|>",
    {
        "type": "object",
        "properties": {
            "reasoning_content": {"type": "string", "x-regex": rf"<\|channel\|>analysis(?! ?to=){_HARMONY_HEADER}(.*?)(?:<\|end\|>|\Z)"},
            "content": {"type": "string", "x-regex-substitutions": _HARMONY_CONTENT},
            "tool_calls": {
                "type": "array",
                "x-regex-iterator": _HARMONY_CALL,
                "items": {"type": "object", "properties": {"name": {"type": "string"}, "arguments": _JSON}},
            },
        },
    },
)
_FORMATS = (_HARMONY, _KIMI, _MINIMAX, _QWEN_CODER, _GLM45, _DEEPSEEK, HERMES, _LLAMA, _GLM4)


def response_format(template: str) -> ResponseFormat:
    """Return the format of a chat template; Hermes if the template has no known marker, because prompts can ask for it."""
    return next((each for each in _FORMATS if each.marker in template), HERMES)
