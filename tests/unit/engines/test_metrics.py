"""Engine loads become metrics of the step; an engine that does not answer is counted."""

from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from aiohttp import web

from fuligo.engines.answers import parse_generation, parse_load
from fuligo.engines.generation import EngineLoad, Generation, Served
from fuligo.engines.group import EngineGroup
from fuligo.engines.metrics import EngineMonitor, load_metrics, served_metrics
from tests.metrics_page import is_timing, undocumented

NOBODY = "http://127.0.0.1:9"


def rank(running: int, waiting: int = 0, used: int = 0, **more: float) -> dict[str, Any]:
    return {"num_running_reqs": running, "num_waiting_reqs": waiting, "num_used_tokens": used, "max_total_num_tokens": 100, **more}


@dataclass
class Loaded:
    """Engine with scripted loads, one per poll; the last one repeats."""

    url: str = ""
    script: list[dict[str, Any]] = field(default_factory=list)

    async def loads(self, _: web.Request) -> web.Response:
        return web.json_response({"loads": [self.script.pop(0) if len(self.script) > 1 else self.script[0]]})


@pytest.fixture
async def engine() -> AsyncIterator[Loaded]:
    state = Loaded()
    app = web.Application()
    app.router.add_get("/v1/loads", state.loads)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    state.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield state
    await runner.cleanup()


async def test_what_is_polled_is_of_the_time_since_it_was_last_taken(engine: Loaded) -> None:
    engine.script = [rank(4, 2, used=10), rank(2, 0, used=30), rank(8)]
    group = EngineGroup.connect([engine.url])
    monitor = EngineMonitor(group)
    await monitor.poll()
    await monitor.poll()
    assert monitor.take() == {
        "engine/num_running_mean": 3,
        "engine/num_running_max": 4,
        "engine/num_waiting_mean": 1,
        "engine/num_waiting_max": 2,
        "engine/kv_usage_mean": pytest.approx(0.2),
        "engine/kv_usage_max": 0.3,
        "engine/num_missed_polls": 0,
    }
    await monitor.poll()
    assert monitor.take()["engine/num_running_mean"] == 8
    await group.close()


async def test_a_poll_of_idle_engines_does_not_count(engine: Loaded) -> None:
    engine.script = [rank(0), rank(6), rank(0)]
    group = EngineGroup.connect([engine.url])
    monitor = EngineMonitor(group)
    for _ in range(3):
        await monitor.poll()
    assert monitor.take()["engine/num_running_mean"] == 6
    await monitor.poll()
    assert monitor.take() == {"engine/num_missed_polls": 0}
    await group.close()


async def test_an_engine_that_does_not_answer_is_counted_and_the_others_are_heard(engine: Loaded) -> None:
    engine.script = [rank(5)]
    group = EngineGroup.connect([NOBODY, engine.url])
    monitor = EngineMonitor(group)
    await monitor.poll()
    metrics = monitor.take()
    assert metrics["engine/num_missed_polls"] == 1
    assert metrics["engine/num_running_mean"] == metrics["engine/1/num_running_mean"] == 5
    assert "engine/0/num_running_mean" not in metrics
    await group.close()


async def test_a_restarted_engine_keeps_its_number(engine: Loaded) -> None:
    engine.script = [rank(5)]
    group = EngineGroup.connect([engine.url, NOBODY])
    monitor = EngineMonitor(group)
    await monitor.poll()
    group.clients = group.clients[::-1]
    await monitor.poll()
    assert "engine/0/num_running_mean" in monitor.take()
    await group.close()


def test_engines_are_told_apart_and_added_up() -> None:
    polls = [
        {0: EngineLoad(4, 0, None, 0.2, 100.0), 1: EngineLoad(2, 1, None, 0.4, 60.0)},
        {0: EngineLoad(6, 0, None, 0.4, 200.0), 1: EngineLoad(0, 0, None, 0.0, None)},
        {0: EngineLoad(8, 0, None, 0.6, None)},
    ]
    metrics = load_metrics(polls, num_engines=2)
    assert metrics["engine/num_running_mean"] == (4 + 6 + 8) / 3 + (2 + 0) / 2
    assert metrics["engine/num_running_max"] == 8
    assert metrics["engine/tokens_per_s"] == 150 + 60
    assert metrics["engine/1/tokens_per_s"] == 60
    assert metrics["engine/0/kv_usage_mean"] == pytest.approx(0.4)
    assert undocumented(metrics) == []
    assert all(is_timing(key) for key in metrics)


def test_the_load_of_an_engine_is_that_of_its_data_parallel_ranks() -> None:
    load = parse_load([rank(3, 1, used=10, gen_throughput=50.0), rank(5, 0, used=40, gen_throughput=70.0)])
    assert load == EngineLoad(8, 1, None, 0.25, 120.0)
    assert parse_load([rank(1, gen_throughput=0.0, num_arrived_reqs=7)]) == EngineLoad(1, 0, 7, 0.0, None)


def generation(num_tokens: int, *, prompt: int, cached: int, verifications: int | None = None) -> Generation:
    meta: dict[str, Any] = {
        "finish_reason": {"type": "length"},
        "prompt_tokens": prompt,
        "cached_tokens": cached,
        "output_token_logprobs": [[-0.5, 7, None]] * num_tokens,
    }
    if verifications is not None:
        meta["spec_verify_ct"] = verifications
    parsed = parse_generation({"output_ids": [7] * num_tokens, "meta_info": meta})
    assert np.array_equal(parsed.output_ids, [7] * num_tokens)
    return parsed


def test_cache_and_speculation_are_counted_from_the_answers() -> None:
    before = Served().plus(generation(10, prompt=100, cached=0))
    now = before.plus(generation(12, prompt=50, cached=40, verifications=4)).plus(generation(6, prompt=50, cached=10, verifications=2))
    assert served_metrics(before, now) == {"engine/cache_hit_rate": 0.5, "engine/spec_accept_length": 3.0}
    assert served_metrics(Served(), before) == {"engine/cache_hit_rate": 0.0}
    assert served_metrics(now, now) == {}
    assert undocumented(served_metrics(before, now)) == []
