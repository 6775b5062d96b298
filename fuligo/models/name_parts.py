"""Weights in the name tables that several families share; `parts` counts their parameters. Imports neither numpy nor torch.

Names and layouts of Megatron's tensors follow Megatron-Core 0.16.1 (`transformer/attention.py`, `transformer/multi_latent_attention.py`,
`transformer/mlp.py`, `transformer/moe/`, `transformer/multi_token_prediction.py`), those of checkpoints follow transformers 5.12.1
and the published files.
"""

from dataclasses import replace

from fuligo.models.architecture import Architecture, GroupedAttention, LatentAttention
from fuligo.models.config_json import ConfigJson
from fuligo.models.names import EMBEDDING, HEAD, Form, NameTable, Weight, Weights

ROWS, COLUMNS = 0, 1


def dense_table(architecture: Architecture, attention: Weights, *, norms: Weights | None = None, mlp: Weights | None = None) -> NameTable:
    """Return the table of a family whose layers all have the same shape.

    Args:
        norms: norms of a layer; None: before attention and before the MLP.
        mlp: MLP of a layer; None: gate, up and down projection as three tensors.
    """
    layer = (*(norms or layer_norms(architecture)), *attention, *(mlp or gated_mlp(architecture, "mlp", architecture.intermediate_size)))
    return NameTable(model=outer_weights(architecture), dense=layer)


def plain_dense_names(config: ConfigJson, architecture: Architecture) -> NameTable:
    """Return the names of a dense family like Llama: grouped attention, two norms per layer, no MTP layers."""
    return dense_table(architecture, grouped_attention(architecture))


def moe_table(architecture: Architecture, attention: Weights, *, has_expert_bias: bool) -> NameTable:
    """Return the table of a family with routed experts in some layers."""
    table, experts = dense_table(architecture, attention), architecture.experts
    assert experts is not None
    hidden = architecture.hidden_size
    rows = [Weight("mlp.router.weight", ("mlp.gate.weight",), (experts.num_experts, hidden))]
    if has_expert_bias:
        name = "mlp.gate.e_score_correction_bias"
        rows.append(Weight("mlp.router.expert_bias", (name,), (experts.num_experts,), is_float32=True))
    if experts.num_shared_experts:
        rows += gated_mlp(architecture, "mlp.shared_experts", experts.num_shared_experts * experts.intermediate_size)
    moe = (*layer_norms(architecture), *attention, *rows, *routed_experts(architecture))
    return replace(table, moe=moe)


def outer_weights(architecture: Architecture) -> Weights:
    """Return the embedding, the final norm and, unless tied to the embedding, the head."""
    vocabulary = (architecture.vocab_size, architecture.hidden_size)
    rows = (
        Weight(EMBEDDING, ("model.embed_tokens.weight",), vocabulary, ROWS, is_vocabulary=True),
        Weight("decoder.final_layernorm.weight", ("model.norm.weight",), (architecture.hidden_size,)),
    )
    return rows if architecture.tied_embeddings else (*rows, Weight(HEAD, ("lm_head.weight",), vocabulary, ROWS, is_vocabulary=True))


def layer_norms(architecture: Architecture) -> Weights:
    """Return the norms before attention and before the MLP."""
    return (norm(architecture, "input_layernorm"), norm(architecture, "pre_mlp_layernorm", "post_attention_layernorm"))


def norm(architecture: Architecture, megatron: str, checkpoint: str | None = None) -> Weight:
    """Return a norm over the hidden size; `checkpoint` is its name in the checkpoint if that differs."""
    return Weight(f"{megatron}.weight", (f"{checkpoint or megatron}.weight",), (architecture.hidden_size,))


def grouped_attention(architecture: Architecture) -> Weights:
    """Return the query, key, value and output projections, and the norms of query and key heads, if they have any.

    The output projection never has a bias: `stated_flags` rejects models that have one.
    """
    heads, hidden = architecture.attention, architecture.hidden_size
    assert isinstance(heads, GroupedAttention)
    q_size, kv_size = heads.num_heads * heads.head_dim, heads.num_kv_heads * heads.head_dim
    ours, theirs = "self_attention.linear_qkv", [f"self_attn.{kind}_proj" for kind in "qkv"]
    rows = [
        Weight(f"{ours}.weight", tuple(f"{name}.weight" for name in theirs), (q_size + 2 * kv_size, hidden), ROWS, Form.QKV),
        Weight("self_attention.linear_proj.weight", ("self_attn.o_proj.weight",), (hidden, q_size), COLUMNS),
    ]
    if heads.has_qkv_bias:
        rows.append(Weight(f"{ours}.bias", tuple(f"{name}.bias" for name in theirs), (q_size + 2 * kv_size,), ROWS, Form.QKV))
    if heads.has_head_norms:
        rows += [Weight(f"self_attention.{kind}_layernorm.weight", (f"self_attn.{kind}_norm.weight",), (heads.head_dim,)) for kind in "qk"]
    return tuple(rows)


