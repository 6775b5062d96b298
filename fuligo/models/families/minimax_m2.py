"""MiniMax-M2: grouped attention whose norms of queries and keys span all heads; routed experts in each layer, with a sigmoid router.

The MTP layers of the published files are ignored, as in transformers 5.12.1.
"""

from dataclasses import replace

from fuligo.formats.stored_experts import StoredExperts
from fuligo.models.architecture import Architecture
from fuligo.models.config_json import ConfigJson
from fuligo.models.family import Family, ModelArgs
from fuligo.models.parts import assemble, grouped_attention_parts, moe_layer, norms, read_experts, read_grouped_attention

HEAD_DIM = 128


def architecture(config: ConfigJson) -> Architecture:
    if config.index("shared_intermediate_size", default=0):
        raise config.contradiction("shared_intermediate_size is not 0; only models without shared experts are supported")
    hidden_size = config.count("hidden_size")
    heads = replace(read_grouped_attention(config, default_head_dim=HEAD_DIM), norms_span_heads=True)
    head_norms = norms((heads.num_heads + heads.num_kv_heads) * heads.head_dim)
    attention = (*grouped_attention_parts(heads, hidden_size), head_norms)
    experts = read_experts(config, num_experts_key="num_local_experts", size_key="intermediate_size", shared=False)
    layers = [
        moe_layer(number, attention, hidden_size, experts, correction_bias=True) for number in range(config.count("num_hidden_layers"))
    ]
    return assemble(config, heads, layers, experts=experts)


FAMILY = Family(
    architecture=architecture,
    why_not_megatron="its query and key norms span all heads, but Megatron-Core 0.16.1 normalizes each head separately",
    stored_experts=StoredExperts.MIXTRAL,
    model_args=ModelArgs(specs=("slime_plugins.models.minimax_m2.get_minimax_m2_layer_spec",)),
)
