"""SGLang reports the experts of every token, also for continued responses; they equal those of transformers."""

import asyncio
import json
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio

from fuligo.engines.generation import SamplingParams
from fuligo.engines.group import EngineGroup
from fuligo.engines.host import PortClaims
from fuligo.engines.sglang.server import SGLangServer
from fuligo.models.routing import RoutingShape
from fuligo.rollout.generate import SingleTurn
from fuligo.trainer.samples import SampleSettings, train_samples
from fuligo.types import Sample, SampleGroup, SampleStatus
from tests import tiny
from tests.e2e.command import environment
from tests.e2e.warm_children import ForkServer
from tests.megatron.forced_routing import ForcedModel
from tests.sglang import oracle
from tests.sglang.engines import ENVIRONMENT, server_settings
from tests.sglang.test_job import command, metrics

PARAMS = SamplingParams(max_new_tokens=400, ignore_eos=True)


@pytest_asyncio.fixture
async def mixture(claims: PortClaims, tmp_path: Path) -> AsyncIterator[tuple[Path, EngineGroup]]:
    """Start an engine with experts behind a router that does not exist: requests must bypass the router."""
    checkpoint = tiny.save_checkpoint(tmp_path / "model", "qwen3_moe")
    arguments = {"enable_return_routed_experts": True, "max_total_tokens": 4096}
    environment = {**ENVIRONMENT, "FULIGO_TEST_PLAIN_MEMORY": "1"}
    server = SGLangServer(
        server_settings("engine", checkpoint, claims, tmp_path / "engine.txt", arguments=arguments, environment=environment)
    )
    group = EngineGroup.connect([server.url], keys=server.settings.keys, router_url="http://127.0.0.1:9", timeout_s=120.0)
    try:
        await server.wait_ready()
        yield checkpoint, group
    finally:
        await group.close()
        await server.stop()


def fresh(index: int) -> Sample:
    return Sample(index, 0, "p", np.array(oracle.PROMPTS[index], np.int32), reward=1.0)


async def test_experts_are_those_of_transformers_also_of_a_continued_response(mixture: tuple[Path, EngineGroup]) -> None:
    checkpoint, engines = mixture
    generate = SingleTurn(engines, tiny.tokenizer(), timeout_s=120.0, routing=RoutingShape.read(checkpoint))
    begun = [asyncio.create_task(generate(fresh(index), PARAMS)) for index in range(2)]
    while (await engines.load()).num_running < len(begun):  # noqa: ASYNC110  # there is no event to wait for
        await asyncio.sleep(0.01)
    await engines.abort_all()
    cut = [await task for task in begun]
    assert all(sample.status is SampleStatus.ABORTED and 0 < sample.response_length < PARAMS.max_new_tokens for sample in cut)
    known = [sample.routed_experts for sample in cut]
    whole = [await generate(sample, SamplingParams(max_new_tokens=sample.response_length + 8, ignore_eos=True)) for sample in cut]
    forced = ForcedModel(checkpoint)
    for sample, first, trained in zip(
        whole, known, train_samples([SampleGroup(0, 0, whole)], SampleSettings(needs_routing=True)), strict=True
    ):
        assert trained.routed_experts is not None and first is not None
        assert np.array_equal(trained.routed_experts[: len(first)], first)
        forced.num_changed = 0
        logprobs = forced.logprobs(trained)
        assert len(trained.routed_experts) == len(trained.tokens) - 1 and forced.num_changed == 0
        assert np.abs(logprobs.detach().numpy() - sample.engine_logprobs).max() < oracle.TOLERANCE


@pytest.mark.slow
def test_a_run_trains_on_the_routing_of_its_engines(warm_commands: ForkServer, tmp_path: Path) -> None:
    """Responses that a later rollout continued are included; engine and trainer agree on log-probabilities."""
    model = tiny.save_checkpoint(tmp_path / "model", "qwen3_moe")
    words = command(
        tmp_path / "run",
        hf_checkpoint=model,
        num_rollout=3,
        num_steps_per_rollout=2,
        rollout_num_gpus=1,
        rollout_max_response_len=900,
        rollout_stop_token_ids=30,
        rollout_batch_size=8,
        n_samples_per_prompt=4,
        over_sampling_batch_size=16,
        partial_rollout=True,
        rm_type="random",
        train_backend="megatron",
        use_rollout_routing_replay=True,
        engine_env=json.dumps({**ENVIRONMENT, "FULIGO_TEST_PLAIN_MEMORY": "1"}),
    )
    with warm_commands.serving():
        run = subprocess.run(words, capture_output=True, text=True, env=environment(), timeout=240, check=False)
    assert run.returncode == 0, run.stdout + run.stderr
    steps = metrics(tmp_path / "run")
    assert len(steps) == 3
    assert steps[0]["train/routing_replay_changed"] < 0.01 and steps[0]["train/logprob_abs_diff"] < 1e-3
    assert sum(step["rollout/num_resumed"] for step in steps) > 0, "lengths differ, so that some responses are aborted"
