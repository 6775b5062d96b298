"""What is asked of an engine for one response, and what it answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from fuligo.models.routing import RoutingShape
from fuligo.types import FloatArray, IntArray, RoutedExperts

FinishReason = Literal["stop", "length", "abort"]
MAX_LOGPROB = 1e-3
"""Rounding lets a certain token's log-probability come out slightly above 0."""


@dataclass(slots=True, frozen=True)
class SamplingParams:
    """How to sample one response."""

    max_new_tokens: int
    min_new_tokens: int = 0
    """End tokens and stops are suppressed before this many tokens."""
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    """-1: all tokens."""
    min_p: float = 0.0
    stop: tuple[str, ...] = ()
    """Strings that end the response; trimmed from the text, never from the ids."""
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    sampling_seed: int | None = None
    """With a seed the tokens depend on the seed, their position and the weights alone, not on what else is being decoded."""

    def to_json(self) -> dict[str, Any]:
        """SGLang's names; what is at its default is left out where SGLang has the same default."""
        body: dict[str, Any] = {
            "max_new_tokens": self.max_new_tokens,
            "min_new_tokens": self.min_new_tokens,
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p,
            "ignore_eos": self.ignore_eos,
        }
        if self.stop:
            body["stop"] = list(self.stop)
        if self.stop_token_ids:
            body["stop_token_ids"] = list(self.stop_token_ids)
        if self.sampling_seed is not None:
            body["sampling_seed"] = self.sampling_seed
        return body

    @classmethod
    def from_json(cls, body: Any) -> SamplingParams:
        """The inverse of `to_json`, for what a client sends.

        Raises:
            ValueError: a value out of range, or a parameter that is not supported and not neutral; names it
        """
        if not isinstance(body, dict):
            raise ValueError(f"sampling_params must be an object, not {body!r:.100}")
        for name in body.keys() - FIELD_RULES.keys():
            if name not in NEUTRAL:
                raise ValueError(f"sampling_params.{name} is not known; known are {sorted(FIELD_RULES)}")
            if body[name] not in NEUTRAL[name]:
                raise ValueError(f"sampling_params.{name} is not supported: leave it out or at {NEUTRAL[name][-1]!r}")
        values: dict[str, Any] = {"max_new_tokens": DEFAULT_MAX_NEW_TOKENS}
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


DEFAULT_MAX_NEW_TOKENS = 128
"""SGLang's."""
FIELD_RULES: dict[str, tuple[Any, Callable[[Any], bool], str]] = {
    "max_new_tokens": (int, lambda x: x >= 1, "an integer >= 1"),
    "min_new_tokens": (int, lambda x: x >= 0, "an integer >= 0"),
    "temperature": ((int, float), lambda x: 0 <= x < float("inf"), "a number >= 0 (0: the likeliest token)"),
    "top_p": ((int, float), lambda x: 0 < x <= 1, "a number above 0 and at most 1"),
    "top_k": (int, lambda x: x == -1 or x >= 1, "an integer >= 1, or -1 for all tokens"),
    "min_p": ((int, float), lambda x: 0 <= x <= 1, "a number from 0 to 1"),
    "stop": (str, bool, "a non-empty string or a list of them"),
    "stop_token_ids": (int, lambda x: x >= 0, "a list of token ids"),
    "ignore_eos": (bool, lambda x: True, "true or false"),
    "sampling_seed": (int, lambda x: True, "an integer"),
}
"""Type, range and what to tell the user, of every parameter."""
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "n": (None, 1),
    "frequency_penalty": (None, 0),
    "presence_penalty": (None, 0),
    "repetition_penalty": (None, 1),
    "logit_bias": (None,),
    "json_schema": (None,),
    "regex": (None,),
    "ebnf": (None,),
    "structural_tag": (None,),
    "stop_regex": (None, []),
    "custom_params": (None,),
    "no_stop_trim": (None, False),
    "skip_special_tokens": (None, True),
    "spaces_between_special_tokens": (None, True),
    "stream_interval": (None,),
}
"""SGLang's parameters that are accepted only where they change nothing."""


@dataclass(slots=True, frozen=True)
class RoutingQuery:
    """Asks to which experts the engine sends the tokens of a request."""

    shape: RoutingShape
    num_known: int
    """Tokens at the start of `input_ids` of which it is known already."""
    affinity: int
    """Requests that share it share their first tokens, and best go to one engine."""

    def num_missing(self, num_prompt_tokens: int, num_new_tokens: int) -> int:
        """Tokens of which the answer tells: all further ones but the last, which went through no layer. Nothing was computed for certain
        where nothing was sampled."""
        return num_prompt_tokens + num_new_tokens - 1 - self.num_known if num_new_tokens else 0


@dataclass(slots=True)
class Generation:
    """What an engine answered to one request."""

    output_ids: IntArray
    """[R] new tokens, the end token included."""
    logprobs: FloatArray
    """[R] log softmax(logits / T) over the full vocabulary."""
    finish_reason: FinishReason
    """`abort`: cut short on request; the tokens so far are good and can be continued."""
    weight_version: int
    """policy_version of the weights when the request ended."""
    prompt_tokens: int
    cached_tokens: int
    """Prompt tokens whose keys and values were not computed anew."""
    text: str
    """Decoded new tokens, without the stop string or end token; empty where the engine has no tokenizer."""
    num_verifications: int = 0
    """Passes of the model that judged drafted tokens; 0 without speculative decoding."""
    engine: int | None = None
    """Number of the engine that answered, where known."""
    routed_experts: RoutedExperts | None = None
    """[n, M, K] of the tokens that a `RoutingQuery` asked for; None without one."""

    @classmethod
    def aborted(cls, num_prompt_tokens: int) -> Generation:
        """Before anything was sampled."""
        return cls(np.zeros(0, np.int32), np.zeros(0, np.float32), "abort", 0, num_prompt_tokens, 0, "")


