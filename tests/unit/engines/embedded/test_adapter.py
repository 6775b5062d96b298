"""The embedded engine with a LoRA adapter: PEFT's logits, and syncs of only the adapter."""

from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from transformers import AutoModelForCausalLM

from fuligo.engines.embedded.attention import AttentionPlan
from fuligo.engines.embedded.launch import AdapterSource
from fuligo.engines.embedded.model import EngineModel
from fuligo.errors import CheckpointError, WeightSyncError
from fuligo.formats.adapter_config import AdapterConfig
from fuligo.formats.receiver import WeightStore
from fuligo.formats.stored_experts import StoredExperts
from fuligo.formats.weight_manifest import weights_checksum
from fuligo.models.adapter import adapter_tensors, read_adapter_weights
from tests import tiny


@pytest.fixture(scope="module")
def base(tmp_path_factory) -> Path:
    return tiny.save_checkpoint(tmp_path_factory.mktemp("base"), "qwen3")


@pytest.fixture(scope="module")
def adapter(base, tmp_path_factory) -> Path:
    """Save an adapter of random values by PEFT."""
    torch.manual_seed(3)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), LoraConfig(r=4, lora_alpha=6, target_modules="all-linear"))
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.2)
    directory = tmp_path_factory.mktemp("adapter")
    model.save_pretrained(directory)
    return directory


def served(base: Path, source: AdapterSource | None) -> EngineModel:
    return EngineModel(str(base), torch.device("cpu"), torch.float32, adapter=source)


@torch.no_grad()
def logits(model: EngineModel) -> torch.Tensor:
    ids = torch.arange(5, 25)
    return model.forward(ids, torch.arange(len(ids)), AttentionPlan([], [0, len(ids)]))


@torch.no_grad()
def test_logits_are_those_of_peft(base, adapter) -> None:
    theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(base), adapter)
    expected = theirs(input_ids=torch.arange(5, 25)[None]).logits[0]
    torch.testing.assert_close(logits(served(base, adapter)), expected, rtol=1e-5, atol=1e-5)


def test_a_sync_of_only_the_adapter_is_complete(base, adapter) -> None:
    shape, tensors = AdapterConfig.read(adapter), read_adapter_weights(adapter)
    model = served(base, shape)
    torch.testing.assert_close(logits(model), logits(served(base, None)))  # no effect before the first sync
    store = WeightStore(model.module, experts=StoredExperts.APART)
    named = list(tensors.items())
    store.load_tensors(named[:3], None)
    assert store.torn
    with pytest.raises(WeightSyncError, match="was not sent"):
        store.load_tensors(named[4:], 1)
    store.load_tensors(named[3:], 1)
    assert (store.version, store.torn) == (1, False)
    assert store.adapter_digest == weights_checksum(adapter_tensors(model.module).items()).checksum == weights_checksum(named).checksum
    torch.testing.assert_close(logits(model), logits(served(base, adapter)))


def test_a_sync_of_the_weights_brings_the_adapter_too(base, adapter) -> None:
    model = served(base, AdapterConfig.read(adapter))
    store = WeightStore(model.module, experts=StoredExperts.APART)
    weights = [(name, tensor.detach().clone()) for name, tensor in store.named_weights().items()]
    ours = [(name, tensor) for name, tensor in weights if not name.startswith("base_model.")]
    with pytest.raises(WeightSyncError, match=r"lora_A\.weight was not sent"):
        store.load_tensors(ours, 1)
    store.load_tensors([*ours, *read_adapter_weights(adapter).items()], 1)
    assert not store.torn


def test_an_adapter_of_another_model_is_refused(adapter, tmp_path) -> None:
    other = tiny.save_checkpoint(tmp_path, "qwen3", hidden=32)
    with pytest.raises(CheckpointError, match="use the model that the adapter was trained on"):
        served(other, adapter)
