"""OpenAI's chat and text completions on the embedded engine, whole or as server-sent events."""

import asyncio
from collections.abc import AsyncIterator, Sequence
from typing import Any

import orjson
from starlette.requests import Request as HttpRequest
from starlette.responses import Response, StreamingResponse

from fuligo.data.fields import check_messages
from fuligo.data.template import ChatTemplate, plain_ids, rendered_ids
from fuligo.engines.embedded.engine import EmbeddedEngine
from fuligo.engines.embedded.generate_body import answer, ended_while_connected, parse_requests
from fuligo.engines.embedded.request import Request
from fuligo.engines.openai_format import DONE, chunk, error_content, event, given_max_tokens, head, json_response, parse_body, usage
from fuligo.errors import FuligoError

_INCOMPLETE = "\ufffd"
"""Replacement character, to which a tokenizer decodes an incomplete character."""
POLL_S = 0.02
"""Seconds between two checks of a stream for new tokens."""
_SAMPLING = {"temperature": "temperature", "top_p": "top_p", "top_k": "top_k", "min_p": "min_p", "seed": "sampling_seed", "stop": "stop"}
"""Sampling parameters of OpenAI's API, including those that SGLang adds to it, mapped to the engine's names."""
_OTHERS = {"model", "messages", "prompt", "tools", "n", "max_tokens", "max_completion_tokens", "stream", "stream_options", "user"}
_OTHERS |= {"chat_template_kwargs", "ignore_eos"}
_NEUTRAL = {"frequency_penalty": 0, "presence_penalty": 0, "logprobs": False, "top_logprobs": 0, "logit_bias": {}, "echo": False}
"""Parameters that are accepted only with this value, or null."""
_MAX_CHOICES = 128


