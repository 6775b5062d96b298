"""State of one request in the embedded engine: its parameters, and the tokens that have been sampled so far."""

import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fuligo.engines.generation import SamplingParams
from fuligo.types import PromptImage


@dataclass(slots=True, eq=False)
class Request:
    """Request from its arrival to its answer. While it runs it owns one row of a KV pool.

    Between steps, the row holds the keys and values of all tokens but the newest, which is fed to the model in the next step.
    """

    rid: str
    input_ids: list[int]
    """[P] token ids of the prompt."""
    params: SamplingParams
    end_ids: frozenset[int]
    """Tokens that end the response: end of text (unless ignored) and stop_token_ids."""
    seed: int
    """Seed of the sampling stream; drawn from the operating system if the request gave none."""
    priority: int = 0
    arrival: int = 0
    """Index of the request among all that the engine received."""
    arrived_s: float = field(default_factory=time.perf_counter)
    waiter: Any = None
    """Future that the caller awaits; the engine does not touch it."""

    images: tuple[PromptImage, ...] = ()
    """Images of the prompt, in the order of their tokens."""
    score_start: int | None = None
    """Position after which input tokens are scored into `input_logprobs`, and nothing is sampled; None: tokens are sampled."""
    input_logprobs: list[float] = field(default_factory=list)
    output_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    finish_reason: dict[str, Any] | None = None
    """SGLang's object: `{"type": "stop", "matched": ...}`, `{"type": "length", ...}` or `{"type": "abort", ...}`; None until the
    request ends."""
    error: str | None = None
    """Reason why the request failed and has no answer; None if it did not fail."""
    weight_version: int = 0
    cached_tokens: int = 0
    """Prompt tokens whose keys and values were copied from another request."""

    pool_capacity: int = 0
    """Capacity of the KV pool that has the request's row; 0 while it has none."""
    row: int = -1
    """Row in that pool; -1 while the request has none."""
    prompt_key: bytes = b""
    """Key that is equal for requests with equal prompts, images included."""

    def __post_init__(self) -> None:
        self.prompt_key = np.asarray(self.input_ids, np.int32).tobytes() + "".join(image.digest for image in self.images).encode()

    @property
    def num_tokens(self) -> int:
        return len(self.input_ids) + len(self.output_ids)

    @property
    def max_tokens(self) -> int:
        """Number of tokens of the prompt and the longest possible response."""
        return len(self.input_ids) + self.params.max_new_tokens

    @property
    def newest_token(self) -> int:
        return self.output_ids[-1] if self.output_ids else self.input_ids[-1]

    @property
    def order(self) -> tuple[int, int]:
        """Sort key of waiting requests: descending priority, then arrival."""
        return -self.priority, self.arrival
