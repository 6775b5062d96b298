"""Profile of a real SGLang engine while it samples."""

import gzip
import json
from pathlib import Path

from fuligo.engines.generation import SamplingParams
from fuligo.engines.group import EngineGroup
from fuligo.engines.profiling import EngineProfiler
from tests.sglang import oracle


async def test_engines_write_a_trace_of_the_chosen_rollout(engines: EngineGroup, tmp_path: Path) -> None:
    profiler = EngineProfiler(engines, (2,), tmp_path / "profile")
    for rollout in (1, 2):
        async with profiler.profiled(rollout):
            await engines.generate(oracle.PROMPTS[0], SamplingParams(max_new_tokens=40, ignore_eos=True), rid=f"profiled-{rollout}")
    traces = sorted((tmp_path / "profile").glob("*.trace.json.gz"))
    assert [trace.name[:22] for trace in traces] == [f"rollout_000002_engine{number}" for number in range(len(engines.clients))]
    events = [event for trace in traces for event in json.loads(gzip.decompress(trace.read_bytes()))["traceEvents"]]
    assert any("aten::" in event.get("name", "") for event in events), "operations of the engine that sampled"
