"""Shared builders of architectures: attention, dense and expert MLPs, MTP layers, whole models. Imports neither numpy nor torch.

Counts follow transformers 5.12.1 (`modeling_<family>.py`), splits follow Megatron-Core 0.16.1.
"""

from collections.abc import Iterable
from dataclasses import replace

from fuligo.models.architecture import (
    Architecture,
    Experts,
    GroupedAttention,
    LatentAttention,
    Layer,
    LinearAttention,
    Part,
    PartKind,
    Split,
)
from fuligo.models.config_json import ConfigJson

Parts = tuple[Part, ...]


def matrix(kind: PartKind, num_parameters: int, split: Split, quantizable: bool = True) -> Part:
    """Return a part that consists of weight matrices, with which hidden states are multiplied."""
    return Part(kind, num_parameters, split, quantizable)


def vector(kind: PartKind, num_parameters: int, split: Split = Split.REPLICATED) -> Part:
    """Return a part that consists of biases or norm weights: never quantized, no matrix product."""
    return Part(kind, num_parameters, split, quantizable=False, is_matmul=False)


def norms(num_parameters: int) -> Part:
    """Return the weights of one or several norms."""
    return vector(PartKind.NORM, num_parameters)


def read_grouped_attention(
    config: ConfigJson,
    *,
    qkv_bias: bool = False,
    output_bias: bool = False,
    qk_norm: bool = False,
    default_head_dim: int | None = None,
    may_omit_kv_heads: bool = False,
) -> GroupedAttention:
    """Read the sizes of multi-head attention with grouped keys and values.

    Args:
        qkv_bias: queries, keys and values have biases.
        output_bias: the output projection has a bias.
        qk_norm: each head of queries and keys is normalized.
        default_head_dim: head size if config.json has no `head_dim`; None: hidden_size / num_attention_heads.
        may_omit_kv_heads: `num_key_value_heads` defaults to `num_attention_heads`; False: it is required, as transformers' defaults vary.
    """
    num_heads = config.count("num_attention_heads")
    num_kv_heads = config.count("num_key_value_heads", default=num_heads if may_omit_kv_heads else None)
    if num_heads % num_kv_heads:
        raise config.contradiction(f"num_key_value_heads {num_kv_heads} does not divide num_attention_heads {num_heads}")
    head_dim = default_head_dim if config.values.get("head_dim") is None else config.count("head_dim")
    if head_dim is None:
        hidden_size = config.count("hidden_size")
        if hidden_size % num_heads:
            raise config.contradiction(f"no head_dim, and num_attention_heads {num_heads} does not divide hidden_size {hidden_size}")
        head_dim = hidden_size // num_heads
    return GroupedAttention(num_heads, num_kv_heads, head_dim, qkv_bias, output_bias, qk_norm)


def grouped_attention_parts(attention: GroupedAttention, hidden_size: int) -> Parts:
    """Return the query, key, value and output projections, and the norms of query and key heads, if they have any."""
    q_size = attention.num_heads * attention.head_dim
    qkv_size = q_size + attention.projected_kv_elements
    gate_size = q_size if attention.has_output_gate else 0
    parts = [matrix(PartKind.ATTENTION, hidden_size * (qkv_size + gate_size + q_size), Split.TENSOR)]
    if attention.has_qkv_bias:
        parts.append(vector(PartKind.ATTENTION, qkv_size, Split.TENSOR))
    if attention.has_output_bias:
        parts.append(vector(PartKind.ATTENTION, hidden_size))
    if attention.has_head_norms:
        parts.append(norms((1 if attention.borrows_keys else 2) * attention.head_dim))
    return tuple(parts)


def read_latent_attention(config: ConfigJson) -> LatentAttention:
    """Read the sizes of multi-head latent attention; if `q_lora_rank` is null, queries are projected directly."""
    has_latent_queries = "q_lora_rank" not in config.values or config.values["q_lora_rank"] is not None
    attention = LatentAttention(
        num_heads=config.count("num_attention_heads"),
        q_lora_rank=config.count("q_lora_rank") if has_latent_queries else None,
        kv_lora_rank=config.count("kv_lora_rank"),
        qk_nope_head_dim=config.count("qk_nope_head_dim"),
        qk_rope_head_dim=config.count("qk_rope_head_dim"),
        v_head_dim=config.count("v_head_dim"),
    )
    total = attention.qk_nope_head_dim + attention.qk_rope_head_dim
    given = config.count("qk_head_dim", default=total)
    if given != total:
        raise config.contradiction(f"qk_head_dim {given} is not qk_nope_head_dim + qk_rope_head_dim = {total}")
    return attention


