"""A checkpoint loaded into a model of any layout is exported unchanged on every rank."""

import json
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from fuligo.formats.hugging_face import read_config_json
from fuligo.formats.weight_manifest import WeightsChecksum
from fuligo.layout.megatron import Layout
from fuligo.models.registry import names_of
from fuligo.trainer.ranks.world import World
from tests import tiny
from tests.megatron.policies import mtp_flags, settings_of
from tests.megatron.ranks import RankPool

MOE = {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_routed_experts": 4}
LATENT = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 8, "v_head_dim": 16}
SHAPES: dict[str, dict[str, Any]] = {
    "llama": {},
    "mistral": {},
    "qwen2": {"tie_word_embeddings": True},
    "qwen2_apart": {},
    "qwen3": {"vocab_size": 397},
    "glm4": {},
    "gemma3_text": {},
    "qwen3_moe": {"num_experts_per_tok": 2, "moe_intermediate_size": 32, "num_experts": 4, "head_dim": 16, "mlp_only_layers": [0]},
    "glm4_moe": {**MOE, "use_qk_norm": True, "attention_bias": True, "head_dim": 16, "first_k_dense_replace": 1},
    "deepseek_v3": {**MOE, **LATENT, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
    "kimi_k2": {**MOE, **LATENT, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
    "deepseek_v32": {**MOE, **LATENT, "num_experts": 4, "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1},
    "glm_moe_dsa": {**MOE, **LATENT, "first_k_dense_replace": 1, "indexer_types": ["full", "shared", "full", "shared"]},
}


def save_published(directory: Path, family: str) -> Path:
    """Save a tiny bf16 checkpoint with `save_pretrained`."""
    model = tiny.model(family.removesuffix("_apart"), layers=4, **SHAPES[family]).to(torch.bfloat16)
    assert isinstance(model, PreTrainedModel)
    tiny.save_as_published(model, directory, family)
    return directory


def save_with_prediction_layer(directory: Path, family: str) -> Path:
    """Save a checkpoint with an MTP layer as in published files; transformers has none."""
    save_published(directory, "qwen2_apart" if family == "mimo" else family)
    config_json = json.loads((directory / "config.json").read_text()) | {"model_type": family, "num_nextn_predict_layers": 1}
    (directory / "config.json").write_text(json.dumps(config_json))
    names, file = names_of(config_json), directory / "model.safetensors"
    tensors = load_file(file)
    for weight in names.weights():
        for name, shape in zip(weight.checkpoint, names.checkpoint_shapes(weight), strict=True):
            tensors.setdefault(name, torch.randn(shape).bfloat16())
    save_file(tensors | {f"model.layers.4.{name}": tensors["lm_head.weight"].clone() for name in names.table.mtp_copies}, file)
    return directory


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory):
    made: dict[str, Path] = {}

    def checkpoint(family: str) -> Path:
        if family not in made:
            made[family] = save_published(tmp_path_factory.mktemp(family), family)
        return made[family]

    return checkpoint


def load_and_export(world: World, settings: Any, gather_bytes: int) -> tuple[str, list[tuple[str, Tensor]]]:
    """Return the checksum of the exported weights, and on rank 0 the weights."""
    from fuligo.trainer.megatron_backend.model import build_chunks
    from fuligo.trainer.megatron_backend.weights.export import named_weights
    from fuligo.trainer.megatron_backend.weights.load import load_hugging_face
    from fuligo.trainer.megatron_backend.worker import join_megatron

    join_megatron(settings.layout, world, settings.seed)
    chunks = build_chunks(settings, trained=True)
    load_hugging_face(chunks, settings.initial_weights)
    names = names_of(read_config_json(settings.initial_weights))
    checksum, exported = WeightsChecksum(), []
    for name, tensor in named_weights(chunks, names, dtype=torch.bfloat16, gather_bytes=gather_bytes):
        checksum.update(name, tensor)
        exported.append((name, tensor.detach().clone()))
    return checksum.result().checksum, exported if world.rank == 0 else []


def assert_comes_back(pool: RankPool, directory: Path, layout: Layout, *, gather_bytes: int = 2**26, **overrides: Any) -> None:
    settings = settings_of(directory, layout, **overrides)
    results = pool.run(layout.num_ranks, load_and_export, settings, gather_bytes)
    assert len({checksum for checksum, _ in results}) == 1
    exported, stored = results[0][1], load_file(directory / "model.safetensors")
    copies = ("layers.4.embed_tokens.weight", "shared_head.head.weight")
    assert sorted(name for name, _ in exported) == sorted(name for name in stored if not name.endswith(copies))
    for name, tensor in exported:
        torch.testing.assert_close(tensor, stored[name].to(tensor.dtype), rtol=0, atol=0, msg=name)


def label(value: str | Layout) -> str:
    if isinstance(value, str):
        return value
    chosen = [field.name for field in fields(Layout) if getattr(value, field.name) != field.default and field.name != "num_ranks"]
    return " ".join(f"{name} {getattr(value, name)}" for name in chosen) or "one rank"


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("qwen3", Layout()),
        ("llama", Layout(tp=2, num_ranks=2)),
        ("mistral", Layout(pp=2, num_ranks=2)),
        ("qwen3", Layout(tp=4, num_ranks=4)),
        ("qwen2", Layout(tp=2, pp=2, num_ranks=4)),
        ("glm4", Layout(tp=2, pp=2, vpp=2, num_ranks=4)),
        ("gemma3_text", Layout(tp=2, pp=2, num_ranks=4)),
        ("qwen3", Layout(pp=3, num_layers_first_stage=1, num_layers_last_stage=1, num_ranks=3)),
        ("qwen3_moe", Layout(tp=2, ep=2, etp=2, sequence_parallel=True, num_ranks=4)),
        ("glm4_moe", Layout(pp=2, ep=2, num_ranks=4)),
        ("glm4_moe", Layout(tp=2, ep=4, sequence_parallel=True, num_ranks=4)),
        ("deepseek_v3", Layout(tp=2, pp=2, ep=2, sequence_parallel=True, num_ranks=4)),
        ("kimi_k2", Layout(ep=2, num_ranks=2)),
        ("deepseek_v32", Layout(tp=2, pp=2, sequence_parallel=True, num_ranks=4)),
        ("glm_moe_dsa", Layout(tp=2, pp=2, ep=2, sequence_parallel=True, num_ranks=4)),
    ],
    ids=label,
)
def test_a_checkpoint_comes_back_byte_for_byte(pool: RankPool, checkpoints, family: str, layout: Layout):
    assert_comes_back(pool, checkpoints(family), layout, gather_bytes=2**15)