class OpenAiApi:
    """Endpoints `/v1/models`, `/v1/chat/completions` and `/v1/completions`."""

    def __init__(self, engine: EmbeddedEngine) -> None:
        self._engine = engine

    async def models(self, _: HttpRequest) -> Response:
        model = {"id": self._engine.model.path, "object": "model", "owned_by": "fuligo", "max_model_len": self._engine.model.context_length}
        return json_response({"object": "list", "data": [model]})

    async def complete(self, http: HttpRequest, *, is_chat: bool) -> Response:
        """Answer `/v1/chat/completions`, or `/v1/completions`."""
        requests: list[Request] = []
        try:
            body = parse_body(await http.body())
            generate = await asyncio.to_thread(self._generate_body, body, is_chat)
            requests, _ = parse_requests(orjson.dumps(generate), self._engine.model, asyncio.get_running_loop().create_future)
            for request in requests:
                self._engine.submit(request)
        except (ValueError, FuligoError) as error:
            self._engine.abort(requests.__contains__)
            return json_response(error_content(str(error)), 400)
        stream = bool(body.get("stream"))
        fields = head(body.get("model") or self._engine.model.path, is_chat=is_chat, stream=stream)
        if stream:
            with_usage = bool((body.get("stream_options") or {}).get("include_usage"))
            longest_stop = max((len(stop) for request in requests for stop in request.params.stop), default=0)
            events = self._events(requests, fields, is_chat=is_chat, with_usage=with_usage, held_back=max(0, longest_stop - 1))
            return StreamingResponse(events, media_type="text/event-stream")
        if not await ended_while_connected(http, requests, self._engine):
            return Response(status_code=499)
        if errors := [request.error for request in requests if request.error]:
            return json_response(error_content(errors[0], "server_error"), 500)
        choices = []
        for index, request in enumerate(requests):
            text = answer(request, self._engine.model)["text"]
            content = {"message": {"role": "assistant", "content": text}} if is_chat else {"text": text}
            choices.append({"index": index, **content, "logprobs": None, "finish_reason": _reason(request)})
        return json_response({**fields, "choices": choices, "usage": _usage(requests)})

    def _generate_body(self, body: dict[str, Any], is_chat: bool) -> dict[str, Any]:
        """Convert a body to that of `/generate`. Raises ValueError, DataError or ConfigError if it is malformed or not supported."""
        for name, value in body.items():
            if name not in _SAMPLING and name not in _OTHERS and (name not in _NEUTRAL or value not in (None, _NEUTRAL[name])):
                raise ValueError(f"{name}={value!r:.50} is not supported by the embedded engine; remove it")
        if "chat_template" in (body.get("chat_template_kwargs") or {}):
            raise ValueError("chat_template_kwargs has a chat_template, but the engine runs no templates of clients; remove it")
        ids = self._prompt_ids(body, is_chat)
        params = {ours: body[name] for name, ours in _SAMPLING.items() if body.get(name) is not None}
        if isinstance(params.get("stop"), str):
            params["stop"] = [params["stop"]]
        given = given_max_tokens(body)
        default = max(1, self._engine.model.context_length - len(ids)) if is_chat else 16
        params["max_new_tokens"] = default if given is None else given
        params["ignore_eos"] = bool(body.get("ignore_eos"))
        copies = 1 if body.get("n") is None else body["n"]
        if not 1 <= copies <= _MAX_CHOICES:
            raise ValueError(f"n is {copies}; it must be from 1 to {_MAX_CHOICES}")
        first = params.get("sampling_seed")
        each = [params if first is None else {**params, "sampling_seed": first + number} for number in range(copies)]
        return {"input_ids": [ids] * copies, "sampling_params": each}

    def _prompt_ids(self, body: dict[str, Any], is_chat: bool) -> list[int]:
        tokenizer = self._engine.model.tokenizer
        if tokenizer is None:
            raise ValueError("the model's directory has no tokenizer; call /generate with input_ids")
        if is_chat:
            template = ChatTemplate(tokenizer, body.get("chat_template_kwargs") or {})
            return rendered_ids(tokenizer, template.prompt(check_messages(body.get("messages"), "messages"), body.get("tools")))
        prompt = body.get("prompt")
        if isinstance(prompt, list):  # of token ids; the engine checks them
            return prompt
        if not isinstance(prompt, str):
            raise ValueError(f"prompt must be text or a list of token ids, not {prompt!r:.50}")
        return plain_ids(tokenizer, prompt)

    async def _events(
        self, requests: list[Request], fields: dict[str, Any], *, is_chat: bool, with_usage: bool, held_back: int
    ) -> AsyncIterator[bytes]:
        """Yield server-sent events with new text as it is sampled; abort the requests if the client disconnects.

        Args:
            held_back: number of characters at the end that wait for the next tokens, since they may begin a stop string
        """
        sent = [""] * len(requests)
        texts = [TextStream(self._engine.model.tokenizer) for _ in requests]
        open_ones = set(range(len(requests)))
        try:
            if is_chat:
                for index in sorted(open_ones):
                    yield event({**fields, "choices": [chunk(index, {"role": "assistant", "content": ""}, None)]})
            while open_ones:
                await asyncio.wait([requests[index].waiter for index in open_ones], timeout=POLL_S, return_when=asyncio.FIRST_COMPLETED)
                for index in sorted(open_ones):
                    request, done = requests[index], requests[index].waiter.done()
                    if request.error:
                        yield event(error_content(request.error, "server_error"))
                        return
                    if done:
                        whole = answer(request, self._engine.model)["text"]
                    else:  # the newest token may have completed a stop string, although the request is not yet known to have ended
                        whole = texts[index].read(request.output_ids[:-1])
                        whole = whole[: max(0, len(whole) - held_back)]
                    new, sent[index] = whole[len(sent[index]) :], max(sent[index], whole, key=len)
                    if new or done:
                        reason = _reason(request) if done else None
                        choice = (
                            chunk(index, {"content": new}, reason) if is_chat else {"index": index, "text": new, "finish_reason": reason}
                        )
                        yield event({**fields, "choices": [choice]})
                    if done:
                        open_ones.remove(index)
            if with_usage:
                yield event({**fields, "choices": [], "usage": _usage(requests)})
            yield DONE
        finally:
            self._engine.abort(lambda request: request in requests and not request.waiter.done())


class TextStream:
    """Text of a growing list of tokens; `read` decodes only new tokens.

    A token may be a part of a character, and its text may depend on the token before it (SentencePiece drops the first space). Therefore
    new tokens are decoded together with those read last, and wait while their last character is incomplete.
    """

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = tokenizer
        self._text = ""
        self._context_start = 0
        """Index of the first of the tokens read last, which are decoded again before the new ones."""
        self._num_read = 0

    def read(self, ids: Sequence[int]) -> str:
        """Return the text of `ids`, which are all tokens so far, up to its last complete character."""
        window = list(ids[self._context_start :])
        known = self._decode(window[: self._num_read - self._context_start])
        longer = self._decode(window)
        if len(longer) > len(known) and not longer.endswith(_INCOMPLETE):
            self._text += longer[len(known) :]
            self._context_start, self._num_read = self._num_read, self._context_start + len(window)
        return self._text

    def _decode(self, ids: list[int]) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=True)) if ids else ""


def _reason(request: Request) -> str:
    assert request.finish_reason is not None
    return request.finish_reason["type"]


def _usage(requests: list[Request]) -> dict[str, int]:
    return usage(len(requests[0].input_ids), sum(len(request.output_ids) for request in requests))
