"""Rendering of conversations around sampled tokens, which are never tokenized again."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from hashlib import blake2b
from itertools import product
from typing import TYPE_CHECKING, Any

from fuligo.data.template import ChatTemplate, decoder, rendered_ids
from fuligo.environments.environment import AssistantTurn, Tool, ToolCall, json_copy
from fuligo.environments.rendered_texts import RenderedTexts
from fuligo.environments.response_format import HERMES, REST, THINKING, response_format
from fuligo.errors import ConfigError, DataError
from fuligo.types import Messages

if TYPE_CHECKING:
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase

_REASONING_KEYS = ("reasoning_content", "reasoning", "thinking")
_PROBE = Tool("probe_tool", "probe", {"type": "object", "properties": {"probe_argument": {"type": "string"}}})
_PROBE_CALLS = tuple(ToolCall(_PROBE.name, {"probe_argument": "p"}, id) for id in ("probe0000", f"functions.{_PROBE.name}:0"))
"""Calls to try a template with. The second has an id in the format of Kimi K2, whose template shows the id instead of the name."""
_MAX_SHOWN_CHARS = 200
_CALL_ID = re.compile(r"[\w.:/-]{1,128}", re.ASCII)
"""Call ids that are kept as the model wrote them, such as Kimi K2's `functions.search:0`."""
_MAX_KNOWN_TEXTS, _MAX_KNOWN_CHARS = 1024, 8192
"""Number of texts whose token ids are cached, and their largest length in characters."""
_PROMPT_END_TOKENS = 8
"""Tokens at the end of a prompt that are searched for `<think>`; more than any template uses after it."""


@dataclass(slots=True, frozen=True)
class _CallForm:
    """Form in which a template reads tool calls."""

    empty: str | None = ""
    """Content of a message that has only calls; None: a null content."""
    arguments_as_text: bool = False
    """True if arguments are JSON text, not an object."""
    in_content: bool = False
    """True if the template does not read calls; they are then written into the content, in the format of Hermes."""

    def fields(self, message: dict[str, Any]) -> dict[str, Any]:
        calls = [call["function"] for call in message["tool_calls"]]
        if self.in_content:
            texts = [f"<tool_call>\n{json.dumps({key: call[key] for key in ('name', 'arguments')})}\n</tool_call>" for call in calls]
            return {"content": "\n".join([message["content"], *texts] if message.get("content") else texts)}
        shown = [
            {**each, "function": {**call, "arguments": json.dumps(call["arguments"]) if self.arguments_as_text else call["arguments"]}}
            for each, call in zip(message["tool_calls"], calls, strict=True)
        ]
        return {"content": message.get("content") or self.empty, "tool_calls": shown}


_FORMS = tuple(_CallForm(empty, as_text) for as_text in (False, True) for empty in ("", None))


