"""Ranks that read parts of a tensor join them to the same tensor, for every form and number of ranks."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from fuligo.models.names import Form, ModelNames, Weight
from fuligo.models.registry import names_of
from fuligo.trainer.megatron_backend.weights.forms import join_shards, read_shard

CONFIG = {
    "hidden_size": 8,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 12,
    "head_dim": 2,
    "vocab_size": 24,
    "max_position_embeddings": 64,
    "num_nextn_predict_layers": 1,
}


class InMemory:
    def __init__(self, tensor: Tensor) -> None:
        self.tensor = tensor

    def read(self, axis: int, start: int, stop: int) -> Tensor:
        return self.tensor.narrow(axis, start, stop - start)


def weights_of(family: str, num_kv_heads: int = 3) -> ModelNames:
    return names_of(CONFIG | {"model_type": family, "num_key_value_heads": num_kv_heads})


def checkpoint_tensors(names: ModelNames, weight: Weight) -> dict[str, Tensor]:
    return {name: torch.randn(shape) for name, shape in zip(weight.checkpoint, names.checkpoint_shapes(weight), strict=True)}


def parts(weight: Weight, tensors: dict[str, Tensor]) -> list[InMemory]:
    """Return the parts, with gate and up separate even if the checkpoint stores them as one."""
    if weight.form is Form.GATE_UP and len(tensors) == 1:
        return [InMemory(half) for half in tensors[weight.checkpoint[0]].chunk(2)]
    return [InMemory(tensor) for tensor in tensors.values()]


@given(st.sampled_from(["mimo", "glm4", "qwen3"]), st.sampled_from([1, 2, 3, 4, 6]), st.sampled_from([1, 3, 6, 12]))
def test_joined_parts_are_the_checkpoints_tensors(family: str, num_ranks: int, num_kv_heads: int):
    names = weights_of(family, num_kv_heads)
    for weight in names.weights():
        tensors, count = checkpoint_tensors(names, weight), num_ranks if weight.axis is not None else 1
        if weight.axis is not None and weight.shape[weight.axis] % count:
            continue  # Megatron has no such layout
        shards = [read_shard(weight, parts(weight, tensors), names.architecture, index, count) for index in range(count)]
        assert len({shard.shape for shard in shards}) == 1
        joined = dict(join_shards(weight, shards, names.architecture))
        assert list(joined) == list(tensors)
        assert all(torch.equal(joined[name], tensors[name]) for name in tensors), weight.megatron


def test_a_rank_has_its_share_of_the_gate_above_its_share_of_the_rest():
    names = weights_of("qwen3")
    weight = names.by_megatron_name["decoder.layers.0.mlp.linear_fc1.weight"]
    gate, up = (part.tensor for part in parts(weight, checkpoint_tensors(names, weight)))
    second = read_shard(weight, [InMemory(gate), InMemory(up)], names.architecture, 1, 3)
    assert torch.equal(second, torch.cat([gate[8:16], up[8:16]]))


@pytest.mark.parametrize("index", range(3))
def test_each_group_of_heads_has_its_queries_its_key_and_its_value(index: int):
    names = weights_of("qwen3")
    weight = names.by_megatron_name["decoder.layers.0.self_attention.linear_qkv.weight"]
    q, k, v = (part.tensor for part in parts(weight, checkpoint_tensors(names, weight)))
    shard = read_shard(weight, [InMemory(q), InMemory(k), InMemory(v)], names.architecture, index, 3)
    keys = slice(2 * index, 2 * index + 2)
    assert torch.equal(shard, torch.cat([q[8 * index : 8 * index + 8], k[keys], v[keys]]))
