"""Sampling built from a configuration, on a real embedded engine with a tiny model."""

import json
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import pytest
import pytest_asyncio
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from fuligo.config import Config
from fuligo.config.groups import DataFlags, EvalFlags, ModelFlags, RewardFlags, RolloutFlags
from fuligo.data.dataset import PromptDataset
from fuligo.data.source import PromptSource
from fuligo.engines.embedded.launch import EmbeddedEngineSettings, launch_embedded
from fuligo.engines.group import EngineGroup
from fuligo.rollout.build import Sampling, build_evaluator, build_sampling
from fuligo.rollout.protocol import Rollout, RolloutState
from fuligo.rollout.rewards import reward_runner
from fuligo.types import Sample, SampleStatus
from tests import tiny
from tests.e2e.warm_children import ForkServer
from tests.unit.rollout.scripted import samples_of

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_checkpoint(tmp_path_factory.mktemp("model"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engines(checkpoint: Path, fork_server: ForkServer, tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[EngineGroup]:
    log_file = tmp_path_factory.mktemp("engine") / "engine.txt"
    settings = EmbeddedEngineSettings(
        str(checkpoint), log_file, device="cpu", max_running_requests=32, max_total_tokens=32 * 320, num_threads=1, start_timeout_s=120
    )
    with fork_server.serving():
        process = await launch_embedded(settings)
    group = EngineGroup.connect([process.url], keys=process.keys, timeout_s=60)
    yield group
    await group.close()
    await process.stop()


@pytest.fixture
def config(checkpoint: Path, tmp_path: Path) -> Config:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text("".join(json.dumps({"input": f"what is {row} + {row}", "label": str(2 * row)}) + "\n" for row in range(20)))
    return Config(
        model=ModelFlags(hf_checkpoint=str(checkpoint)),
        data=DataFlags(prompt_data=str(prompts), label_key="label", rollout_shuffle=True),
        rollout=RolloutFlags(rollout_batch_size=4, n_samples_per_prompt=3, rollout_max_response_len=16),
        reward=RewardFlags(rm_type="random"),
        eval=EvalFlags(eval_prompt_data=["held_out", str(prompts)], n_samples_per_eval_prompt=2),
    )


def with_rollout(config: Config, **flags: object) -> Config:
    return config.model_copy(update={"rollout": config.rollout.model_copy(update=flags)})


def build(config: Config, engines: EngineGroup) -> Sampling:
    tokenizer = AutoTokenizer.from_pretrained(config.model.hf_checkpoint)
    assert config.data.prompt_data is not None
    prompts = PromptSource(PromptDataset.open(config.data.prompt_data, config.data, tokenizer))
    return build_sampling(
        config,
        prompts=prompts,
        engines=engines,
        tokenizer=tokenizer,
        reward=reward_runner(config),
        policy_version=lambda: 0,
        num_rollout=3,
    )


def content(sample: Sample) -> tuple:
    """Return everything of a sample that must be equal in two runs."""
    arrays = (sample.prompt_ids, sample.response_ids, sample.engine_logprobs, sample.loss_mask, sample.versions)
    return sample.index, sample.group_index, sample.status, sample.response, sample.reward, *(array.tobytes() for array in arrays)


def contents(rollouts: list[Rollout]) -> list[tuple]:
    return [content(sample) for rollout in rollouts for sample in samples_of(rollout.groups)]


async def test_equal_seeds_give_equal_rollouts_bit_for_bit_also_across_a_resume(config: Config, engines: EngineGroup):
    whole = build(config, engines)
    first = [await whole.method.rollout(step) for step in range(3)]
    killed = build(config, engines)
    again = [await killed.method.rollout(0)]
    state = again[0].state
    resumed = build(config, engines)
    resumed.method.restore(RolloutState(state.source, state.next_sample_index, state.next_group_index, state.buffer))
    again += [await resumed.method.rollout(step) for step in (1, 2)]
    assert contents(again) == contents(first)
    timing = "rollout/tokens_per_s"
    assert [{**rollout.metrics, timing: 0} for rollout in again] == [{**rollout.metrics, timing: 0} for rollout in first]


async def test_continued_samples_carry_the_log_probabilities_of_a_plain_forward_pass(
    config: Config, engines: EngineGroup, checkpoint: Path
):
    partial = with_rollout(
        config, partial_rollout=True, rollout_batch_size=2, over_sampling_batch_size=6, rollout_max_response_len=120, rollout_concurrency=12
    )
    sampling = build(partial, engines)
    rollouts: list[Rollout] = []
    while len(rollouts) < 3 and not any(rollout.metrics["rollout/num_resumed"] for rollout in rollouts):
        rollouts.append(await sampling.method.rollout(len(rollouts)))  # on a busy machine all responses may end at once
    assert any(rollout.metrics["rollout/num_resumed"] for rollout in rollouts), "something was interrupted and continued"
    model = AutoModelForCausalLM.from_pretrained(checkpoint).float().eval()
    for sample in samples_of([group for rollout in rollouts for group in rollout.kept]):
        assert sample.status in (SampleStatus.COMPLETED, SampleStatus.TRUNCATED)
        with torch.no_grad():
            logits = model(torch.from_numpy(sample.tokens)[None].long()).logits[0]
        expected = logits.log_softmax(-1)[len(sample.prompt_ids) - 1 : -1].gather(-1, torch.from_numpy(sample.response_ids)[:, None].long())
        np.testing.assert_allclose(sample.engine_logprobs, expected[:, 0].numpy(), atol=1e-4)


async def test_evaluations_are_equal_and_do_not_affect_training(config: Config, engines: EngineGroup):
    sampling = build(config, engines)
    tokenizer = AutoTokenizer.from_pretrained(config.model.hf_checkpoint)
    evaluator = build_evaluator(
        config,
        engines=engines,
        tokenizer=tokenizer,
        generate=sampling.generators.evaluation,
        reward=reward_runner(config),
        policy_version=lambda: 0,
    )
    assert evaluator is not None
    first, second = await evaluator.evaluate(0), await evaluator.evaluate(1)
    assert first.metrics == second.metrics
    assert {"eval/held_out/mean@2", "eval/held_out/pass@2"} <= first.metrics.keys()
    assert sampling.source.state(0) == build(config, engines).source.state(0)
