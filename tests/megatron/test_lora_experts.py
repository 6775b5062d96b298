"""LoRA on MoE experts in the Megatron trainer: gradients, log-probabilities and files equal PEFT's in every layout."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from peft import PeftModel
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

from fuligo.config.groups import OptimizerFlags
from fuligo.errors import ConfigError
from fuligo.formats.adapter_config import ADAPTER, EXPERT_PARAMETERS, AdapterConfig
from fuligo.formats.dist_tensors import DistributedTensors
from fuligo.trainer.ranks.settings import LoraSettings
from fuligo.trainer.ranks.world import World
from fuligo.types import TrainSample
from tests import train_batches
from tests.megatron.adapters import (
    ADAM,
    FULL,
    LATENT,
    LAYOUTS,
    LENGTHS,
    Found,
    Start,
    assert_as_peft,
    by_megatron,
    by_peft,
    run_course,
    start,
)
from tests.megatron.ranks import RankPool

SLOW = pytest.mark.slow
OTHER_LAYERS = ["mlp.gate_proj", "mlp.down_proj", "shared_experts.gate_proj", "shared_experts.up_proj", "shared_experts.down_proj"]
"""Layers with names of experts' matrices, which PEFT adapts as parameters."""


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> Start:
    return start(tmp_path_factory.mktemp("mixture"), "qwen3_moe", ["q_proj", "o_proj"], parameters=EXPERT_PARAMETERS, layers=2)


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Start:
    """Return a model with a layer for each of two chunks of two stages."""
    return start(tmp_path_factory.mktemp("deep"), "qwen3_moe", ["q_proj", "o_proj"], parameters=EXPERT_PARAMETERS, layers=4)


@pytest.fixture(scope="module")
def samples() -> list[TrainSample]:
    return train_batches.samples(LENGTHS)


@pytest.fixture(scope="module")
def of_mixture(mixture: Start, samples: list[TrainSample]) -> Found:
    return by_peft(mixture, samples)


@pytest.fixture(scope="module")
def of_deep(deep: Start, samples: list[TrainSample]) -> Found:
    return by_peft(deep, samples)


@pytest.mark.parametrize(
    ("layout", "overrides"),
    [
        pytest.param("one", {"parallel": FULL}, marks=SLOW),  # what the layouts below share; "tp2 sp ep2" recomputes, too
        ("tp2 sp", {}),  # TP ranks have copies of the experts
        ("pp2 vpp2", {}),
        ("cp2", {}),
        pytest.param("dp2", {}, marks=SLOW),  # test_lora.py sums the gradients of an adapter over replicas
        pytest.param("ep2", {"dispatcher": "alltoall"}, marks=SLOW),  # "pp2 ep2" below
        pytest.param("tp2 sp etp2", {"dispatcher": "alltoall"}, marks=SLOW),  # "tp2 sp ep2 etp2" below
        ("tp2 sp ep2", {"parallel": FULL}),
        ("tp2 sp ep2 etp2", {}),
        ("pp2 ep2", {"dispatcher": "alltoall"}),
    ],
)
def test_gradients_and_log_probabilities_are_those_of_peft(
    pool: RankPool,
    mixture: Start,
    of_mixture: Found,
    deep: Start,
    of_deep: Found,
    samples: list[TrainSample],
    layout: str,
    overrides: dict,
) -> None:
    given, expected = (deep, of_deep) if "vpp2" in layout else (mixture, of_mixture)
    got, *_ = pool.run(LAYOUTS[layout].num_ranks, by_megatron, given.settings(layout, **overrides), samples)
    assert_as_peft(got, expected)


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        pytest.param("deepseek_v3", "tp2 sp ep2", marks=SLOW),  # glm4_moe has such layers; test_lora.py adapts the latents
        ("glm4_moe", "pp2 ep2"),
    ],
)
def test_families_with_dense_layers_and_shared_experts_are_adapted_as_by_peft(
    pool: RankPool, tmp_path: Path, family: str, layout: str
) -> None:
    targets = LATENT if family == "deepseek_v3" else ["v_proj"]
    parameters = [*EXPERT_PARAMETERS, *(f"{layer}.weight" for layer in OTHER_LAYERS)]
    given, samples = start(tmp_path, family, targets, parameters=parameters), train_batches.samples(LENGTHS)
    got, *_ = pool.run(LAYOUTS[layout].num_ranks, by_megatron, given.settings(layout), samples)
    assert_as_peft(got, by_peft(given, samples))


