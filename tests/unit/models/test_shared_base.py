"""Base weights that several models have in common."""

from typing import Any

import pytest
import torch

from fuligo.errors import CheckpointError
from fuligo.formats.adapter_config import AdapterConfig
from fuligo.models.adapter import SharedBase, adapter_tensors, add_adapter, base_tensors
from tests import tiny

ADAPTERS = [AdapterConfig(4, 8.0), AdapterConfig(2, 8.0, ("q_proj", "o_proj")), AdapterConfig(8, 8.0, ("v_proj",))]
FAMILIES = ["qwen3", "qwen3_moe", "llama"]


def adapted(family: str, config: AdapterConfig, seed: int = 0) -> Any:
    model = tiny.model(family, seed=seed)
    add_adapter(model, config, seed=config.rank)
    for name, parameter in adapter_tensors(model).items():
        if "lora_B" in name:
            torch.nn.init.normal_(parameter, std=0.1)
    return model


@pytest.mark.parametrize("family", FAMILIES)
def test_models_with_different_adapters_compute_as_before_with_one_base(family: str) -> None:
    models, base, ids = [adapted(family, config) for config in ADAPTERS], SharedBase(), torch.arange(9)[None]
    with torch.no_grad():
        before = [model(input_ids=ids).logits for model in models]
        for model in models:
            base.give_to(model)
        for model, logits in zip(models, before, strict=True):
            assert torch.equal(model(input_ids=ids).logits, logits)
    assert not torch.equal(before[0], before[1])
    first = {name: tensor.data_ptr() for name, tensor in base_tensors(models[0]).items()}
    assert all({name: tensor.data_ptr() for name, tensor in base_tensors(model).items()} == first for model in models)
    own = [tensor.data_ptr() for model in models for tensor in adapter_tensors(model).values()]
    assert len(set(own)) == len(own)


def test_what_the_base_became_is_what_later_models_get() -> None:
    """Moved to a GPU or to half precision, parameters stay the same objects."""
    first, second, base = adapted("qwen3", ADAPTERS[0]), adapted("qwen3", ADAPTERS[1]), SharedBase()
    base.give_to(first)
    for parameter in base.parameters():
        parameter.data = parameter.data.to(torch.bfloat16)
    base.give_to(second)
    assert {tensor.dtype for tensor in base_tensors(second).values()} == {torch.bfloat16}
    assert base.parameters() <= set(second.parameters())


@pytest.mark.parametrize(("digest", "family"), [("other", "qwen3"), ("same", "qwen3_moe")])
def test_other_weights_are_refused(digest: str, family: str) -> None:
    base = SharedBase()
    base.give_to(adapted("qwen3", ADAPTERS[0]), digest="same")
    with pytest.raises(CheckpointError, match="give all runs the same --hf-checkpoint"):
        base.give_to(adapted(family, ADAPTERS[0]), digest=digest)