class Renderer:
    """Renderer of conversations into token ids with a model's chat template, and parser of the model's turns."""

    def __init__(self, tokenizer: "PreTrainedTokenizerBase", template: ChatTemplate, end_ids: frozenset[int]) -> None:
        """Find out how the template renders tools, tool calls and thinking.

        `end_ids`: tokens at which the model stops. Raises ConfigError if the tokenizer cannot tokenize a conversation in pieces.
        """
        self._tokenizer = tokenizer
        self._template = template
        self._end_ids = end_ids
        self._texts = RenderedTexts()
        self._decode = decoder(tokenizer)
        self._known_ids = lru_cache(_MAX_KNOWN_TEXTS)(lambda text: tuple(rendered_ids(tokenizer, text)))
        self.format = response_format(template.source)
        """Format in which tool calls are parsed, unless the tokenizer has its own schema."""
        own_schema = getattr(tokenizer, "response_schema", None)
        self._schema = own_schema or self.format.schema
        self._call_form = self._find_call_form()
        if self._call_form.in_content:
            self.format, self._schema = HERMES, own_schema or HERMES.schema
        self._reasoning_key = next((key for key in _REASONING_KEYS if self._reads_thinking(key)), None)
        question: Messages = [{"role": "user", "content": "q"}]
        self.shows_tools = _PROBE.name in self._text(question, [_PROBE])
        """False if the template does not show the model its tools; an environment must then describe them itself."""
        self.reads_calls = not self._call_form.in_content or HERMES.marker in template.source
        """False if the template does not show the model a format of tool calls that can be parsed."""
        self._opens_thinking = _opens_thinking(template.prompt(question))
        """True if the generation prompt of a plain question opens the thinking."""
        pieces = [*rendered_ids(tokenizer, "one"), *rendered_ids(tokenizer, "\ntwo")]
        if self._decode(pieces) != "one\ntwo":
            raise ConfigError(
                f"cannot render conversations in pieces: the tokenizer of {tokenizer.name_or_path or 'the model'} turns 'one' and '\\ntwo' "
                f"into {self._decode(pieces)!r}; use a byte-level tokenizer (tokenizer.json)"
            )

    def prompt(self, messages: Messages, tools: Sequence[Tool] = ()) -> list[int]:
        """Return the ids of a conversation, with the generation prompt.

        Raises DataError if the template rejects the messages, does not show given tools, or shows calls that cannot be parsed.
        """
        if tools and not self.shows_tools:
            raise DataError(
                f"cannot offer the tools {', '.join(tool.name for tool in tools)}: the chat template does not show tools to the model; use "
                "a template that does, or describe them in the system message and start without tools"
            )
        if tools and not self.reads_calls:
            raise DataError(
                f"cannot offer the tools {', '.join(tool.name for tool in tools)}: calls in the format of the chat template cannot be "
                "parsed; set response_schema in tokenizer_config.json, or describe tools and calls (<tool_call>) in the system message and "
                "start without tools"
            )
        text = self._texts.find(messages, tools)
        if text is None:
            text = self._text(messages, tools)
        self._texts.add(messages, tools, text)
        return self._ids(text)

    def text(self, sampled: Sequence[int]) -> str:
        """Decode a sampled turn without its end token. Pass the text to `parse` and `extension` to avoid decoding it again."""
        return self._decode(self._split_end(sampled)[0])

    def extension(
        self, messages: Messages, tools: Sequence[Tool], sampled: Sequence[int], new: Messages, *, text: str | None = None
    ) -> list[int] | None:
        """Return the ids to append to a sampled turn: the end of the turn, the new messages and the generation prompt.

        None if the template now renders the earlier conversation differently (it drops thinking, or ends the turn with another token); the
        whole conversation must then be rendered again. Raises DataError if the template rejects the messages.

        Args:
            messages: the conversation up to and including the assistant message that was parsed from `sampled`
            sampled: ids of that turn, with its end token if there is one
            new: messages that follow
            text: the text of `sampled`, if it is known
        """
        before = self._texts.take(messages[:-1], tools)
        if before is None:
            before = self._text(messages[:-1], tools)
        whole = self._text([*messages, *new], tools)
        self._texts.add([*messages, *new], tools, whole)
        if not whole.startswith(before):
            return None
        rest = whole[len(before) :]
        body, end = self._split_end(sampled)
        if text is None:
            text = self._decode(body)
        if rest.startswith(text):
            follows = self._ids(rest[len(text) :])
            if end is None:
                return follows
            if follows[:1] == [end]:
                return follows[1:]
        follows = self._after_turn(rest, text, _opens_thinking(before))
        if follows is None or end is None:
            return follows
        return follows[1:] if follows[0] == end else None

    def parse(
        self,
        sampled: Sequence[int],
        prompt: Sequence[int] | None = None,
        tools: Sequence[Tool] = (),
        *,
        recorded: bool = False,
        text: str | None = None,
    ) -> AssistantTurn:
        """Parse a sampled turn. An invalid tool call becomes one of the turn's `problems`; it raises no exception.

        Args:
            prompt: ids before the turn, which may end with `<think>`; None: the prompt of a plain question
            tools: offered tools, whose schemas give the types of arguments that the format writes as text
            recorded: treat a call as a problem if the sample's record cannot hold its arguments
            text: the text of `sampled`, if it is known
        """
        body, end = self._split_end(sampled)
        opened = self._opens_thinking if prompt is None else _opens_thinking(self._decode(list(prompt[-_PROMPT_END_TOKENS:])))
        reasoning, content, calls, problems = self._read(self._decode(body) if text is None else text, opened, tools, recorded=recorded)
        return AssistantTurn(content, reasoning, calls, problems, num_tokens=len(sampled), truncated=end is None)

    def _ids(self, text: str) -> list[int]:
        """Tokenize a text. Short texts are cached: samples of a prompt begin alike, and environments repeat their answers."""
        return list(self._known_ids(text)) if len(text) <= _MAX_KNOWN_CHARS else rendered_ids(self._tokenizer, text)

    def _after_turn(self, rest: str, text: str, opened: bool) -> list[int] | None:
        """Return the ids from the turn's end token on, if the template renders the turn differently but equivalently; else None.

        `rest` is the template's text from the turn on, `text` the turn as sampled; `opened` says whether the prompt opens the thinking.
        """
        ids = rendered_ids(self._tokenizer, rest)
        end = next((position for position, token in enumerate(ids) if token in self._end_ids), None)
        if end is None or self._read(self._decode(ids[:end]), opened) != self._read(text, opened):
            return None
        return ids[end:]

    def _split_end(self, sampled: Sequence[int]) -> tuple[list[int], int | None]:
        ids = list(sampled)
        return (ids[:-1], ids[-1]) if ids and ids[-1] in self._end_ids else (ids, None)

    def _read(
        self, text: str, opened: bool, tools: Sequence[Tool] = (), *, recorded: bool = False
    ) -> tuple[str | None, str, tuple[ToolCall, ...], tuple[str, ...]]:
        """Return thinking, content, tool calls and problems of a turn's text."""
        text = f"<think>{text}" if opened and not text.lstrip().startswith("<think>") else text
        if "<" not in text and self.format.is_tagged and self._schema is self.format.schema:
            return None, text.strip(), (), ()
        try:
            parsed: dict[str, Any] = self._tokenizer.parse_response(text, schema=self._schema) or {}  # pyrefly: ignore[bad-assignment]
        except (ValueError, TypeError, RecursionError) as error:  # the tokenizer's schema may require valid JSON
            parsed = {"tool_calls": [f"{error}"], "reasoning_content": found[1] if (found := re.match(THINKING, text, re.DOTALL)) else None}
        reasoning = next((parsed[key] for key in _REASONING_KEYS if parsed.get(key) is not None), None)
        thought = None if reasoning is None else str(reasoning).strip()
        types = {tool.name: tool.parameters.get("properties", {}) for tool in tools} if self.format.has_text_arguments else None
        calls: list[ToolCall] = []
        problems: list[str] = []
        for number, raw in enumerate(_flat(parsed.get("tool_calls") or []), 1):
            call = _call(raw, number, types)
            if isinstance(call, str):
                problems.append(call)
                continue
            if any(call.id == earlier.id for earlier in calls):
                call = replace(call, id=_own_id(number, call.name, call.arguments))
            if recorded and not _fits_record(call):
                problems.append(
                    f"tool call {number}: the arguments contain a number that is too large or not finite, or are nested too deeply"
                )
            else:
                calls.append(call)
        if problems:
            return thought, re.sub(THINKING, "", text, count=1, flags=re.DOTALL).strip(), (), tuple(problems)
        return thought, str(parsed.get("content") or "").strip(), tuple(calls), ()

    def _text(self, messages: Messages, tools: Sequence[Tool]) -> str:
        return self._template.prompt([self._shown(message) for message in messages], [tool.to_json() for tool in tools] or None)

    def _find_call_form(self) -> _CallForm:
        """Return the first form in which the template renders a tool call completely, and from which the same call is parsed.

        If there is none, calls are written into the content.
        """
        question: Messages = [{"role": "user", "content": "q"}]
        for form, call in product(_FORMS, _PROBE_CALLS):
            message = AssistantTurn("", tool_calls=(call,)).message()
            probe: Messages = [
                *question,
                {**message, **form.fields(message)},
                {"role": "tool", "content": "r", "tool_call_id": call.id, "name": call.name},
            ]
            try:
                text = self._template.prompt(probe, [_PROBE.to_json()])
                turn = self._template.transcript(probe[:2], [_PROBE.to_json()])
            except DataError:
                continue
            without = self._template.prompt(question, [_PROBE.to_json()])
            if all(text.count(word) > without.count(word) for word in (_PROBE.name, *call.arguments)) and self._reads(turn, without, call):
                return form
        return _CallForm(in_content=True)

    def _reads(self, transcript: str, prompt: str, call: ToolCall) -> bool:
        """Return whether parsing the turn that a transcript adds to a prompt gives the call."""
        shared = min(len(transcript), len(prompt))  # a prompt may open thinking that the turn does not have
        start = next((at for at in range(shared) if transcript[at] != prompt[at]), shared)
        if (tag := transcript.rfind("<", 0, start)) > transcript.rfind(">", 0, start):
            start = tag  # `<think>` of the prompt and `<tool_call>` of the turn share a prefix
        ids = rendered_ids(self._tokenizer, transcript[start:])
        end = next((place for place, token in enumerate(ids) if token in self._end_ids), None)
        parsed = self._read(self._decode(ids[:end]), False, [_PROBE])[2]
        return [(each.name, each.arguments) for each in parsed] == [(call.name, call.arguments)]

    def _reads_thinking(self, key: str) -> bool:
        """Return whether the template renders the thinking of a message under this key."""
        probe: Messages = [{"role": "user", "content": "q"}, {"role": "assistant", "content": "a", key: _PROBE.name}]
        try:
            return _PROBE.name in self._template.transcript(probe)
        except DataError:
            return False

    def _shown(self, message: dict[str, Any]) -> dict[str, Any]:
        """Return a message in the form that the template reads."""
        if message["role"] != "assistant":
            return message
        shown = {key: value for key, value in message.items() if key not in (*_REASONING_KEYS, "tool_calls")}
        reasoning = next((message[key] for key in _REASONING_KEYS if message.get(key) is not None), None)
        if reasoning is not None and self._reasoning_key is not None:
            shown[self._reasoning_key] = reasoning
        elif reasoning is not None:
            shown["content"] = f"<think>\n{reasoning}\n</think>\n\n{shown.get('content') or ''}"
        calls = message.get("tool_calls")
        return shown | self._call_form.fields({**shown, "tool_calls": calls}) if calls else shown


