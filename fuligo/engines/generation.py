"""Requests to inference engines, their results, and the search for stop strings."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal, Protocol, TypedDict

import numpy as np

from fuligo.models.routing import RoutingShape
from fuligo.types import FloatArray, IntArray, PromptImage, RoutedExperts

FinishReason = Literal["stop", "length", "abort"]


@dataclass(slots=True, frozen=True)
class SamplingParams:
    """Sampling parameters of one response."""

    max_new_tokens: int
    min_new_tokens: int = 0
    """Number of tokens before which no end token is sampled."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    """Number of most likely tokens to sample from; -1: all."""
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    """Strings that end the response. The text ends before the stop string; the token ids include it."""
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    sampling_seed: int | None = None
    """Seed that, with prompt and weights, determines the tokens, whatever else is in the batch; None: a random seed."""

    def to_json(self) -> dict[str, Any]:
        """Return the parameters under SGLang's names; unset stops and seeds are omitted."""
        given = {name: value for name, value in asdict(self).items() if value not in ((), None)}
        return {name: list(value) if isinstance(value, tuple) else value for name, value in given.items()}

    @classmethod
    def from_json(cls, body: Any) -> SamplingParams:
        """Parse a client's `sampling_params`: the inverse of `to_json`.

        Raises ValueError if a parameter is unknown, a value is invalid, or an unsupported parameter is not set to a value of `NEUTRAL`.
        """
        if not isinstance(body, dict):
            raise ValueError(f"sampling_params must be an object, not {body!r:.100}")
        for name in body.keys() - FIELD_RULES.keys():
            if name not in NEUTRAL:
                raise ValueError(f"sampling_params.{name} is not known; known parameters: {sorted(FIELD_RULES)}")
            if body[name] not in NEUTRAL[name]:
                raise ValueError(f"sampling_params.{name} is not supported; remove it or set it to {NEUTRAL[name][-1]!r}")
        values: dict[str, Any] = {"max_new_tokens": 128}  # SGLang's default
        for name, (types, valid, rule) in FIELD_RULES.items():
            value = body.get(name)
            if value is None:
                continue
            if name in ("stop", "stop_token_ids"):
                value = tuple(value) if isinstance(value, list) else (value,)
                fits = all(isinstance(entry, types) and not isinstance(entry, bool) and valid(entry) for entry in value)
            else:
                fits = isinstance(value, types) and isinstance(value, bool) == (types is bool) and valid(value)
            if not fits:
                raise ValueError(f"sampling_params.{name} is {body[name]!r:.100}; it must be {rule}")
            values[name] = value
        params = cls(**values)
        if params.min_new_tokens > params.max_new_tokens:
            raise ValueError(f"min_new_tokens ({params.min_new_tokens}) exceeds max_new_tokens ({params.max_new_tokens})")
        return params


FIELD_RULES: dict[str, tuple[Any, Callable[[Any], bool], str]] = {
    "max_new_tokens": (int, lambda x: x >= 1, "an integer >= 1"),
    "min_new_tokens": (int, lambda x: x >= 0, "an integer >= 0"),
    "temperature": ((int, float), lambda x: 0 <= x < float("inf"), "a number >= 0 (0: the most likely token)"),
    "top_p": ((int, float), lambda x: 0 < x <= 1, "a number above 0 and at most 1"),
    "top_k": (int, lambda x: x == -1 or x >= 1, "an integer >= 1, or -1 for all tokens"),
    "min_p": ((int, float), lambda x: 0 <= x <= 1, "a number from 0 to 1"),
    "stop": (str, bool, "a non-empty string or a list of them"),
    "stop_token_ids": (int, lambda x: x >= 0, "a list of token ids"),
    "ignore_eos": (bool, lambda x: True, "true or false"),
    "sampling_seed": (int, lambda x: True, "an integer"),
}
"""Types, range check and description of every parameter."""
NEUTRAL: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("logit_bias", "json_schema", "regex", "ebnf", "structural_tag", "custom_params", "stream_interval"), (None,)),
    **dict.fromkeys(("n", "repetition_penalty"), (None, 1)),
    **dict.fromkeys(("frequency_penalty", "presence_penalty"), (None, 0)),
    **dict.fromkeys(("skip_special_tokens", "spaces_between_special_tokens"), (None, True)),
    "no_stop_trim": (None, False),
    "stop_regex": (None, []),
}
"""SGLang's parameters that are accepted only with these neutral values."""


@dataclass(slots=True, frozen=True)
class RoutingQuery:
    """Request for the experts to which the engine routes the tokens."""

    shape: RoutingShape
    num_known: int
    """Tokens at the start of `input_ids` whose experts are known already."""
    affinity: int
    """Number that is equal for requests that share a prefix and should go to the same engine."""


