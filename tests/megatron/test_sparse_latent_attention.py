"""Sparse latent attention on Megatron-Core: log-probabilities and gradients against transformers, with and without a shared choice."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from fuligo.config.groups import OptimizerFlags, ParallelFlags
from fuligo.errors import ConfigError
from fuligo.formats.hugging_face import read_config_json
from fuligo.layout.megatron import Layout
from fuligo.models.registry import names_of
from fuligo.trainer.megatron_backend.model_config import transformer_config
from fuligo.trainer.megatron_backend.packed import PackedRow, pack_row
from fuligo.trainer.megatron_backend.settings import MegatronTrainerSettings
from fuligo.trainer.objective import LossSettings
from fuligo.trainer.packing import Capacity
from fuligo.trainer.ranks.world import World
from fuligo.trainer.step import StepSamples
from fuligo.types import TrainBatch
from tests import shares, train_batches
from tests.megatron.checkpoints import save_uneven
from tests.megatron.gradients import assert_gradients_agree, megatron_gradients
from tests.megatron.policies import megatron_logprobs, mtp_flags, recomputing, settings_of, transformers_logprobs
from tests.megatron.prediction_fixture import PredictingModel
from tests.megatron.ranks import RankPool
from tests.megatron.test_latent_attention import YARN

LENGTHS = [(4, 9), (1, 3), (30, 12), (2, 1), (5, 14), (3, 9)]
"""(prompt, response) lengths; most have more tokens than a query chooses."""
TYPES = ["full", "shared", "shared", "full"]
MODELS: dict[str, dict[str, Any]] = {
    "glm_moe_dsa": {"layers": 4, "indexer_types": TYPES},
    "deepseek_v32": {"layers": 3, "rope_parameters": YARN},
}
LOSS = LossSettings(loss_type="sft_loss")
SCALE = 0.3
SLOW = pytest.mark.slow

LAYOUTS = {
    "one": Layout(),
    "tp2 sp": Layout(tp=2, sequence_parallel=True, num_ranks=2),
    "cp2": Layout(cp=2, num_ranks=2),
    "ep2": Layout(ep=2, num_ranks=2),
    "pp2 uneven": Layout(pp=2, num_layers_first_stage=3, num_layers_last_stage=1, num_ranks=2),
    "pp2 within": Layout(pp=2, num_layers_first_stage=1, num_layers_last_stage=2, num_ranks=2),
    "tp2 sp cp2": Layout(tp=2, cp=2, sequence_parallel=True, num_ranks=4),
    "cp2 ep2": Layout(cp=2, ep=2, num_ranks=2),
    "tp2 sp pp2": Layout(tp=2, pp=2, num_layers_first_stage=3, num_layers_last_stage=1, sequence_parallel=True, num_ranks=4),
}


@dataclass(slots=True)
class Reference:
    """Model in plain torch, the gradients of its loss, its checkpoint, and one without its MTP layer."""

    gradients: dict[str, Tensor]
    directory: Path
    without_prediction: Path


@pytest.fixture(scope="module")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return made("glm_moe_dsa", tmp_path_factory)


@pytest.fixture(scope="module")
def of_deepseek(tmp_path_factory: pytest.TempPathFactory) -> Reference:
    return made("deepseek_v32", tmp_path_factory)


def made(family: str, tmp_path_factory: pytest.TempPathFactory) -> Reference:
    model = PredictingModel.random(family, **MODELS[family])
    directory = model.save(tmp_path_factory.mktemp("predicting"))
    model.trunk.save_pretrained(without := tmp_path_factory.mktemp("plain"))
    step = StepSamples.of(batch(), 0, LOSS)
    for sample, weights in zip(step.samples, step.weights):
        own, further = (-(torch.from_numpy(weights) * found).sum() for found in model.logprobs(sample))
        (own + SCALE * further).backward()
    choosing = {
        name: torch.zeros_like(tensor) for name, tensor in load_file(directory / "model.safetensors").items() if ".indexer." in name
    }
    return Reference(model.gradients() | choosing, directory, without)


def batch() -> TrainBatch:
    return train_batches.batch(train_batches.samples(LENGTHS))


def training_settings(reference: Reference, layout: Layout, **overrides: Any) -> MegatronTrainerSettings:
    given = {
        "capacity": Capacity(max_tokens=34),
        "loss": LOSS,
        "dispatcher": "alltoall",
        "optimizer_place": OptimizerFlags(use_distributed_optimizer=False),
        "mtp": mtp_flags(1, trained=True, loss_scale=SCALE, joint=True),
    }
    return settings_of(reference.directory, layout, **{**given, **overrides})


@pytest.mark.parametrize(
    "layout",
    [
        *("tp2 sp", "cp2", "pp2 uneven"),
        *(pytest.param(layout, marks=SLOW) for layout in ("one", "ep2", "tp2 sp cp2", "cp2 ep2", "tp2 sp pp2")),
    ],
)
def test_gradients_are_those_of_plain_torch(pool: RankPool, reference: Reference, layout: str) -> None:
    """The model has an MTP layer; indexers get no gradients."""
    got, *_ = pool.run(LAYOUTS[layout].num_ranks, megatron_gradients, training_settings(reference, LAYOUTS[layout]), batch())
    assert_gradients_agree(got, reference.gradients)


@pytest.mark.parametrize("layout", ["pp2 within", "tp2 sp", *(pytest.param(layout, marks=SLOW) for layout in ("one", "cp2", "ep2"))])
def test_deepseeks_gradients_are_those_of_plain_torch(pool: RankPool, of_deepseek: Reference, layout: str) -> None:
    """Every layer chooses tokens, so a stage may start at any layer; the rotary embedding uses YaRN, and experts are in groups."""
    got, *_ = pool.run(LAYOUTS[layout].num_ranks, megatron_gradients, training_settings(of_deepseek, LAYOUTS[layout]), batch())
    assert_gradients_agree(got, of_deepseek.gradients)


@pytest.mark.parametrize("layout", ["cp2", *(pytest.param(layout, marks=SLOW) for layout in ("one", "pp2 within", "tp2 sp cp2"))])
def test_deepseeks_logprobs_are_those_of_transformers(pool: RankPool, of_deepseek: Reference, layout: str) -> None:
    assert_logprobs(pool, of_deepseek.without_prediction, LAYOUTS[layout], oracle=of_deepseek.without_prediction)


@pytest.mark.parametrize(
    ("layout", "recomputation"),
    [
        ("one", recomputing("full", "uniform", 1)),  # recomputation runs a layer that reuses a choice without the layer that made it
        pytest.param("pp2 uneven", recomputing("full", "uniform", 1), marks=SLOW),
        pytest.param("tp2 sp", recomputing("selective", modules=("core_attn", "moe")), marks=SLOW),
    ],
    ids=str,
)
def test_recomputed_activations_give_the_same_gradients(
    pool: RankPool, reference: Reference, layout: str, recomputation: ParallelFlags
) -> None:
    settings = training_settings(reference, LAYOUTS[layout], parallel=recomputation)
    got, *_ = pool.run(LAYOUTS[layout].num_ranks, megatron_gradients, settings, batch())
    assert_gradients_agree(got, reference.gradients)


def choices_kept(world: World, settings: MegatronTrainerSettings, of: TrainBatch) -> list[int]:
    """Return the choices kept after a pass with gradients and after one without."""
    from fuligo.trainer.megatron_backend import gradients
    from fuligo.trainer.megatron_backend.worker import MegatronRankWorker

    worker, rows = MegatronRankWorker(settings, world), list[PackedRow]()

    def pack(*args: Any, **more: Any) -> PackedRow:
        rows.append(pack_row(*args, **more))
        return rows[-1]

    def num_kept() -> int:
        return sum(len(row.packed_seq_params.chosen_tokens) for row in rows)

    with patch.object(gradients, "pack_row", pack):
        worker.gradients(shares.to_train(worker, of)[0])
        after_gradients, num_trained_rows = num_kept(), len(rows)
        worker.logprobs(shares.to_score(worker, of.samples))
    assert 0 < num_trained_rows < len(rows)
    return [after_gradients, num_kept()]


@pytest.mark.parametrize("recomputation", [recomputing(), recomputing("full", "uniform", 2)], ids=["kept", "recomputed"])
def test_no_choice_outlives_its_use(pool: RankPool, reference: Reference, recomputation: ParallelFlags) -> None:
    settings = training_settings(reference, Layout(), parallel=recomputation)
    assert pool.run(1, choices_kept, settings, batch()) == [[0, 0]]


@pytest.mark.parametrize("layout", ["ep2", "tp2 sp cp2", *(pytest.param(name, marks=SLOW) for name in ("one", "pp2 uneven", "tp2 sp pp2"))])
def test_logprobs_are_those_of_transformers(pool: RankPool, reference: Reference, layout: str) -> None:
    assert_logprobs(pool, reference.without_prediction, LAYOUTS[layout], oracle=reference.without_prediction)


def test_indexers_rotate_neighbors_where_config_json_says_so(pool: RankPool, reference: Reference, tmp_path: Path) -> None:
    """SGLang does. transformers does not, but computes the same if the weights of each pair's two elements are adjacent."""
    directory = shutil.copytree(reference.without_prediction, tmp_path / "interleaved")
    config = read_config_json(directory) | {"indexer_rope_interleave": True}
    (directory / "config.json").write_text(json.dumps(config))
    size, num_heads, head_dim = config["qk_rope_head_dim"], config["index_n_heads"], config["index_head_dim"]
    one_head = torch.cat([torch.arange(size).view(2, -1).T.flatten(), torch.arange(size, head_dim)])
    all_heads = torch.cat([head * head_dim + one_head for head in range(num_heads)])
    order = {"wq_b.weight": all_heads, "wk.weight": one_head, "k_norm.weight": one_head, "k_norm.bias": one_head}
    tensors = load_file(file := directory / "model.safetensors")
    for name, tensor in tensors.items():
        if (indexer := name.partition(".indexer.")[2]) in order:
            tensors[name] = tensor[order[indexer]].contiguous()
    save_file(tensors, file, metadata={"format": "pt"})
    assert_logprobs(pool, directory, LAYOUTS["one"], oracle=reference.without_prediction)