@dataclass(slots=True, frozen=True)
class WeightLabel:
    """What engines behind a router report as `weight_version`: `40@2` is version 40 of engine 2.

    SGLang hands any text back with every answer, and the router does not say which engine answered.
    """

    version: int
    engine: int | None = None

    def __str__(self) -> str:
        return str(self.version) if self.engine is None else f"{self.version}@{self.engine}"

    @classmethod
    def parse(cls, value: Any) -> WeightLabel:
        """
        Raises:
            Retryable: it names no version
        """
        if value == "default":  # SGLang before the first update
            return cls(0)
        version, _, engine = str(value).partition("@")
        try:
            return cls(int(version), int(engine) if engine else None)
        except ValueError as error:
            raise Retryable(f"weight_version is {value!r}, not a number") from error


@dataclass(slots=True, frozen=True)
class Served:
    """Sums over what engines answered."""

    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_drafted_tokens: int = 0
    """New tokens of requests that were decoded speculatively."""
    num_verifications: int = 0

    def plus(self, generation: Generation) -> Served:
        drafted = len(generation.output_ids) if generation.num_verifications else 0
        return Served(
            self.num_prompt_tokens + generation.prompt_tokens,
            self.num_cached_tokens + generation.cached_tokens,
            self.num_drafted_tokens + drafted,
            self.num_verifications + generation.num_verifications,
        )


@dataclass(slots=True, frozen=True)
class EngineLoad:
    """What is in an engine now; sums over its data-parallel ranks."""

    num_running: int
    num_waiting: int
    """Received and not started: no free slot, or the engine is paused."""
    num_arrived: int | None
    """Requests received since the start; None where an engine does not count them (SGLang)."""
    kv_usage: float | None = None
    """Share of the KV cache in use; None where the engine does not say."""
    tokens_per_s: float | None = None
    """New tokens of the last decoding steps; None where they are not measured (SGLang without `--enable-metrics`) or none were made."""


@dataclass(slots=True, frozen=True)
class ModelInfo:
    """What an engine serves."""

    model_path: str
    weight_version: int


class Retryable(Exception):
    """The request may succeed when sent again: no connection, a server error, or an answer that makes no sense."""


def parse_generation(answer: Any) -> Generation:
    """Check an answer of `/generate` and make it a `Generation`.

    Raises:
        Retryable: it is not what the API promises
    """
    try:
        meta = answer["meta_info"]
        ids = np.asarray(answer["output_ids"], np.int64).reshape(-1)
        scored = meta["output_token_logprobs"]
        logprobs = np.asarray([entry[0] for entry in scored], np.float32)
        scored_ids = np.asarray([entry[1] for entry in scored], np.int64)
        reason = meta["finish_reason"]["type"]
        prompt_tokens, cached_tokens = int(meta["prompt_tokens"]), int(meta.get("cached_tokens", 0))
        num_verifications = int(meta.get("spec_verify_ct", 0))
        text = answer.get("text") or ""
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError) as error:
        raise Retryable(f"malformed answer ({type(error).__name__}: {error}): {answer!r:.200}") from error
    if reason not in ("stop", "length", "abort"):
        raise Retryable(f"unknown finish reason {reason!r}")
    if len(ids) != len(logprobs):
        raise Retryable(f"{len(ids)} output_ids but {len(logprobs)} output_token_logprobs")
    if not np.array_equal(ids, scored_ids):
        raise Retryable("output_token_logprobs are of other tokens than output_ids")
    if ids.size and (ids.min() < 0 or ids.max() >= 2**31):
        raise Retryable(f"a token id is out of range: {ids.min()} .. {ids.max()}")
    if not np.isfinite(logprobs).all() or (logprobs > MAX_LOGPROB).any():
        raise Retryable("a log-probability is not a finite number <= 0")
    label = WeightLabel.parse(meta.get("weight_version", "default"))
    return Generation(
        ids.astype(np.int32),
        logprobs,
        reason,
        label.version,
        prompt_tokens,
        cached_tokens,
        str(text),
        num_verifications,
        label.engine,
    )


def parse_routing(answer: Any, query: RoutingQuery, num_prompt_tokens: int) -> RoutedExperts:
    """The experts in a checked answer of `/generate`: [n, M, K] of the tokens that were asked for.

    Raises:
        ValueError: they are missing, or not what the model's routers can choose.
    """
    num_tokens = query.num_missing(num_prompt_tokens, len(answer["output_ids"]))
    return query.shape.decode(answer["meta_info"].get("routed_experts"), num_tokens) if num_tokens else query.shape.empty()


def parse_load(ranks: Sequence[Mapping[str, Any]]) -> EngineLoad:
    """The data-parallel ranks of an engine in an answer of `/v1/loads`.

    Raises:
        KeyError, TypeError, AttributeError: it is not what the API promises
    """
    arrived = [rank["num_arrived_reqs"] for rank in ranks if "num_arrived_reqs" in rank]
    capacity = sum(rank.get("max_total_num_tokens", 0) for rank in ranks)
    return EngineLoad(
        num_running=sum(rank["num_running_reqs"] for rank in ranks),
        num_waiting=sum(rank["num_waiting_reqs"] for rank in ranks),
        num_arrived=sum(arrived) if len(arrived) == len(ranks) else None,
        kv_usage=sum(rank.get("num_used_tokens", 0) for rank in ranks) / capacity if capacity else None,
        tokens_per_s=sum(rank.get("gen_throughput", 0.0) for rank in ranks) or None,
    )
