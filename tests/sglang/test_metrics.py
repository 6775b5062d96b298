"""Metrics of real SGLang engines while they sample."""

import asyncio

from fuligo.engines.generation import SamplingParams
from fuligo.engines.group import EngineGroup
from fuligo.engines.metrics import EngineMonitor
from tests.sglang import oracle

NUM_REQUESTS = 8
LONG = SamplingParams(max_new_tokens=160, ignore_eos=True)


async def test_load_cache_and_engines_apart(engines: EngineGroup) -> None:
    for engine in engines.clients:
        await engine.flush_cache()
    monitor = EngineMonitor(engines, interval_s=0.05)
    watch = asyncio.create_task(monitor.watch())
    for turn in range(2):  # the caches hold the prompts for the second
        requests = [engines.generate(oracle.PROMPTS[0], LONG, rid=f"watched-{turn}-{number}") for number in range(NUM_REQUESTS)]
        await asyncio.gather(*requests)
    watch.cancel()
    metrics = monitor.take()
    assert 0 < metrics["engine/num_running_mean"] <= metrics["engine/num_running_max"] <= NUM_REQUESTS
    assert 0 < metrics["engine/kv_usage_mean"] <= metrics["engine/kv_usage_max"] < 1
    assert 0 < metrics["engine/cache_hit_rate"] < 1
    apart = [metrics[f"engine/{number}/num_running_mean"] for number in range(len(engines.clients))]
    assert all(apart) and abs(sum(apart) - metrics["engine/num_running_mean"]) < 1e-9
    assert "engine/tokens_per_s" not in metrics, "measured with --enable-metrics only"
    assert "engine/spec_accept_length" not in metrics