@pytest.mark.parametrize(
    ("family", "layout"),
    [("mimo", Layout(tp=2, num_ranks=2)), ("glm4_moe", Layout(pp=2, ep=2, num_ranks=4)), ("glm_moe_dsa", Layout(ep=2, num_ranks=2))],
    ids=label,
)
def test_prediction_layers_come_back(pool: RankPool, tmp_path: Path, family: str, layout: Layout):
    directory = save_with_prediction_layer(tmp_path, family)
    assert_comes_back(pool, directory, layout, mtp=mtp_flags(num_layers=1))


def test_experts_as_transformers_keeps_them_are_read_too(pool: RankPool, checkpoints, tmp_path: Path):
    """All experts of a layer are in one tensor, as `save_pretrained` writes them on request."""
    directory = checkpoints("qwen3_moe")
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path, save_original_format=False)
    layout = Layout(ep=2, num_ranks=2)
    settings = settings_of(tmp_path, layout)
    assert "model.layers.1.mlp.experts.gate_up_proj" in load_file(tmp_path / "model.safetensors")
    exported, stored = pool.run(2, load_and_export, settings, 2**15)[0][1], load_file(directory / "model.safetensors")
    assert {name for name, _ in exported} == set(stored)
    assert all(torch.equal(tensor, stored[name]) for name, tensor in exported)


def test_weights_of_another_architecture_are_refused(pool: RankPool, checkpoints):
    """The sizes are the same, but the checkpoint has norms that the model lacks."""
    settings = settings_of(checkpoints("qwen3"), Layout(), flags={"qk_layernorm": False})
    with pytest.raises(
        AssertionError, match=r"CheckpointError: .* only one of them has decoder\.layers\.0\.self_attention\.q_layernorm\.weight"
    ):
        pool.run(1, load_and_export, settings, 2**26)


def test_weights_of_other_shapes_are_refused(pool: RankPool, checkpoints):
    settings = settings_of(checkpoints("qwen3"), Layout(), flags={"ffn_hidden_size": 96})
    with pytest.raises(AssertionError, match=r"CheckpointError: cannot load .*mlp\.\S+ from .*: the stored weight has the shape"):
        pool.run(1, load_and_export, settings, 2**26)