class RequestOptions(TypedDict, total=False):
    """Optional keyword arguments of `generate`."""

    priority: int
    """Queued requests start in descending order of priority; default 0. SGLang ignores it without --sglang-enable-priority-scheduling."""
    timeout_s: float | None
    """Deadline in seconds over all attempts; None: the client's deadline."""
    routing: RoutingQuery | None
    """Query for the tokens' experts. It makes the request bypass the router, which would drop the query. None: no query."""
    images: Sequence[PromptImage]
    """Images of the prompt, in the order of their tokens."""


@dataclass(slots=True)
class Generation:
    """Response of an engine to one request."""

    output_ids: IntArray
    """[R] new tokens, including the end token."""
    logprobs: FloatArray
    """[R] log softmax(logits / T) over the full vocabulary."""
    finish_reason: FinishReason
    """`abort`: ended early on request; the tokens so far are valid and can be continued."""
    weight_version: int
    """Policy version of the weights when the request ended."""
    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens whose keys and values came from a cache."""
    text: str
    """Decoded new tokens, without the stop string or end token; empty if the engine has no tokenizer."""
    num_verifications: int = 0
    """Verification passes of speculative decoding; 0 without it."""
    engine: int | None = None
    """Number of the engine that answered, if known."""
    routed_experts: RoutedExperts | None = None
    """[n, M, K] experts of the tokens that a `RoutingQuery` asked for; None without one."""
    token_versions: IntArray | None = None
    """[R] policy version of the weights that sampled each token; None if `weight_version` sampled all tokens."""

    @property
    def versions(self) -> IntArray:
        """[R] policy version of the weights that sampled each token."""
        return np.full(len(self.output_ids), self.weight_version, np.int32) if self.token_versions is None else self.token_versions

    @classmethod
    def aborted(cls, num_prompt_tokens: int) -> Generation:
        """Return the empty result of a request that was aborted before anything was sampled."""
        return cls(np.zeros(0, np.int32), np.zeros(0, np.float32), "abort", 0, num_prompt_tokens, 0, "")


@dataclass(slots=True, frozen=True)
class Served:
    """Token counts summed over results of engines."""

    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_drafted_tokens: int = 0
    """New tokens of speculatively decoded requests."""
    num_verifications: int = 0

    def plus(self, generation: Generation) -> Served:
        """Return the counts with those of one more result added."""
        drafted = len(generation.output_ids) if generation.num_verifications else 0
        return Served(
            self.num_prompt_tokens + generation.prompt_tokens,
            self.num_cached_tokens + generation.cached_tokens,
            self.num_drafted_tokens + drafted,
            self.num_verifications + generation.num_verifications,
        )


@dataclass(slots=True, frozen=True)
class EngineLoad:
    """Current load of an engine, summed over its data-parallel ranks."""

    num_running: int
    num_waiting: int
    """Requests received and not started, because no slot is free or the engine is paused."""
    num_arrived: int | None
    """Requests received since the start; None if the engine does not count them (SGLang)."""
    kv_usage: float | None = None
    """Fraction of the KV cache in use; None if the engine does not report it."""
    tokens_per_s: float | None = None
    """Decoding throughput of the last steps; None if not measured (SGLang without `--enable-metrics`) or nothing was decoded."""


@dataclass(slots=True, frozen=True)
class ModelInfo:
    """Model that an engine serves."""

    model_path: str
    weight_version: int
    num_weight_loads: int | None = None
    """Number of weight updates so far, from any client; None if the engine does not count them."""
    adapter_digest: str | None = None
    """Digest of the adapter that a trainer sent; None without one."""


class Tokenizer(Protocol):
    """Part of a transformers tokenizer's interface that this module uses."""

    def decode(self, token_ids: Any, skip_special_tokens: bool = False) -> Any: ...


def matched_stop(tokenizer: Tokenizer, ids: list[int], stops: Sequence[str]) -> str | None:
    """Return the stop string that the newest token completed; None if it completed none.

    Every token of a stop string has at least one byte, so the string's length in bytes bounds the number of tokens to decode.
    """
    longest = max(len(stop.encode()) for stop in stops)
    tail = tokenizer.decode(ids[-(longest + 1) :])
    return next((stop for stop in stops if stop in tail), None)


def trim(text: str, stops: Sequence[str], num_before: int = 0) -> str:
    """Return the text before the first stop string that ends after the first `num_before` characters; all of it if there is none."""
    starts = [text.find(stop, max(0, num_before - len(stop) + 1)) for stop in stops]
    return text[: min((start for start in starts if start >= 0), default=len(text))]
