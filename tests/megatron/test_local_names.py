"""Weights of a pipeline stage have the names of the whole model, for local and TransformerEngine layers."""

import pytest

from fuligo.trainer.megatron_backend.weights.local import canonical_name


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("embedding.word_embeddings.weight", "embedding.word_embeddings.weight"),
        ("decoder.layers.1.self_attention.linear_qkv.weight", "decoder.layers.9.self_attention.linear_qkv.weight"),
        ("decoder.layers.1.self_attention.linear_qkv.layer_norm_weight", "decoder.layers.9.input_layernorm.weight"),
        ("decoder.layers.0.self_attention.linear_q_up_proj.layer_norm_weight", "decoder.layers.8.self_attention.q_layernorm.weight"),
        ("decoder.layers.0.self_attention.linear_kv_up_proj.layer_norm_weight", "decoder.layers.8.self_attention.kv_layernorm.weight"),
        ("decoder.layers.0.mlp.linear_fc1.layer_norm_weight", "decoder.layers.8.pre_mlp_layernorm.weight"),
        ("decoder.layers.0.mlp.linear_fc1.weight", "decoder.layers.8.mlp.linear_fc1.weight"),
        ("decoder.layers.0.mlp.shared_experts.linear_fc1.weight", "decoder.layers.8.mlp.shared_experts.linear_fc1.weight"),
        ("decoder.layers.0.mlp.experts.linear_fc2.weight3", "decoder.layers.8.mlp.experts.local_experts.67.linear_fc2.weight"),
        (
            "decoder.layers.0.mlp.experts.local_experts.3.linear_fc2.weight",
            "decoder.layers.8.mlp.experts.local_experts.67.linear_fc2.weight",
        ),
        (
            "mtp.layers.0.transformer_layer.mlp.experts.linear_fc1.weight0",
            "mtp.layers.0.transformer_layer.mlp.experts.local_experts.64.linear_fc1.weight",
        ),
        (
            "mtp.layers.0.transformer_layer.self_attention.linear_qkv.layer_norm_weight",
            "mtp.layers.0.transformer_layer.input_layernorm.weight",
        ),
    ],
)
def test_name_in_the_whole_model(name: str, expected: str):
    assert canonical_name(name, first_layer=8, first_expert=64) == expected
