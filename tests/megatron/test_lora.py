"""LoRA on the Megatron trainer: gradients, log-probabilities and files equal PEFT's in every layout."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from transformers import AutoModelForCausalLM

from fuligo.checkpoint.location import weights_of
from fuligo.config.groups import OptimizerFlags
from fuligo.errors import CheckpointError, ConfigError
from fuligo.formats.adapter_config import ADAPTER, AdapterConfig
from fuligo.formats.dist_tensors import DistributedTensors
from fuligo.formats.hugging_face import read_config_json
from fuligo.models.adapter_names import AdapterNames
from fuligo.models.registry import names_of
from fuligo.trainer.megatron_backend.settings import MegatronTrainerSettings
from fuligo.trainer.ranks.settings import LoraSettings
from fuligo.trainer.ranks.world import World
from fuligo.types import TrainSample
from tests import tiny, train_batches
from tests.megatron.adapters import (
    ADAM,
    ATTENTION,
    FULL,
    LATENT,
    LAYOUTS,
    LENGTHS,
    MLP,
    Found,
    Start,
    assert_as_peft,
    by_megatron,
    by_peft,
    run_course,
    start,
)
from tests.megatron.policies import recomputing
from tests.megatron.ranks import RankPool

SLOW = pytest.mark.slow


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Start:
    return start(tmp_path_factory.mktemp("dense"), "qwen3", ATTENTION + MLP, layers=2)


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Start:
    """Return a model with a layer for each of two chunks of two stages."""
    return start(tmp_path_factory.mktemp("deep"), "qwen3", ATTENTION + MLP, layers=4)


@pytest.fixture(scope="module")
def samples() -> list[TrainSample]:
    return train_batches.samples(LENGTHS)


@pytest.fixture(scope="module")
def of_dense(dense: Start, samples: list[TrainSample]) -> Found:
    return by_peft(dense, samples)


@pytest.fixture(scope="module")
def of_deep(deep: Start, samples: list[TrainSample]) -> Found:
    return by_peft(deep, samples)


@pytest.mark.parametrize(
    ("layout", "overrides"),
    [
        pytest.param("one", {}, marks=SLOW),  # what the layouts below share
        pytest.param("tp2", {}, marks=SLOW),  # test_families_are_adapted_as_by_peft[qwen2]
        pytest.param("tp2 sp", {"parallel": FULL}, marks=SLOW),  # "tp2 sp pp2" below
        ("pp2 vpp2", {}),
        ("cp2", {"parallel": recomputing("selective", modules=("mlp",))}),
        ("dp2", {}),
        ("tp2 sp pp2", {"parallel": FULL}),
    ],
)
def test_gradients_and_log_probabilities_are_those_of_peft(
    pool: RankPool,
    dense: Start,
    of_dense: Found,
    deep: Start,
    of_deep: Found,
    samples: list[TrainSample],
    layout: str,
    overrides: dict,
) -> None:
    given, expected = (deep, of_deep) if "vpp2" in layout else (dense, of_dense)
    got, *_ = pool.run(LAYOUTS[layout].num_ranks, by_megatron, given.settings(layout, **overrides), samples)
    assert_as_peft(got, expected)


@pytest.mark.parametrize(
    ("family", "targets", "shape", "layout", "overrides"),
    [
        ("qwen2", ["k_proj", "o_proj"], {}, "tp2", {}),  # biases; a part of a fused matrix; tied embeddings below
        (
            "glm4",
            ["gate_up_proj", "down_proj", "q_proj"],
            {"tie_word_embeddings": True},
            "pp2",
            {},
        ),  # gate and up are one matrix in PEFT, too
        # test_lora_experts.py adapts the attention of this family beside its experts
        pytest.param("qwen3_moe", ATTENTION, {}, "tp2 sp ep2", {"dispatcher": "alltoall"}, marks=SLOW),
        ("deepseek_v3", LATENT, {}, "tp2 sp ep2", {"parallel": FULL}),
        ("deepseek_v3", ["q_proj", *LATENT[2:]], {"q_lora_rank": None}, "cp2", {}),
        ("glm4_moe_lite", LATENT, {"layers": 4, "rms_norm_eps": 1e-6}, "pp2 vpp2", {}),  # the latents' in transformers
    ],
)
def test_families_are_adapted_as_by_peft(
    pool: RankPool, tmp_path: Path, family: str, targets: list[str], shape: dict, layout: str, overrides: dict
) -> None:
    given, samples = start(tmp_path, family, targets, **shape), train_batches.samples(LENGTHS)
    got, *_ = pool.run(LAYOUTS[layout].num_ranks, by_megatron, given.settings(layout, **overrides), samples)
    assert_as_peft(got, by_peft(given, samples))


RANDOM = LoraSettings(AdapterConfig(4, 8.0, ("down_proj", "q_proj", "up_proj", "v_proj"), rank_stabilised=True))
DISTRIBUTED = {"lora": RANDOM, "optimizer": ADAM, "optimizer_place": OptimizerFlags()}


@pytest.mark.parametrize(
    ("saved", "loaded", "beside"),
    [
        ("tp2 sp", "pp2", True),
        ("pp2 vpp2", "dp2", False),
        pytest.param("dp2", "tp2", False, marks=SLOW),  # test_checkpoint.py saves and loads both layouts by the same files
    ],
)
def test_the_next_steps_are_the_same_under_another_layout(
    pool: RankPool, dense: Start, deep: Start, samples: list[TrainSample], tmp_path: Path, saved: str, loaded: str, beside: bool
) -> None:
    """A starts with the same values in every layout; the checkpoint contains only the adapter and its optimizer state."""
    given = deep if "vpp2" in saved else dense
    run_course(pool, given.settings(saved, **DISTRIBUTED), samples, save=tmp_path, beside=beside)
    resumed = run_course(pool, given.settings(loaded, **DISTRIBUTED), samples, load=tmp_path)
    straight = run_course(pool, given.settings("one", **DISTRIBUTED), samples, num_rollouts=2)
    for name, weight in straight.merged.items():
        torch.testing.assert_close(resumed.merged[name], weight, atol=2e-6, rtol=0, msg=name)
    names = DistributedTensors(tmp_path).shapes
    assert names and all(".adapter." in name for name in names)


@pytest.mark.parametrize("precision", [pytest.param("fp32", marks=SLOW), "bf16"])  # bf16 has master weights in addition
def test_a_resume_under_the_same_layout_is_exact(
    pool: RankPool, dense: Start, samples: list[TrainSample], tmp_path: Path, precision: str
) -> None:
    settings = dense.settings("tp2 sp", **DISTRIBUTED, precision=precision)
    run_course(pool, settings, samples, save=tmp_path)
    resumed = run_course(pool, settings, samples, load=tmp_path)
    uninterrupted = run_course(pool, settings, samples, num_rollouts=2)
    assert resumed.metrics == uninterrupted.metrics
    assert all(torch.equal(weight, resumed.merged[name]) for name, weight in uninterrupted.merged.items())


def test_peft_reads_what_is_saved_and_merges_it_likewise(pool: RankPool, dense: Start, samples: list[TrainSample], tmp_path: Path) -> None:
    trained = run_course(pool, dense.settings("tp2 sp pp2", **DISTRIBUTED), samples, save=tmp_path)
    assert weights_of(tmp_path) == tmp_path / ADAPTER
    assert AdapterConfig.read(tmp_path / ADAPTER) == RANDOM.adapter
    theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(dense.checkpoint), tmp_path / ADAPTER).merge_and_unload()
    state = theirs.state_dict()
    for name, tensor in trained.merged.items():
        torch.testing.assert_close(tensor, state[name], rtol=1e-6, atol=1e-7, msg=name)
    unchanged = AutoModelForCausalLM.from_pretrained(dense.checkpoint).state_dict()
    changed = {name.split(".")[-2] for name, tensor in trained.merged.items() if not torch.equal(tensor, unchanged[name])}
    assert changed == set(RANDOM.adapter.target_modules)


def test_what_rounding_leaves_of_a_merge_is_counted_once_in_every_layout(pool: RankPool, dense: Start, samples: list[TrainSample]) -> None:
    in_bf16 = {"sync_dtype": "bf16"}
    one, two = (run_course(pool, dense.settings(layout, **in_bf16), samples) for layout in ("one", "tp2 sp"))
    every = AdapterConfig.read(dense.adapter)
    config = read_config_json(dense.checkpoint)
    whole = sum(matrix.rows * matrix.weight.shape[1] for matrix in AdapterNames.of(names_of(config), every).matrices)
    assert one.rounding.num_elements == two.rounding.num_elements == whole
    assert one.rounding.num_changed == pytest.approx(two.rounding.num_changed, rel=1e-3)


def refusal(world: World, settings: MegatronTrainerSettings, load: Path) -> str:
    from fuligo.trainer.megatron_backend.worker import MegatronRankWorker

    with pytest.raises((CheckpointError, ConfigError)) as failure:
        MegatronRankWorker(settings, world).restore(load)
    return str(failure.value)


def test_what_does_not_fit_is_refused(pool: RankPool, dense: Start, samples: list[TrainSample], tmp_path: Path) -> None:
    settings = dense.settings("one", **DISTRIBUTED)
    run_course(pool, settings, samples, save=tmp_path / "saved")
    other = tiny.save_checkpoint(tmp_path / "other", "qwen3", seed=7)
    wider = LoraSettings(AdapterConfig(5, 8.0, RANDOM.adapter.target_modules))
    stronger = replace(RANDOM, adapter=replace(RANDOM.adapter, alpha=16.0))
    for changed, message in (
        (replace(settings, initial_weights=other), "trained on weights that differ"),
        (replace(settings, lora=None), "it holds an adapter"),
        (replace(settings, lora=wider), "but has the shape [5, "),
        (replace(settings, lora=stronger), "with the scale 4, but this run has 8; use --lora-alpha 8 with --lora-use-rslora"),
        (replace(settings, lora=LoraSettings(AdapterConfig(4, 8.0, ("q_prj",)))), "did you mean q_proj?"),
        (replace(settings, lora=replace(RANDOM, initial_adapter=dense.adapter)), "use the model that the adapter was trained on"),
    ):
        (text,) = pool.run(1, refusal, changed, tmp_path / "saved")
        assert message in text


def test_a_stage_without_adapted_layers_takes_part(pool: RankPool, dense: Start, samples: list[TrainSample], tmp_path: Path) -> None:
    lora = LoraSettings(AdapterConfig(4, 8.0, ("layers.1.self_attn.q_proj",)))
    settings = {**DISTRIBUTED, "lora": lora}
    two = run_course(pool, dense.settings("pp2", **settings), samples, save=tmp_path)
    one = run_course(pool, dense.settings("one", **settings), samples)
    assert two.metrics["train/grad_norm"] == pytest.approx(one.metrics["train/grad_norm"], rel=1e-4)
    for name, weight in one.merged.items():
        torch.testing.assert_close(two.merged[name], weight, atol=2e-6, rtol=0, msg=name)
    run_course(pool, dense.settings("pp2", **settings), samples, load=tmp_path)
