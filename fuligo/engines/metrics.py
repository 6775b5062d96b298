"""Metrics of the engines during sampling: `engine/*` of a step."""

import asyncio
from collections.abc import Iterable, Sequence
from statistics import fmean

from fuligo.engines.engine import InferenceEngine
from fuligo.engines.generation import EngineLoad, Served
from fuligo.engines.group import EngineGroup
from fuligo.errors import EngineError

POLL_S = 1.0
POLL_TIMEOUT_S = 5.0


class EngineMonitor:
    """Periodic poll of every engine's load. A missing answer is counted, but is not an error: the fleet supervises engines.

    The load comes from `/v1/loads`, which SGLang reads from shared memory. The cache metrics there cover only the last prefill, so cache
    hits and speculative decoding are counted from the answers to requests instead.
    """

    def __init__(self, engines: EngineGroup, *, interval_s: float = POLL_S) -> None:
        self._engines = engines
        self._interval_s = interval_s
        self._numbers: dict[str, int] = {}
        """Number of each engine by URL, in order of the first poll; a restarted engine keeps its number."""
        self._polls: list[dict[int, EngineLoad]] = []
        self._num_missed = 0
        self._served = engines.served

    async def watch(self) -> None:
        """Poll until canceled."""
        while True:
            await self.poll()
            await asyncio.sleep(self._interval_s)

    async def poll(self) -> None:
        """Poll every engine once."""
        loads: dict[int, EngineLoad] = {}

        async def ask(client: InferenceEngine) -> None:
            number = self._numbers.setdefault(client.url, len(self._numbers))
            try:
                async with asyncio.timeout(POLL_TIMEOUT_S):
                    loads[number] = await client.load(retries=0)
            except (EngineError, TimeoutError):
                self._num_missed += 1

        await asyncio.gather(*map(ask, self._engines.clients))
        if any(load.num_running or load.num_waiting for load in loads.values()):
            self._polls.append(loads)

    def take(self) -> dict[str, float]:
        """Return the metrics `engine/*` since the last call. Polls that found no request in any engine are left out."""
        polls, self._polls = self._polls, []
        num_missed, self._num_missed = self._num_missed, 0
        before, self._served = self._served, self._engines.served
        metrics = load_metrics(polls, num_engines=len(self._numbers)) | served_metrics(before, self._served)
        return metrics | {"engine/num_missed_polls": num_missed}


def load_metrics(polls: Sequence[dict[int, EngineLoad]], *, num_engines: int) -> dict[str, float]:
    """Return the metrics of all engines together and, if there are several, of each engine; empty without polls.

    Args:
        polls: loads of each poll by engine number, without the engines that did not answer; a missing answer does not enter a mean
    """
    if not polls:
        return {}
    engines = {number: [poll[number] for poll in polls if number in poll] for number in range(num_engines)}
    engines = {number: loads for number, loads in engines.items() if loads}
    usages = [load.kv_usage for loads in engines.values() for load in loads if load.kv_usage is not None]
    rates = {number: rate for number, loads in engines.items() if (rate := _mean(load.tokens_per_s for load in loads)) is not None}
    metrics: dict[str, float] = {
        "engine/num_running_mean": sum(fmean(load.num_running for load in loads) for loads in engines.values()),
        "engine/num_running_max": max(sum(load.num_running for load in poll.values()) for poll in polls),
        "engine/num_waiting_mean": sum(fmean(load.num_waiting for load in loads) for loads in engines.values()),
        "engine/num_waiting_max": max(sum(load.num_waiting for load in poll.values()) for poll in polls),
    }
    if usages:
        metrics |= {"engine/kv_usage_mean": fmean(usages), "engine/kv_usage_max": max(usages)}
    if rates:
        metrics["engine/tokens_per_s"] = sum(rates.values())
    if num_engines > 1:
        for number, loads in engines.items():
            metrics[f"engine/{number}/num_running_mean"] = fmean(load.num_running for load in loads)
            metrics[f"engine/{number}/num_waiting_mean"] = fmean(load.num_waiting for load in loads)
            if (usage := _mean(load.kv_usage for load in loads)) is not None:
                metrics[f"engine/{number}/kv_usage_mean"] = usage
            if number in rates:
                metrics[f"engine/{number}/tokens_per_s"] = rates[number]
    return metrics


def served_metrics(before: Served, now: Served) -> dict[str, float]:
    """Return the cache hit rate and, with speculative decoding, the accept length of the answers between two token counts."""
    metrics: dict[str, float] = {}
    if num_prompt_tokens := now.num_prompt_tokens - before.num_prompt_tokens:
        metrics["engine/cache_hit_rate"] = (now.num_cached_tokens - before.num_cached_tokens) / num_prompt_tokens
    if num_verifications := now.num_verifications - before.num_verifications:
        metrics["engine/spec_accept_length"] = (now.num_drafted_tokens - before.num_drafted_tokens) / num_verifications
    return metrics


def _mean(values: Iterable[float | None]) -> float | None:
    """Return the mean of the values that are not None; None if there are none."""
    known = [value for value in values if value is not None]
    return fmean(known) if known else None