def latent_attention(architecture: Architecture) -> Weights:
    """Return the down-projections, their norms, the up-projections and the output projection.

    The two down-projections are adjacent, since engines fuse them and accept them only in the same call (SGLang 0.5.15.post1,
    `deepseek_common/deepseek_weight_loader.py`).
    """
    heads, hidden = architecture.attention, architecture.hidden_size
    assert isinstance(heads, LatentAttention)
    q_size = heads.num_heads * (heads.qk_nope_head_dim + heads.qk_rope_head_dim)
    up_size = heads.num_heads * (heads.qk_nope_head_dim + heads.v_head_dim)
    latent, rank = heads.kv_lora_rank, heads.q_lora_rank
    if rank is None:
        queries = (_attention("linear_q_proj", "q_proj", (q_size, hidden), ROWS),)
    else:
        queries = (
            _attention("q_layernorm", "q_a_layernorm", (rank,)),
            _attention("linear_q_up_proj", "q_b_proj", (q_size, rank), ROWS),
            _attention("linear_q_down_proj", "q_a_proj", (rank, hidden), ROWS),
        )
    return (
        *queries,
        _attention("linear_kv_down_proj", "kv_a_proj_with_mqa", (latent + heads.qk_rope_head_dim, hidden), ROWS),
        _attention("kv_layernorm", "kv_a_layernorm", (latent,)),
        _attention("linear_kv_up_proj", "kv_b_proj", (up_size, latent), ROWS),
        _attention("linear_proj", "o_proj", (hidden, heads.num_heads * heads.v_head_dim), COLUMNS),
    )


def _attention(megatron: str, checkpoint: str, shape: tuple[int, ...], axis: int | None = None) -> Weight:
    return Weight(f"self_attention.{megatron}.weight", (f"self_attn.{checkpoint}.weight",), shape, axis)


def gated_mlp(architecture: Architecture, module: str, intermediate_size: int, *, is_fused: bool = False) -> Weights:
    """Return the gate, up and down projections of the MLP `module`; with `is_fused` the checkpoint stacks gate and up in one tensor."""
    hidden = architecture.hidden_size
    gate_up = (f"{module}.gate_up_proj.weight",) if is_fused else (f"{module}.gate_proj.weight", f"{module}.up_proj.weight")
    return (
        Weight(f"{module}.linear_fc1.weight", gate_up, (2 * intermediate_size, hidden), ROWS, Form.GATE_UP),
        Weight(f"{module}.linear_fc2.weight", (f"{module}.down_proj.weight",), (hidden, intermediate_size), COLUMNS),
    )


def routed_experts(architecture: Architecture) -> Weights:
    """Return the gate, up and down projections of each expert."""
    assert architecture.experts is not None
    gate_up, down = gated_mlp(architecture, "mlp.experts.{expert}", architecture.experts.intermediate_size)
    return (
        replace(gate_up, megatron="mlp.experts.local_experts.{expert}.linear_fc1.weight", all_experts="mlp.experts.gate_up_proj"),
        replace(down, megatron="mlp.experts.local_experts.{expert}.linear_fc2.weight", all_experts="mlp.experts.down_proj"),
    )


def with_mtp_layers(table: NameTable, architecture: Architecture) -> NameTable:
    """Return the table with MTP layers as in DeepSeek-V3's files: numbered after the other layers, with copies of embedding and head."""
    mtp = (
        norm(architecture, "enorm"),
        norm(architecture, "hnorm"),
        mtp_projection(architecture, "eh_proj"),
        norm(architecture, "final_layernorm", "shared_head.norm"),
    )
    return replace(table, mtp=mtp, mtp_copies=("embed_tokens.weight", "shared_head.head.weight"))


def mtp_projection(architecture: Architecture, checkpoint: str, form: Form = Form.WHOLE) -> Weight:
    """Return the projection that joins the embedding of the next token (first half of the columns) and the hidden state."""
    hidden = architecture.hidden_size
    return Weight("eh_proj.weight", (f"{checkpoint}.weight",), (hidden, 2 * hidden), ROWS, form)