def latent_attention_parts(attention: LatentAttention, hidden_size: int, *, bias: bool) -> Parts:
    """Return the down-projections (replicated), their norms, the up-projections and the output projection (split by heads)."""
    q_size = attention.num_heads * (attention.qk_nope_head_dim + attention.qk_rope_head_dim)
    latent_size = attention.kv_lora_rank + attention.qk_rope_head_dim
    up = attention.kv_lora_rank * attention.num_heads * (attention.qk_nope_head_dim + attention.v_head_dim)
    output = attention.num_heads * attention.v_head_dim * hidden_size
    rank = attention.q_lora_rank
    if rank is None:
        down_size, q_up, norm_size = latent_size, hidden_size * q_size, attention.kv_lora_rank
    else:
        down_size, q_up, norm_size = rank + latent_size, rank * q_size, rank + attention.kv_lora_rank
    parts = (
        matrix(PartKind.ATTENTION, hidden_size * down_size, Split.REPLICATED),
        matrix(PartKind.ATTENTION, q_up + up + output, Split.TENSOR),
        norms(norm_size),
    )
    return (*parts, vector(PartKind.ATTENTION, down_size + hidden_size)) if bias else parts


def linear_attention_parts(linear: LinearAttention, hidden_size: int) -> Parts:
    """Return the projections (of queries, keys, values, gates, step sizes and outputs), the convolution, the decays, and the norm."""
    value_size = linear.num_value_heads * linear.value_dim
    projections = hidden_size * (linear.num_channels + 2 * value_size + 2 * linear.num_value_heads)
    return (
        matrix(PartKind.LINEAR_ATTENTION, projections, Split.TENSOR),
        vector(PartKind.LINEAR_ATTENTION, linear.num_channels * linear.conv_width + 2 * linear.num_value_heads, Split.TENSOR),
        norms(linear.value_dim),
    )


def dense_mlp_parts(hidden_size: int, intermediate_size: int, *, bias: bool = False) -> Parts:
    """Return the gate, up and down projections."""
    weights = matrix(PartKind.DENSE_MLP, 3 * hidden_size * intermediate_size, Split.TENSOR)
    if not bias:
        return (weights,)
    return weights, vector(PartKind.DENSE_MLP, 2 * intermediate_size, Split.TENSOR), vector(PartKind.DENSE_MLP, hidden_size)


def read_experts(
    config: ConfigJson,
    *,
    num_experts_key: str = "n_routed_experts",
    chosen_key: str = "num_experts_per_tok",
    size_key: str = "moe_intermediate_size",
    shared: bool = True,
) -> Experts:
    """Read the sizes of the routed and shared experts."""
    experts = Experts(
        num_experts=config.count(num_experts_key),
        num_experts_per_token=config.count(chosen_key),
        num_shared_experts=config.index("n_shared_experts", default=1) if shared else 0,
        intermediate_size=config.count(size_key),
    )
    if experts.num_experts_per_token > experts.num_experts:
        raise config.contradiction(f"{chosen_key} {experts.num_experts_per_token} exceeds {num_experts_key} {experts.num_experts}")
    num_groups = config.count("n_group", default=1)
    if experts.num_experts % num_groups:
        raise config.contradiction(f"n_group {num_groups} does not divide {num_experts_key} {experts.num_experts}")
    if config.count("topk_group", default=1) > num_groups:
        raise config.contradiction(f"topk_group {config.count('topk_group')} exceeds n_group {num_groups}")
    return experts


def expert_mlp_parts(experts: Experts, hidden_size: int) -> Parts:
    """Return the router, the routed experts and, if any, the shared expert (one MLP as wide as all shared experts)."""
    expert = 3 * hidden_size * experts.intermediate_size
    parts = (
        matrix(PartKind.ROUTER, experts.num_experts * hidden_size, Split.REPLICATED, quantizable=False),
        matrix(PartKind.ROUTED_EXPERTS, experts.num_experts * expert, Split.EXPERT),
    )
    if not experts.num_shared_experts:
        return parts
    return (*parts, matrix(PartKind.SHARED_EXPERT, experts.num_shared_experts * expert, Split.TENSOR))


def dense_layer(number: int, attention: Parts, hidden_size: int, mlp: Parts, num_norms: int = 2) -> Layer:
    return Layer(number, (*attention, *mlp, norms(num_norms * hidden_size)), is_moe=False)


def moe_layer(number: int, attention: Parts, hidden_size: int, experts: Experts, *, correction_bias: bool) -> Layer:
    """Return a layer with routed experts; `correction_bias`: its router has DeepSeek-V3's bias for auxiliary-loss-free balancing."""
    parts = (*attention, *expert_mlp_parts(experts, hidden_size), norms(2 * hidden_size))
    return Layer(number, parts, is_moe=True, num_buffer_elements=experts.num_experts if correction_bias else 0)


def mtp_layer(layer: Layer, hidden_size: int) -> Layer:
    """Return a multi-token-prediction (MTP) layer around `layer` (DeepSeek-V3, arXiv 2412.19437, section 2.2).

    It adds norms of its two inputs, the projection that joins them, and the norm before the head.
    """
    projection = matrix(PartKind.MTP_PROJECTION, 2 * hidden_size * hidden_size, Split.TENSOR, quantizable=False)
    return replace(layer, parts=(*layer.parts, projection, norms(3 * hidden_size)))


