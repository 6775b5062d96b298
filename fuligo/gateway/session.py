"""Session of one agent, which answers the agent's requests with the policy and keeps every token for training."""

import asyncio
import secrets
import time
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field, replace
from hashlib import blake2b
from typing import Any

import numpy as np
import orjson

from fuligo.data.template import as_ids
from fuligo.engines.engine import Engine
from fuligo.engines.generation import FinishReason, Generation, SamplingParams, Tokenizer, trim
from fuligo.engines.openai_format import InvalidRequest, parse_body
from fuligo.environments.environment import AssistantTurn
from fuligo.environments.rendering import Renderer
from fuligo.errors import DataError, EngineError
from fuligo.gateway.chat_request import ChatRequest, parse_chat_request
from fuligo.gateway.completion import Completion
from fuligo.gateway.conversation import Conversation, Place, Sampled, Turn
from fuligo.types import IntArray, Span

MAX_BYTES_RENDERED_INLINE = 20_000
"""Longest request body, in bytes, that is rendered on the event loop: a thread would take longer. A longer one would block the loop."""
Reward = float | dict[str, Any]


class SessionEnded(Exception):
    """Raised for a request to a session that has ended."""


class ContextFull(InvalidRequest):
    """Raised if the conversation of a request leaves no room for an answer."""


@dataclass(slots=True, frozen=True)
class Policy:
    """Model that answers, shared by the sessions of a run."""

    engine: Engine
    renderer: Renderer
    tokenizer: Tokenizer
    _: KW_ONLY
    name: str
    timeout_s: float
    """Timeout of one request to an engine, retries included."""
    max_context_len: int | None = None
    """Longest prompt + answer, in tokens; None: no limit."""
    replaces_params: bool = False
    """True to use the rollout's sampling parameters where a request's differ, instead of rejecting the request."""