RANDOM = LoraSettings(AdapterConfig(4, 8.0, ("q_proj", "v_proj"), rank_stabilised=True, adapts_experts=True))
DISTRIBUTED = {"lora": RANDOM, "optimizer": ADAM, "optimizer_place": OptimizerFlags()}


@pytest.mark.parametrize(
    ("saved", "loaded", "beside"),
    [
        ("tp2 sp ep2 etp2", "one", False),
        ("pp2 ep2", "tp2 sp", True),
        # the two above save and load split and whole experts
        pytest.param("one", "tp2 sp etp2", False, marks=SLOW),
        pytest.param("tp2 sp etp2", "ep2", False, marks=SLOW),
    ],
)
def test_the_next_steps_are_the_same_under_another_layout(
    pool: RankPool, mixture: Start, samples: list[TrainSample], tmp_path: Path, saved: str, loaded: str, beside: bool
) -> None:
    """A starts with the same values in every layout; clipped steps agree only if the gradient norm counts every element once."""
    run_course(pool, mixture.settings(saved, **DISTRIBUTED), samples, save=tmp_path, beside=beside)
    resumed = run_course(pool, mixture.settings(loaded, **DISTRIBUTED), samples, load=tmp_path)
    straight = run_course(pool, mixture.settings("one", **DISTRIBUTED), samples, num_rollouts=2)
    assert straight.metrics["train/grad_norm"] > ADAM.clip_grad
    assert resumed.metrics["train/grad_norm"] == pytest.approx(straight.metrics["train/grad_norm"], rel=1e-4)
    for name, weight in straight.merged.items():
        torch.testing.assert_close(resumed.merged[name], weight, atol=2e-6, rtol=0, msg=name)
    names = DistributedTensors(tmp_path).shapes
    assert names and all(".adapter." in name for name in names)


@pytest.mark.parametrize("precision", [pytest.param("fp32", marks=SLOW), "bf16"])  # bf16 has master weights in addition
def test_a_resume_under_the_same_layout_is_exact(
    pool: RankPool, mixture: Start, samples: list[TrainSample], tmp_path: Path, precision: str
) -> None:
    settings = mixture.settings("tp2 sp etp2", **DISTRIBUTED, precision=precision)
    run_course(pool, settings, samples, save=tmp_path)
    resumed = run_course(pool, settings, samples, load=tmp_path)
    uninterrupted = run_course(pool, settings, samples, num_rollouts=2)
    assert resumed.metrics == uninterrupted.metrics
    assert all(torch.equal(weight, resumed.merged[name]) for name, weight in uninterrupted.merged.items())


def test_peft_reads_what_is_saved_and_merges_it_likewise(
    pool: RankPool, mixture: Start, samples: list[TrainSample], tmp_path: Path
) -> None:
    trained = run_course(pool, mixture.settings("tp2 sp ep2 etp2", **DISTRIBUTED), samples, save=tmp_path)
    assert AdapterConfig.read(tmp_path / ADAPTER) == RANDOM.adapter
    base = AutoModelForCausalLM.from_pretrained(mixture.checkpoint, experts_implementation="eager")
    theirs = PeftModel.from_pretrained(base, tmp_path / ADAPTER).merge_and_unload().state_dict()
    unchanged = AutoModelForCausalLM.from_pretrained(mixture.checkpoint).state_dict()
    for expert in range(8):
        place = "model.layers.1.mlp.experts"
        gate_up = torch.cat([trained.merged[f"{place}.{expert}.{kind}_proj.weight"] for kind in ("gate", "up")])
        down = trained.merged[f"{place}.{expert}.down_proj.weight"]
        for matrix, tensor in (("gate_up_proj", gate_up), ("down_proj", down)):
            torch.testing.assert_close(tensor, theirs[f"{place}.{matrix}"][expert], rtol=1e-6, atol=1e-7)
            assert not torch.equal(tensor, unchanged[f"{place}.{matrix}"][expert])


def test_what_rounding_leaves_of_a_merge_is_counted_once_in_every_layout(
    pool: RankPool, mixture: Start, samples: list[TrainSample]
) -> None:
    layouts = ("one", "tp2 sp", "tp2 sp etp2", "pp2 ep2")
    counts = [run_course(pool, mixture.settings(layout, sync_dtype="bf16"), samples).rounding for layout in layouts]
    attention, experts = 2 * 64 * 64, 8 * 3 * 32 * 64  # without keys and values, which Megatron joins with queries
    assert {count.num_elements for count in counts} == {2 * (attention + experts)}
    for count in counts[1:]:
        assert count.num_changed == pytest.approx(counts[0].num_changed, rel=1e-3)