def assemble(
    config: ConfigJson,
    attention: GroupedAttention | LatentAttention,
    layers: Iterable[Layer],
    mtp_layers: Iterable[Layer] = (),
    experts: Experts | None = None,
    linear_attention: LinearAttention | None = None,
    *,
    ties_by_default: bool = False,
) -> Architecture:
    """Return an architecture with the embedding, final norm and head that all families have.

    A family whose layers all have experts may omit `intermediate_size`. `ties_by_default`: default of `tie_word_embeddings`.
    """
    layers = tuple(layers)
    of_experts = experts.intermediate_size if experts is not None and all(layer.is_moe for layer in layers) else None
    hidden_size, vocab_size = config.count("hidden_size"), config.count("vocab_size")
    tied = config.switch("tie_word_embeddings", default=ties_by_default)
    return Architecture(
        model_type=config.model_type,
        hidden_size=hidden_size,
        vocab_size=vocab_size,
        intermediate_size=config.count("intermediate_size", default=of_experts),
        max_position_embeddings=config.count("max_position_embeddings"),
        tied_embeddings=tied,
        attention=attention,
        experts=experts,
        layers=layers,
        mtp_layers=tuple(mtp_layers),
        embedding=Part(PartKind.EMBEDDING, vocab_size * hidden_size, Split.TENSOR, quantizable=False, is_matmul=False),
        head=None if tied else matrix(PartKind.HEAD, vocab_size * hidden_size, Split.TENSOR, quantizable=False),
        final_norm=norms(hidden_size),
        is_quantized=config.values.get("quantization_config") is not None,
        linear_attention=linear_attention,
    )


def dense_architecture(
    config: ConfigJson,
    heads: GroupedAttention,
    *,
    mlp_bias: bool = False,
    num_norms: int = 2,
    num_mtp_layers: int = 0,
    ties_by_default: bool = False,
) -> Architecture:
    """Return the architecture of a family whose layers all have grouped attention and a dense MLP.

    `num_norms`: norms per layer, four if attention and MLP outputs have norms too. `ties_by_default`: default of `tie_word_embeddings`.
    """
    hidden_size, num_layers = config.count("hidden_size"), config.count("num_hidden_layers")
    attention = grouped_attention_parts(heads, hidden_size)
    mlp = dense_mlp_parts(hidden_size, config.count("intermediate_size"), bias=mlp_bias)
    layers = [dense_layer(number, attention, hidden_size, mlp, num_norms) for number in range(num_layers + num_mtp_layers)]
    mtp_layers = [mtp_layer(layer, hidden_size) for layer in layers[num_layers:]]
    return assemble(config, heads, layers[:num_layers], mtp_layers, ties_by_default=ties_by_default)


def read_expert_layers(config: ConfigJson) -> frozenset[int]:
    """Return the indices of the layers with experts: every `decoder_sparse_step`-th, except those in `mlp_only_layers`."""
    step, dense = config.count("decoder_sparse_step", default=1), config.indices("mlp_only_layers")
    return frozenset(range(step - 1, config.count("num_hidden_layers"), step)).difference(dense)


def read_num_dense_layers(config: ConfigJson, default: int) -> int:
    """Read the number of leading dense layers from `mlp_layer_types`, else from `first_k_dense_replace`."""
    types = config.per_layer("mlp_layer_types", ("dense", "sparse"))
    given = config.index("first_k_dense_replace", default)
    if types is None:
        return given
    num_dense = types.count("dense")
    if "dense" in types[num_dense:]:
        raise config.contradiction("mlp_layer_types has a dense layer after a sparse one; only leading dense layers are supported")
    if config.values.get("first_k_dense_replace") is not None and given != num_dense:
        raise config.contradiction(f"first_k_dense_replace is {given}, but mlp_layer_types has {num_dense} dense layers")
    return num_dense


def moe_architecture(config: ConfigJson, heads: GroupedAttention | LatentAttention, num_dense_layers: int) -> Architecture:
    """Return the architecture of a family like DeepSeek-V3: dense layers, then layers with experts; MTP layers have experts too."""
    hidden_size, num_layers = config.count("hidden_size"), config.count("num_hidden_layers")
    if config.count("moe_layer_freq", default=1) != 1:
        raise config.contradiction(
            f"moe_layer_freq is {config.values['moe_layer_freq']}; only 1 is supported (transformers ignores the key)"
        )
    if num_dense_layers > num_layers:
        raise config.contradiction(f"first_k_dense_replace {num_dense_layers} exceeds num_hidden_layers {num_layers}")
    if isinstance(heads, GroupedAttention):
        attention = grouped_attention_parts(heads, hidden_size)
    else:
        attention = latent_attention_parts(heads, hidden_size, bias=config.switch("attention_bias", default=False))
    experts = read_experts(config)
    mlp = dense_mlp_parts(hidden_size, config.count("intermediate_size"))
    num_all = num_layers + config.index("num_nextn_predict_layers", default=0)
    dense = [dense_layer(number, attention, hidden_size, mlp) for number in range(num_dense_layers)]
    sparse = [moe_layer(number, attention, hidden_size, experts, correction_bias=True) for number in range(num_dense_layers, num_all)]
    layers = dense + sparse
    mtp_layers = [mtp_layer(layer, hidden_size) for layer in layers[num_layers:]]
    return assemble(config, heads, layers[:num_layers], mtp_layers, experts)