@dataclass(eq=False)
class Session:
    """Address and key for one agent, and the conversation behind them.

    Requests may arrive concurrently. When the engines' requests are aborted, for a weight sync or at the end of a rollout, the session is
    suspended: its requests keep their tokens, wait, and continue after `resume`.
    """

    policy: Policy
    params: SamplingParams
    """Sampling parameters of the rollout; `max_new_tokens` limits each answer."""
    _: KW_ONLY
    name: str
    """Name in the URL, unique to the session."""
    base_url: str
    """Base URL for OpenAI clients, which ends with `/v1`."""
    api_key: str = field(repr=False)
    label: str
    """Prefix of the session's request ids in the engine."""
    priority: int = 0
    conversation: Conversation = field(default_factory=Conversation, init=False)
    offered_tools: set[str] = field(default_factory=set, init=False)
    num_requests: int = field(default=0, init=False)
    num_replaced: int = field(default=0, init=False)
    """Requests with sampling parameters that were replaced by the rollout's."""
    last_request_s: float | None = field(default=None, init=False)
    """`time.monotonic()` when the last request arrived; None before the first."""
    failure: str | None = field(default=None, init=False)
    """Last engine error that was reported to the agent; None if there was none."""
    num_in_flight: int = field(default=0, init=False)
    interrupted: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    """Set while the session is suspended and none of its requests is in an engine."""
    is_suspended: bool = field(default=False, init=False)
    has_ended: bool = field(default=False, init=False)
    _at_engine: set[asyncio.Task[Generation]] = field(default_factory=set, init=False)
    _going: asyncio.Event = field(default_factory=asyncio.Event, init=False)
    _reward: "asyncio.Future[Reward]" = field(init=False)
    _repeats: dict[bytes, int] = field(default_factory=dict, init=False)

    def __post_init__(self) -> None:
        self._going.set()
        self._reward = asyncio.get_running_loop().create_future()

    async def reward(self) -> Reward:
        """Wait for the reward that an agent outside this process sends to `POST {base_url}/reward`."""
        return await asyncio.shield(self._reward)

    @property
    def given_reward(self) -> Reward | None:
        """Reward that was sent over HTTP; None if there is none."""
        return self._reward.result() if self._reward.done() else None

    def set_reward(self, reward: Reward) -> bool:
        """Set the reward of the session; return False, and keep the old one, if it is already set."""
        if self._reward.done():
            return False
        self._reward.set_result(reward)
        return True

    def suspend(self) -> None:
        """Hold back requests until `resume`; no-op if the session has ended."""
        if self.has_ended:
            return
        self.is_suspended = True
        self._going.clear()
        self._note_interruption()

    def resume(self) -> None:
        """Continue the waiting requests."""
        self.is_suspended = False
        self.interrupted.clear()
        self._going.set()

    def end(self) -> None:
        """Reject all further requests, and cancel those in an engine, because no client waits for their answers."""
        self.has_ended = True
        self._going.set()
        for request in self._at_engine:
            request.cancel()

    async def complete(self, raw: bytes, read: Callable[[bytes], Mapping[str, Any]] = parse_body) -> Completion:
        """Answer a request, whose bytes `read` translates to the body of a chat completion request.

        Raises InvalidRequest if the request is malformed or not supported, EngineError if no engine answered, and SessionEnded if the
        session ended before the answer was complete.
        """
        self.num_requests += 1
        self.last_request_s = time.monotonic()
        if self.has_ended:
            raise SessionEnded
        self.num_in_flight += 1
        try:
            request = parse_chat_request(read(raw), self.params, replaces=self.policy.replaces_params)
            self.num_replaced += request.num_replaced > 0
            return await self._answer(request, is_long=len(raw) > MAX_BYTES_RENDERED_INLINE)
        except EngineError as error:
            self.failure = str(error)
            raise
        finally:
            self.num_in_flight -= 1

    async def _answer(self, request: ChatRequest, is_long: bool) -> Completion:
        try:
            place = self.conversation.find(request.messages, request.tools)
        except (orjson.JSONEncodeError, RecursionError) as error:
            raise InvalidRequest(f"cannot read messages or tools: {error}; nest them less deeply", "messages") from error
        try:
            if is_long:
                parent, context = await asyncio.to_thread(self._context, place, request)
            else:
                parent, context = self._context(place, request)
        except DataError as error:
            raise InvalidRequest(str(error), "messages") from error
        prompt = context if parent is None else np.concatenate([parent.tokens(), context])
        sampled = await self._sample(prompt, self._limited(request.params, place, len(prompt)))
        turn = self.policy.renderer.parse(sampled.ids.tolist(), prompt.tolist()[-64:], request.tools)
        message, shown, stop = self._messages_of(turn, request, sampled)
        self.offered_tools.update(tool.name for tool in request.tools)
        before = [*parent.messages, *place.new] if parent is not None else request.messages
        self.conversation.add(place, Turn(len(self.conversation.turns), parent, [*before, message], context, sampled), shown, stop)
        return Completion(request, shown, sampled, len(prompt), self.policy.name, stop)

    def _context(self, place: Place, request: ChatRequest) -> tuple[Turn | None, IntArray]:
        """Return the turn to continue and the ids after it.

        Return None and the whole prompt if there is no such turn, or the template rewrites earlier turns.
        """
        renderer, parent = self.policy.renderer, place.parent
        if parent is not None:
            ids = renderer.extension(parent.messages, request.tools, parent.sampled.ids.tolist(), place.new)
            if ids is not None:
                return parent, as_ids(ids)
        return None, as_ids(renderer.prompt(request.messages, request.tools))

    def _limited(self, params: SamplingParams, place: Place, num_prompt_tokens: int) -> SamplingParams:
        """Return the parameters, limited to the tokens that the context leaves, with a seed for this request.

        Raises ContextFull if the prompt leaves no room for a token.
        """
        limit = self.policy.max_context_len
        room = params.max_new_tokens if limit is None else limit - num_prompt_tokens
        if room < 1:
            raise ContextFull(
                f"the conversation has {num_prompt_tokens} tokens, and --rollout-max-context-len {limit} leaves no room for an answer; "
                "shorten the conversation",
                "messages",
            )
        repeat = self._repeats.get(place.state, 0)
        self._repeats[place.state] = repeat + 1
        seed = params.sampling_seed
        if seed is not None:
            digest = blake2b(place.state + b"%d/%d" % (seed, repeat), digest_size=8).digest()
            seed = int.from_bytes(digest, "little") >> 1
        return replace(params, max_new_tokens=min(params.max_new_tokens, room), sampling_seed=seed)

    async def _sample(self, prompt: IntArray, params: SamplingParams) -> Sampled:
        """Sample an answer; after an abort, continue it from its tokens."""
        ids, logprobs, versions = np.empty(0, np.int32), np.empty(0, np.float32), np.empty(0, np.int32)
        spans: list[Span] = []
        reason: FinishReason = "abort"
        while reason == "abort":
            await self._going.wait()
            if self.has_ended:
                raise SessionEnded
            left = params.max_new_tokens - len(ids)
            if left <= 0:
                reason = "length"
                break
            span = Span("generate", time.time(), 0.0, first_token=len(ids))
            generation = await self._generated(np.concatenate([prompt, ids]), replace(params, max_new_tokens=left))
            span.end_s, span.engine, span.num_tokens = time.time(), generation.engine, len(generation.output_ids)
            spans.append(span)
            ids, logprobs = np.concatenate([ids, generation.output_ids]), np.concatenate([logprobs, generation.logprobs])
            versions = np.concatenate([versions, generation.versions])
            reason = generation.finish_reason
            if reason == "abort":
                self.suspend()
        return Sampled(ids, logprobs, versions, reason, tuple(spans))

    async def _generated(self, input_ids: IntArray, params: SamplingParams) -> Generation:
        """Sample from an engine. Raises EngineError if no engine answered, and SessionEnded if the session ended in the meantime."""
        rid = f"{self.label}-{secrets.token_hex(4)}"
        timeout_s = self.policy.timeout_s
        request = asyncio.ensure_future(
            self.policy.engine.generate(input_ids, params, rid=rid, priority=self.priority, timeout_s=timeout_s)
        )
        self._at_engine.add(request)
        try:
            return await request
        except asyncio.CancelledError:
            if not self.has_ended or ((task := asyncio.current_task()) and task.cancelling()):
                raise
            raise SessionEnded from None
        finally:
            self._at_engine.discard(request)
            self._note_interruption()

    def _note_interruption(self) -> None:
        if self.is_suspended and not self._at_engine:
            self.interrupted.set()

    def _messages_of(self, turn: AssistantTurn, request: ChatRequest, sampled: Sampled) -> tuple[dict[str, Any], dict[str, Any], str]:
        """Return the answer as it is rendered and as the agent sees it, and the text that was stripped from its end.

        The stripped text begins with a stop string; it is empty if the answer has none. A request that offered no tools gets tool calls as
        text, because its agent expects none.
        """
        message, stop = turn.message(), ""
        shown = dict(message)
        if turn.tool_calls and not request.tools:
            text = str(self.policy.tokenizer.decode(sampled.ids.tolist(), skip_special_tokens=True)).strip()
            shown = {key: value for key, value in message.items() if key != "tool_calls"} | {"content": text}
        content = str(shown["content"])
        if request.params.stop and sampled.finish_reason == "stop":
            kept = trim(content, request.params.stop)
            shown["content"], stop = kept, content[len(kept) :]
        return message, shown, stop
