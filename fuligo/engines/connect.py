"""Connections to running engines."""

from __future__ import annotations

from fuligo.engines.client import EngineClient
from fuligo.engines.deadlines import DEFAULT, ControlDeadlines
from fuligo.engines.engine import InferenceEngine
from fuligo.formats.engine_keys import NO_KEYS, EngineKeys


def connect(
    url: str,
    keys: EngineKeys = NO_KEYS,
    *,
    retries: int = 3,
    timeout_s: float = 600.0,
    deadlines: ControlDeadlines = DEFAULT,
    num_ranks: int = 1,
    start: int = 0,
    number: int | None = None,
) -> InferenceEngine:
    """Return the engine at `url`; nothing is sent yet. Both backends serve SGLang's HTTP API, so one client serves both.

    Args:
        keys: shown to the engine
        retries: further attempts after a connection error, a 5xx status or a malformed answer
        timeout_s: deadline of a generate or score request, over all attempts
        deadlines: deadlines of the other calls
        num_ranks, start, number: see `InferenceEngine`
    """
    return EngineClient(
        url, keys, retries=retries, timeout_s=timeout_s, deadlines=deadlines, num_ranks=num_ranks, start=start, number=number
    )
