"""Sampling built from flags and hooks, without requests to an engine."""

import json
from pathlib import Path
from typing import Any

import pytest

from fuligo.config import Config
from fuligo.config.groups import ClusterFlags, DataFlags, ModelFlags, RewardFlags, RolloutFlags
from fuligo.engines.group import EngineGroup
from fuligo.errors import HookError, RolloutError
from fuligo.rollout.build import Sampling, _resized_images, build_sampling
from fuligo.rollout.custom_generate import CustomGenerate
from fuligo.rollout.custom_source import CustomSource
from fuligo.rollout.generate import SingleTurn
from fuligo.rollout.rewards import reward_runner
from fuligo.rollout.source import GroupSource
from tests import tiny, tiny_vision
from tests.unit.rollout.scripted import Rows

HOOKS = """
async def generate(args, sample, sampling_params):
    return sample

def rollout(args, rollout_id, data_source, evaluation=False):
    return [[]]

class Source:
    def __init__(self, args):
        self.batch_size = args.rollout_batch_size
    def get_samples(self, num_groups): return []
    def add_samples(self, groups): ...
    def save(self, rollout_id): ...
    def load(self, rollout_id): ...
    def __len__(self): return 0

class Offline(Source):
    def __init__(self, args): open("/no/database")

async def async_filter(args, samples):
    return True
"""


@pytest.fixture
def hooks(tmp_path: Path) -> str:
    file = tmp_path / "my_hooks.py"
    file.write_text(HOOKS)
    return str(file)


async def build(data: dict[str, Any] | None = None, **flags: Any) -> Sampling:
    config = Config(rollout=RolloutFlags(**flags), data=DataFlags(**(data or {})), reward=RewardFlags(rm_type="random"))
    return build_sampling(
        config,
        prompts=Rows(),
        engines=EngineGroup.connect(["http://nowhere"]),
        tokenizer=tiny.tokenizer(),
        reward=reward_runner(config),
        policy_version=lambda: 0,
        num_rollout=3,
    )


async def test_without_hooks_prompts_are_answered_in_one_turn():
    sampling = await build()
    assert isinstance(sampling.source, GroupSource)
    assert isinstance(sampling.generators.evaluation, SingleTurn)


async def test_images_are_resized_for_sglang_only(tmp_path: Path):
    (tmp_path / "preprocessor_config.json").write_text(json.dumps(tiny_vision.PROCESSOR))
    for backend, resizes in (("embedded", False), ("sglang", True)):
        config = Config(
            model=ModelFlags(hf_checkpoint=str(tmp_path)),
            cluster=ClusterFlags(rollout_backend=backend),
            data=DataFlags(multimodal_keys={"image": "images"}),
        )
        assert (_resized_images(config) is not None) == resizes


async def test_a_data_source_that_cannot_be_made_is_named(hooks: str):
    with pytest.raises(HookError, match=r":Offline: the constructor raised FileNotFoundError: .* \(my_hooks\.py:18\)"):
        await build({"data_source_path": f"{hooks}:Offline"})


async def test_hooks_take_their_places(hooks: str):
    sampling = await build({"data_source_path": f"{hooks}:Source"}, custom_generate_function_path=f"{hooks}:generate")
    assert isinstance(sampling.source, CustomSource)
    assert isinstance(sampling.generators.evaluation, CustomGenerate)


async def test_a_whole_rollout_of_the_user_s_own(hooks: str):
    sampling = await build(rollout_function_path=f"{hooks}:rollout")
    with pytest.raises(RolloutError, match="--rollout-function-path must return"):
        await sampling.method.rollout(0)


async def test_a_filter_that_cannot_be_called_as_one_is_refused(hooks: str):
    with pytest.raises(HookError, match="--dynamic-sampling-filter-path"):
        await build(dynamic_sampling_filter_path=f"{hooks}:async_filter")
