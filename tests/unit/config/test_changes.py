"""Tests of changes of single values: their effect on a config, and how a user would type them."""

import shlex
from typing import Any

import pytest

from fuligo.config import Config
from fuligo.config.changes import apply_changes, change_text
from fuligo.config.command_line import parse
from fuligo.config.findings import Change
from fuligo.config.flags import flags
from fuligo.errors import ConfigError
from tests.unit.config.conftest import config_with

GROUPS = [{"server_groups": [{"worker_type": "prefill", "num_gpus": 64}, {"worker_type": "decode", "num_gpus": 128}]}]
Path = tuple[str | int, ...]


@pytest.mark.parametrize(
    ("path", "value", "text"),
    [
        (("sglang", "dp_size"), 6, "--sglang-dp-size 6"),
        (("router", "policy"), "random", "--router-policy random"),
        (("megatron", "swiglu"), True, "--swiglu"),
        (("optimizer", "use_distributed_optimizer"), False, "--no-use-distributed-optimizer"),
        (("sglang", "enable_dp_attention"), False, "--no-sglang-enable-dp-attention"),
        (("cluster", "rollout_num_gpus"), None, "drop --rollout-num-gpus"),
        (("sglang", "cuda_graph_bs"), [1, 2], "--sglang-cuda-graph-bs 1 2"),
        (("megatron", "pipeline_model_parallel_layout"), "Et*20|t*20L", "--pipeline-model-parallel-layout 'Et*20|t*20L'"),
        (("cluster", "env", "NVSHMEM_DISABLE_NCCL"), "1", '--env \'{"NVSHMEM_DISABLE_NCCL": "1"}\''),
        (("cluster", "env", "NVSHMEM_DISABLE_NCCL"), None, "cluster.env: drop NVSHMEM_DISABLE_NCCL"),
        (("engine", "sglang_config", 0, "server_groups", 1, "num_gpus"), 192, "sglang_config: model default, group 2: num_gpus 192"),
        (
            ("engine", "sglang_config", 0, "server_groups", 0, "overrides", "deepep_mode"),
            "auto",
            "sglang_config: model default, group 1: overrides.deepep_mode auto",
        ),
    ],
)
def test_a_change_is_said_as_it_is_typed(path: Path, value: Any, text: str) -> None:
    config = apply_changes(Config(), [Change(("engine", "sglang_config"), GROUPS)])
    assert change_text(Change(path, value), config) == text


def test_models_are_numbered_where_their_names_are_not_known() -> None:
    change = Change(("engine", "sglang_config", 1, "num_gpus_per_engine"), 8)
    assert change_text(change) == "sglang_config: model 2: num_gpus_per_engine 8"


@pytest.mark.parametrize(
    "change",
    [
        Change(("train", "max_tokens_per_gpu"), 4096),
        Change(("cluster", "colocate"), True),
        Change(("optimizer", "use_distributed_optimizer"), False),
        Change(("rollout", "rollout_stop"), ["a", "b"]),
        Change(("sglang", "mem_fraction_static"), 0.5),
        Change(("megatron", "num_layers"), 4),
        Change(("sglang", "enable_dp_attention"), False),
        Change(("cluster", "env"), {"A": "two words"}),
        Change(("cluster", "env", "A"), "two words"),
    ],
    ids=lambda change: change.path[-1],
)
def test_what_is_typed_is_what_changes(change: Change) -> None:
    typed = shlex.split(change_text(change))
    assert parse(typed).config == apply_changes(Config(), [change])


def test_changes_reach_into_engine_groups_and_leave_the_original_alone() -> None:
    before = config_with(sglang_config=GROUPS)
    after = apply_changes(
        before,
        [
            Change(("engine", "sglang_config", 0, "server_groups", 1, "num_gpus"), 192),
            Change(("engine", "sglang_config", 0, "server_groups", 1, "overrides", "dp_size"), 4),
            Change(("cluster", "env", "A"), "1"),
        ],
    )
    assert after.engine.sglang_config is not None and before.engine.sglang_config is not None
    decode = after.engine.sglang_config[0].server_groups[1]
    assert (decode.num_gpus, decode.overrides.get("dp_size"), after.cluster.env) == (192, 4, {"A": "1"})
    assert before.engine.sglang_config[0].server_groups[1].num_gpus == 128 and before.cluster.env == {}


def test_none_gives_the_default_again_and_takes_a_passed_on_argument_away() -> None:
    config = apply_changes(config_with(lr=1e-5, rollout_num_gpus=4), [Change(("sglang", "dp_size"), 2)])
    changes = [Change(path, None) for path in (("optimizer", "lr"), ("cluster", "rollout_num_gpus"), ("sglang", "dp_size"))]
    assert apply_changes(config, changes) == config_with()


@pytest.mark.parametrize(
    ("path", "value", "text"),
    [
        (("train", "max_tokens_per_gpu"), 0, "train.max_tokens_per_gpu: 0 is not valid"),
        (("sglang", "dp_sise"), 2, "did you mean dp_size"),
        (("sglang", "dp_size"), "many", "dp_size"),
        (("nowhere", "lr"), 1, "no such entry"),
        (("engine", "sglang_config", 3, "num_gpus_per_engine"), 8, "no such entry"),
    ],
)
def test_a_change_that_cannot_be_is_an_error(path: Path, value: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        apply_changes(config_with(sglang_config=GROUPS), [Change(path, value)])


def test_given_options_are_those_that_differ_from_their_default() -> None:
    config = apply_changes(config_with(tensor_model_parallel_size=1, sequence_parallel=True), [Change(("sglang", "dp_size"), 1)])
    assert config.given_options(["tensor_model_parallel_size", "sequence_parallel"]) == ["--sequence-parallel"]
    assert config.given_options([], ["sglang", "router"]) == ["--sglang-dp-size"]
    assert Config().given_options(list(flags()), ["sglang", "router", "megatron"]) == []
