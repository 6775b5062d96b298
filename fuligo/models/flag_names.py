"""What the keys of config.json are called among Megatron's flags, and which families `--spec` names. Pure Python."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

SHAPE_KEYS: Mapping[str, str] = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "ffn_hidden_size": "intermediate_size",
    "num_attention_heads": "num_attention_heads",
    "vocab_size": "vocab_size",
    "max_position_embeddings": "max_position_embeddings",
}
"""Flag -> key, of every family."""

GROUPED_ATTENTION_KEYS: Mapping[str, str] = {
    "num_query_groups": "num_key_value_heads",
    "kv_channels": "head_dim",
}

LATENT_ATTENTION_KEYS: Mapping[str, str] = {
    "q_lora_rank": "q_lora_rank",
    "kv_lora_rank": "kv_lora_rank",
    "qk_head_dim": "qk_nope_head_dim",
    "qk_pos_emb_head_dim": "qk_rope_head_dim",
    "v_head_dim": "v_head_dim",
}

SPARSE_INDEX_KEYS: Mapping[str, str] = {
    "dsa_indexer_n_heads": "index_n_heads",
    "dsa_indexer_head_dim": "index_head_dim",
    "dsa_indexer_topk": "index_topk",
}

EXPERT_KEYS: Mapping[str, str] = {
    "num_experts": "n_routed_experts",
    "moe_router_topk": "num_experts_per_tok",
    "moe_ffn_hidden_size": "moe_intermediate_size",
}
"""Of Qwen3's mixture the first key is `num_experts`."""

_SPECS: Mapping[str, str] = {
    "slime_plugins.models.glm4.get_glm_spec": "glm4",
    "slime_plugins.models.glm5.glm5.get_glm5_spec": "glm_moe_dsa",
}


def spec_family(spec: Sequence[str]) -> str | None:
    """The model_type whose layers a `--spec` makes, as public slime scripts name it: a module and a function, or one dotted path.

    None where it is unknown. The layers of all families are built in; none of ours needs a `--spec`.
    """
    return _SPECS.get(".".join(spec).replace(":", "."))
