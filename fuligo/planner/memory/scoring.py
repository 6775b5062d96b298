"""Memory of a teacher's server for scoring given tokens: log-probabilities over the vocabulary, for many tokens at a time.

Source: SGLang 0.5.15.post1, `LogitsProcessor.forward` and `process_input_logprobs_by_chunk`, `environ.py`.
"""

from __future__ import annotations

from dataclasses import dataclass

from fuligo.config import Config
from fuligo.config.server_groups import TEACHER
from fuligo.config.topology import EngineGroupSpec

BY_CHUNK, CHUNK_TOKENS = "SGLANG_ENABLE_LOGITS_PROCESSER_CHUNK", "SGLANG_LOGITS_PROCESSER_CHUNK_SIZE"
"""Environment variables that limit the tokens per chunk below a prefill chunk, and the limit."""
DEFAULT_CHUNK_TOKENS = 2048
_TRUE = ("true", "1", "yes", "y")
_WHOLE_BYTES = 2 * 4
"""Bytes per token and vocabulary entry: fp32 logits with a copy of the wanted rows, then that copy with its log-softmax."""
_CHUNK_BYTES = 3 * 4
"""Bytes with chunks, where a chunk's logits outlive its log-softmax."""


@dataclass(frozen=True, slots=True)
class Scoring:
    """Scoring settings of a server."""

    chunk_tokens: int | None
    """Tokens at a time; None: a whole prefill."""

    def num_bytes(self, prefill_tokens: int, vocab_size: int) -> int:
        """Return the bytes on each GPU; every GPU has the logits of the whole vocabulary."""
        if self.chunk_tokens is None or prefill_tokens <= self.chunk_tokens:
            return _WHOLE_BYTES * prefill_tokens * vocab_size
        return _CHUNK_BYTES * self.chunk_tokens * vocab_size


def scoring_of(spec: EngineGroupSpec, config: Config) -> Scoring | None:
    """Return the scoring settings, or None if the servers do not serve the teacher of --use-opd."""
    if not serves_teacher(spec, config):
        return None
    environment = config.engine_environment
    gathers_replicas = spec.dp_size > 1 and not spec.arguments.get("enable_dp_lm_head")
    if environment.get(BY_CHUNK, "").lower() not in _TRUE or gathers_replicas:
        return Scoring(None)
    given = environment.get(CHUNK_TOKENS, "")
    return Scoring(int(given) if given.isdecimal() else DEFAULT_CHUNK_TOKENS)


def serves_teacher(spec: EngineGroupSpec, config: Config) -> bool:
    return spec.model == TEACHER and config.teacher_from == "engine" and config.algorithm.opd_teacher_url is None