def _opens_thinking(prompt: str) -> bool:
    return prompt.rstrip().endswith("<think>")


def _flat(calls: list[Any]) -> Iterator[Any]:
    """Yield the calls of a list, some of whose entries may be lists of calls."""
    for call in calls:
        if isinstance(call, list):
            yield from call
        else:
            yield call


def _call(raw: Any, number: int, types: Mapping[str, Mapping[str, Any]] | None) -> ToolCall | str:
    """Return a tool call, or the reason why it is not valid.

    Args:
        raw: call as the schema parsed it: name and arguments, by themselves or within `function`, or text that is not JSON
        number: number of the call in the turn, from 1
        types: tool -> argument -> JSON schema, if the arguments are text
    """
    function = raw.get("function", raw) if isinstance(raw, dict) else raw
    if not isinstance(function, dict):
        return f"tool call {number} is not valid: {str(function).strip()[:_MAX_SHOWN_CHARS]}"
    name = function.get("name")
    arguments = function.get("arguments", function.get("parameters", {}))
    if rest := str(function.get(REST) or "").strip():
        return f"tool call {number} is not complete, or has more than arguments: {rest[:_MAX_SHOWN_CHARS]}"
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError) as error:
            return f"tool call {number}: the arguments are not valid JSON: {error}"
    if not isinstance(name, str) or re.fullmatch(r"[\w.:/-]+", name.strip()) is None:
        return f"tool call {number} names no tool"
    if not isinstance(arguments, dict):
        return f"tool call {number}: the arguments must be an object, not {type(arguments).__name__}"
    name = name.strip()
    if types is not None:
        arguments = {key: _typed(value, types.get(name, {}).get(key, {})) for key, value in arguments.items()}
    try:
        own_id = _own_id(number, name, arguments)
        json.dumps(arguments, ensure_ascii=False).encode()
    except RecursionError:
        return f"tool call {number}: the arguments are nested too deeply"
    except UnicodeEncodeError as error:  # a lone surrogate, which the tokenizer cannot encode
        return f"tool call {number}: the arguments are not valid text: {error.reason}"
    id = function.get("id")
    return ToolCall(name, arguments, id if isinstance(id, str) and _CALL_ID.fullmatch(id) is not None else own_id)


def _own_id(number: int, name: str, arguments: Mapping[str, Any]) -> str:
    """Return a deterministic id for a call without a usable id."""
    text = json.dumps([number, name, arguments], sort_keys=True)
    return blake2b(text.encode(errors="replace"), digest_size=5).hexdigest()[:9]


def _fits_record(call: ToolCall) -> bool:
    """Return whether a sample's record can hold the arguments: integers of 64 bits, finite numbers, no deep nesting."""
    try:
        return json_copy(call.arguments) == call.arguments
    except TypeError:
        return False


def _typed(value: Any, schema: Mapping[str, Any]) -> Any:
    """Convert an argument that is written as text: keep it if its schema allows a string, else parse it as JSON."""
    kinds = {each.get("type") for each in (schema, *schema.get("anyOf", ()))}
    if not isinstance(value, str) or ("string" in kinds and not (value == "null" and "null" in kinds)):
        return value
    try:
        return json.loads(value)
    except (ValueError, RecursionError):
        return value
