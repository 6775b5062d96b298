"""Answers to `/v1/chat/completions`, as one JSON object or server-sent events, and the interface of APIs that are translated to it."""

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from fuligo.engines.generation import Tokenizer
from fuligo.engines.openai_format import DONE, chunk, event, head, usage
from fuligo.gateway.chat_request import ChatRequest
from fuligo.gateway.conversation import Sampled


@dataclass(slots=True, frozen=True)
class Completion:
    """Sampled answer to one request."""

    request: ChatRequest
    message: dict[str, Any]
    """Assistant message; arguments of tool calls are objects."""
    sampled: Sampled
    num_prompt_tokens: int
    served_name: str
    stop: str = ""
    """Text stripped from the end of the content, from the stop string on; empty if no stop string ended the answer."""

    @property
    def model(self) -> str:
        """Name by which the agent called the model."""
        return self.request.model or self.served_name

    @property
    def finish_reason(self) -> str:
        if self.message.get("tool_calls"):
            return "tool_calls"
        return "length" if self.sampled.finish_reason == "length" else "stop"

    def body(self, tokenizer: Tokenizer) -> dict[str, Any]:
        """Return the answer as one JSON object."""
        choice = {"index": 0, "message": self._message(), "logprobs": self._logprobs(tokenizer), "finish_reason": self.finish_reason}
        return {**head(self.model), "choices": [choice], "usage": self._usage()}

    def events(self, tokenizer: Tokenizer) -> Iterator[bytes]:
        """Yield the answer as server-sent events: role, text, tool calls, end."""
        fields, message = head(self.model, stream=True), self._message()
        deltas: list[dict[str, Any]] = [{"role": "assistant", "content": ""}]
        deltas += [{key: message[key]} for key in ("reasoning_content", "content") if message.get(key)]
        deltas += [{"tool_calls": [{"index": index, **call}]} for index, call in enumerate(message.get("tool_calls") or ())]
        for number, delta in enumerate(deltas):
            logprobs = self._logprobs(tokenizer) if number == 1 else None
            yield event({**fields, "choices": [chunk(0, delta, None, logprobs)]})
        yield event({**fields, "choices": [chunk(0, {}, self.finish_reason)]})
        if self.request.with_usage:
            yield event({**fields, "choices": [], "usage": self._usage()})
        yield DONE

    def _message(self) -> dict[str, Any]:
        """Return the message in OpenAI's format, in which arguments of tool calls are JSON text."""
        calls = self.message.get("tool_calls")
        if not calls:
            return self.message
        written = [{**call, "function": {**call["function"], "arguments": arguments_text(call["function"]["arguments"])}} for call in calls]
        return {**self.message, "content": self.message["content"] or None, "tool_calls": written}

    def _logprobs(self, tokenizer: Tokenizer) -> dict[str, Any] | None:
        if not self.request.with_logprobs:
            return None
        content = []
        for token, logprob in zip(self.sampled.ids.tolist(), self.sampled.logprobs.tolist(), strict=True):
            text = str(tokenizer.decode([token]))
            content.append({"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []})
        return {"content": content, "refusal": None}

    def _usage(self) -> dict[str, int]:
        return usage(self.num_prompt_tokens, len(self.sampled.ids))


def arguments_text(arguments: Any) -> str:
    """Return the arguments of a call as JSON text, the format of OpenAI's APIs."""
    return json.dumps(arguments, separators=(",", ":"))


@dataclass(slots=True, frozen=True)
class Dialect:
    """API through which agents call the policy, translated to and from chat completions."""

    read: Callable[[bytes], Mapping[str, Any]]
    """Function that translates the bytes of a request to the body of a chat completion request; raises `InvalidRequest`."""
    body: Callable[[Completion, Tokenizer], dict[str, Any]]
    """Function that returns the answer as one JSON object."""
    events: Callable[[Completion, Tokenizer], Iterator[bytes]]
    """Function that yields the answer as server-sent events."""
    error: Callable[..., dict[str, Any]]
    """Function that returns an error; called like `openai_format.error_content`."""
