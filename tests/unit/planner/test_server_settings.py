"""Defaults of SGLang: recorded results of `ServerArgs._handle_gpu_memory_settings` (0.5.15.post1) for these arguments."""

from dataclasses import replace
from typing import Any

import pytest

from fuligo.config.passthrough import SglangArguments
from fuligo.config.server_groups import WorkerType
from fuligo.config.topology import EngineGroupSpec
from fuligo.planner.gpus import MIB, gpu
from fuligo.planner.server_settings import server_settings
from tests.unit.planner.subjects import facts

GROUPED, LATENT = "glm4-9b", "glm4.7-flash"


def spec_of(num_gpus: int, worker_type: WorkerType = "regular", **arguments: Any) -> EngineGroupSpec:
    return EngineGroupSpec("default", None, worker_type, num_gpus, num_gpus, SglangArguments(arguments), True)


def attention_of(dp_size: int) -> dict[str, Any]:
    return {"enable_dp_attention": True, "dp_size": dp_size}


@pytest.mark.parametrize(
    "memory_mib, model, spec, fraction, batch, num_prefill_graphs",
    [
        (81559, GROUPED, spec_of(1), 0.83, 256, 58),
        (81559, GROUPED, spec_of(2), 0.828, 256, 58),
        (81559, GROUPED, spec_of(32, **attention_of(4)), 0.662, 512, 58),
        (24564, GROUPED, spec_of(1), 0.833, 24, 42),
        (46068, GROUPED, spec_of(4), 0.829, 160, 50),
        (143771, GROUPED, spec_of(4), 0.897, 512, 58),
        (81559, LATENT, spec_of(8, **attention_of(8)), 0.573, 512, 42),
        (81559, LATENT, spec_of(64, "prefill", moe_a2a_backend="deepep", **attention_of(64)), 0.724, 0, 42),
        (81559, LATENT, spec_of(64, "decode", moe_a2a_backend="deepep", cuda_graph_max_bs_decode=12, **attention_of(64)), 0.802, 12, 0),
        (183359, LATENT, spec_of(1), 0.849, 512, 42),
    ],
)
def test_defaults_are_sglangs(
    memory_mib: int, model: str, spec: EngineGroupSpec, fraction: float, batch: int, num_prefill_graphs: int
) -> None:
    settings = server_settings(spec, facts(model), replace(gpu("h100-80"), memory_bytes=memory_mib * MIB))
    assert settings.mem_fraction_static == fraction
    assert settings.graph_batch == batch
    if num_prefill_graphs and model == GROUPED:
        assert settings.num_prefill_graphs == num_prefill_graphs


def test_given_values_win() -> None:
    spec = spec_of(8, mem_fraction_static=0.7, cuda_graph_bs_decode=[1, 2, 48], chunked_prefill_size=4096, **attention_of(8))
    settings = server_settings(spec, facts(LATENT), gpu("h100-80"))
    assert (settings.mem_fraction_static, settings.graph_batch) == (0.7, 48)
    assert settings.chunked_prefill_tokens == 512, "a chunk is shared by the data-parallel ranks of attention"


@pytest.mark.parametrize(("arguments", "requests"), [({}, None), ({"speculative_algorithm": "EAGLE"}, 48)])
def test_a_server_that_drafts_runs_48_requests_unless_told_otherwise(arguments: dict[str, Any], requests: int | None) -> None:
    settings = server_settings(spec_of(1, **arguments), facts(GROUPED), gpu("h100-80"))
    assert settings.max_running_requests == requests
    settings = server_settings(spec_of(1, max_running_requests=256, **arguments), facts(GROUPED), gpu("h100-80"))
    assert settings.max_running_requests == 256


@pytest.mark.parametrize(
    ("model", "tree", "depth", "num_tokens"),
    [
        ("qwen3-4b", {}, 0, 1),
        ("qwen3-4b", {"algorithm": "EAGLE"}, 3, 4),
        ("llama", {"algorithm": "EAGLE3"}, 5, 8),
        ("llama", {"algorithm": "STANDALONE"}, 3, 4),
        ("llama", {"algorithm": "EAGLE", "num_steps": 2, "eagle_topk": 1, "num_draft_tokens": 5}, 2, 3),
        ("llama", {"algorithm": "EAGLE", "num_steps": 2, "eagle_topk": 2, "num_draft_tokens": 5}, 2, 5),
        ("qwen3-4b", {"algorithm": "NGRAM"}, 1, 12),
        ("qwen3-4b", {"algorithm": "NGRAM", "num_draft_tokens": 40}, 4, 40),
        ("qwen3-4b", {"algorithm": "DFLASH"}, 15, 16),
    ],
)
def test_drafts_have_sglangs_depth_and_size(model: str, tree: dict[str, Any], depth: int, num_tokens: int) -> None:
    shapes = replace(facts("qwen3-4b"), model_type="llama") if model == "llama" else facts(model)
    settings = server_settings(spec_of(1, **{f"speculative_{name}": value for name, value in tree.items()}), shapes, gpu("h100-80"))
    assert (settings.draft_steps, settings.draft_tokens, settings.accepted_drafts) == (depth, num_tokens, depth)


def test_no_more_drafts_are_accepted_than_are_verified() -> None:
    tree = {"speculative_algorithm": "NGRAM", "speculative_num_steps": 3, "speculative_num_draft_tokens": 2}
    assert server_settings(spec_of(1, **tree), facts("qwen3-4b"), gpu("h100-80")).accepted_drafts == 1


@pytest.mark.parametrize(
    ("arguments", "batch", "has_prefill_graphs"),
    [
        ({"disable_cuda_graph": True}, 0, False),
        ({"disable_decode_cuda_graph": True}, 0, True),
        ({"cuda_graph_backend_decode": "disabled", "cuda_graph_max_bs_decode": 64}, 0, True),
        ({"disable_cuda_graph": True, "cuda_graph_backend_decode": "full"}, 256, False),
        ({"disable_decode_cuda_graph": True, "cuda_graph_config": {"decode": {"backend": "full", "max_bs": 96}}}, 96, True),
        ({"cuda_graph_config": {"decode": {"backend": "disabled"}}, "cuda_graph_backend_decode": "full"}, 0, True),
        ({"cuda_graph_config": {"decode": {"bs": [1, 8, 40]}}, "cuda_graph_max_bs_decode": 64}, 40, True),
        ({"cuda_graph_config": {"prefill": {"backend": "disabled"}}, "cuda_graph_bs_decode": [2, 4]}, 4, False),
    ],
)
def test_graphs_follow_sglangs_order_of_precedence(arguments: dict[str, Any], batch: int, has_prefill_graphs: bool) -> None:
    settings = server_settings(spec_of(1, **arguments), facts(GROUPED), gpu("h100-80"))
    assert settings.graph_batch == batch
    assert (settings.num_prefill_graphs > 0) is has_prefill_graphs