class GroupedLinear(nn.Module):
    """Linear layer of all experts with the interface of TransformerEngine's, which needs a GPU."""

    def __init__(self, weights: list[Tensor]) -> None:
        super().__init__()
        for number, weight in enumerate(weights):
            self.register_parameter(f"weight{number}", nn.Parameter(weight, requires_grad=False))

    def forward(self, inputs: Tensor, tokens_per_expert: list[int]) -> tuple[Tensor, None]:
        parts = inputs.split(tokens_per_expert)
        return torch.cat([F.linear(part, self.get_parameter(f"weight{number}")) for number, part in enumerate(parts)]), None


class GroupedExperts(nn.Module):
    """Experts with two such layers, like Megatron's `TEGroupedMLP`."""

    def __init__(self, local_experts: list[nn.Module]) -> None:
        super().__init__()
        self.num_local_experts = len(local_experts)
        for linear in ("linear_fc1", "linear_fc2"):
            self.add_module(linear, GroupedLinear([expert.get_submodule(linear).weight.detach() for expert in local_experts]))

    def forward(self, inputs: Tensor, tokens_per_expert: Tensor, probabilities: Tensor) -> Tensor:
        counts = tokens_per_expert.tolist()
        gate, up = self.linear_fc1(inputs, counts)[0].chunk(2, dim=-1)
        return self.linear_fc2(F.silu(gate) * up * probabilities[:, None], counts)[0]


def grouped_against_one_by_one(world: World, settings: object) -> list[tuple[Tensor, Tensor]]:
    """Return outputs and gradients of an adapted layer of experts: with grouped linear layers, and with those of each expert."""
    from fuligo.trainer.megatron_backend.experts_lora import ExpertsAdapter, adapt_experts
    from fuligo.trainer.megatron_backend.weights.local import expert_layers
    from fuligo.trainer.megatron_backend.worker import MegatronRankWorker

    worker = MegatronRankWorker(settings, world)
    _, experts = next(iter(expert_layers(worker.chunks)))
    names = worker._saved_adapter.names
    matrices = next(iter(names.by_experts.values()))
    grouped = GroupedExperts(list(experts.local_experts))
    adapter = ExpertsAdapter(len(experts.local_experts), matrices, names, torch.device("cpu"))
    adapter.load_state_dict(experts.adapter.state_dict())
    adapt_experts(grouped, adapter, matrices)
    torch.manual_seed(0)
    counts = torch.tensor([3, 0, 5, 1, 0, 0, 7, 2])
    inputs = torch.randn(int(counts.sum()), 64, requires_grad=True)
    probabilities = torch.rand(len(inputs))
    found = []
    for module, parameters in ((experts, experts.adapter), (grouped, adapter)):
        output = module(inputs, counts, probabilities)
        output = output[0] if isinstance(output, tuple) else output
        found.append([output, *torch.autograd.grad(output.square().sum(), [inputs, *parameters.parameters()])])
    return [(one.detach(), all_.detach()) for one, all_ in zip(*found, strict=True)]


def test_grouped_linear_layers_are_adapted_like_those_of_each_expert(pool: RankPool, mixture: Start) -> None:
    (pairs,) = pool.run(1, grouped_against_one_by_one, mixture.settings("one"))
    assert len(pairs) == 2 + 4
    for one_by_one, grouped in pairs:
        assert one_by_one.any()
        torch.testing.assert_close(grouped, one_by_one, rtol=1e-5, atol=1e-6)


def refusal(world: World, settings: object) -> str:
    from fuligo.trainer.megatron_backend.worker import MegatronRankWorker

    with pytest.raises(ConfigError) as failure:
        MegatronRankWorker(settings, world)
    return str(failure.value)


def test_a_model_without_experts_is_refused(pool: RankPool, tmp_path: Path) -> None:
    dense = start(tmp_path, "qwen3", ["q_proj"])
    lora = replace(RANDOM, adapter=replace(RANDOM.adapter, target_modules=("q_proj",)))
    (text,) = pool.run(1, refusal, dense.settings("one", lora=lora))
    assert "qwen3 has no experts to adapt" in text
