"""Merging an adapter: PEFT's own result, and refusals of incomplete adapters."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText

from fuligo.convert.merge_adapter import merge_adapter
from fuligo.errors import CheckpointError
from fuligo.formats.adapter_config import ADAPTER_WEIGHTS, AdapterConfig
from fuligo.models.adapter import adapter_tensors, add_adapter, write_adapter_config, write_adapter_weights
from tests import tiny, tiny_vision

Tensors = dict[str, Tensor]
LAYER = "base_model.model.model.layers.1.mlp.up_proj"


@pytest.fixture
def base(tmp_path: Path) -> Path:
    return tiny.save_checkpoint(tmp_path / "base", "qwen3")


@pytest.fixture
def adapter(base: Path, tmp_path: Path) -> Path:
    """Save an adapter of random values by PEFT."""
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), LoraConfig(r=4, lora_alpha=6, target_modules="all-linear"))
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.2)
    model.save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


def test_the_merge_is_that_of_peft(base: Path, adapter: Path, tmp_path: Path) -> None:
    merge_adapter(base, adapter, tmp_path / "merged")
    ours = AutoModelForCausalLM.from_pretrained(tmp_path / "merged").state_dict()
    theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter).merge_and_unload().state_dict()
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        torch.testing.assert_close(tensor, theirs[name], rtol=1e-6, atol=1e-6, msg=name)


def test_tensors_without_an_adapter_stay_as_they_are(tmp_path: Path) -> None:
    """Published Qwen3.5 checkpoints in bfloat16 have decay rates in float32."""
    base = tiny_vision.save_as_published(tmp_path / "base", "qwen3_5_moe")
    model: Any = AutoModelForImageTextToText.from_pretrained(base)
    add_adapter(model, AdapterConfig(rank=2, alpha=4.0, target_modules=("o_proj",)), seed=0)
    for parameter in (tensors := adapter_tensors(model)).values():
        torch.nn.init.normal_(parameter, std=0.2)
    write_adapter_config(model.peft_config["default"], tmp_path / "adapter")
    write_adapter_weights({name: tensor.detach().float() for name, tensor in tensors.items()}, tmp_path / "adapter")
    merge_adapter(base, tmp_path / "adapter", tmp_path / "merged")
    (merged,) = (load_file(file) for file in (tmp_path / "merged").glob("*.safetensors"))
    stored = load_file(base / "model.safetensors")
    assert merged.keys() == stored.keys()
    assert {name for name, tensor in merged.items() if not torch.equal(tensor, stored[name])} == {
        "model.language_model.layers.2.self_attn.o_proj.weight"
    }
    assert {name: tensor.dtype for name, tensor in merged.items()} == {name: tensor.dtype for name, tensor in stored.items()}


def without_a_layer(tensors: Tensors) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if not name.startswith(LAYER)}


def without_b(tensors: Tensors) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if name != f"{LAYER}.lora_B.weight"}


def of_another_rank(tensors: Tensors) -> Tensors:
    """Its scaling, alpha / rank, would be wrong."""
    return {name: torch.cat([tensor, tensor], dim=0 if ".lora_A." in name else 1) for name, tensor in tensors.items()}


def with_a_magnitude(tensors: Tensors) -> Tensors:
    return {**tensors, f"{LAYER}.lora_magnitude_vector": torch.ones(4)}


@pytest.mark.parametrize("spoil", [without_a_layer, without_b, of_another_rank, with_a_magnitude])
def test_an_adapter_that_is_not_as_configured_is_refused(
    base: Path, adapter: Path, tmp_path: Path, spoil: Callable[[Tensors], Tensors]
) -> None:
    save_file(spoil(load_file(adapter / ADAPTER_WEIGHTS)), adapter / ADAPTER_WEIGHTS)
    with pytest.raises(CheckpointError, match=r"absent|for this model and adapter_config\.json"):
        merge_adapter(base, adapter, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_an_adapter_of_another_model_is_refused(adapter: Path, tmp_path: Path) -> None:
    other = tiny.save_checkpoint(tmp_path / "other", "qwen3", hidden=32)
    with pytest.raises(CheckpointError, match="use the model that the adapter was trained on"):
        merge_adapter(other, adapter, tmp_path / "merged")


def test_an_adapter_of_layers_that_a_model_lacks_is_refused_without_flags(adapter: Path, tmp_path: Path) -> None:
    other = tiny.save_checkpoint(tmp_path / "other", "glm4")
    with pytest.raises(
        CheckpointError, match=r"adapter: target module \S+_proj: .* no linear layer .*; use the model that the adapter"
    ) as error:
        merge_adapter(other, adapter, tmp_path / "merged")
    assert "--lora" not in str(error.value)