@pytest.mark.slow
def test_interleaved_stages_begin_with_layers_that_choose(pool: RankPool, tmp_path: Path) -> None:
    directory = save_uneven(tmp_path, "glm_moe_dsa", layers=8, indexer_types=["full", "shared"] * 4)
    assert_logprobs(pool, directory, Layout(pp=2, vpp=2, num_ranks=2), oracle=directory)


@pytest.mark.parametrize("family", MODELS)
def test_the_choice_matters(family: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """Otherwise the tests above could not distinguish it from attention to all tokens."""
    reference: Reference = request.getfixturevalue({"glm_moe_dsa": "reference", "deepseek_v32": "of_deepseek"}[family])
    dense = shutil.copytree(reference.without_prediction, tmp_path / "dense")
    (dense / "config.json").write_text(json.dumps(read_config_json(dense) | {"index_topk": 100}))
    samples = train_batches.samples(LENGTHS)
    difference = transformers_logprobs(dense, samples) - transformers_logprobs(reference.without_prediction, samples)
    assert (difference.abs() > 0.01).float().mean() > 0.5


def assert_logprobs(pool: RankPool, directory: Path, layout: Layout, *, oracle: Path) -> None:
    samples = train_batches.samples(LENGTHS)
    settings = settings_of(directory, layout, dispatcher="alltoall")
    *_, got = pool.run(layout.num_ranks, megatron_logprobs, settings, [samples[:3], samples[3:]])
    torch.testing.assert_close(got, transformers_logprobs(oracle, samples), atol=1e-4, rtol=0)


def test_a_stage_cannot_begin_with_a_layer_that_takes_over_a_choice(reference: Reference) -> None:
    assert [layer.computes_index for layer in names_of(read_config_json(reference.directory)).architecture.layers] == [
        True,
        False,
        False,
        True,
    ]
    with pytest.raises(
        ConfigError, match=r"a stage starts at layer 3, which reuses the sparse index .* must start at one of the layers 1, 4;"
    ):
        transformer_config(training_settings(reference, Layout(pp=2, num_ranks=2)))


def test_recomputation_of_what_is_never_computed_is_refused(reference: Reference) -> None:
    with pytest.raises(ConfigError, match="remove mla_up_proj"):
        transformer_config(training_settings(reference, Layout(), parallel=recomputing("selective", modules=("mla_up_proj",))))
