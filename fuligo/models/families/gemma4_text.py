"""Gemma 4: sliding windows, two head sizes, keys and values shared between layers, per-layer embeddings, experts beside a dense MLP.

Published with vision and audio towers.
"""

from collections.abc import Mapping
from dataclasses import replace

from fuligo.formats.stored_experts import StoredExperts
from fuligo.models.architecture import Activation, Architecture, GroupedAttention, Layer, Numerics, Part, PartKind, Split
from fuligo.models.config_json import ConfigJson
from fuligo.models.families.gemma3_text import FULL, SLIDING, WINDOW_PATTERN
from fuligo.models.family import Family
from fuligo.models.parts import (
    Parts,
    assemble,
    dense_mlp_parts,
    expert_mlp_parts,
    grouped_attention_parts,
    matrix,
    norms,
    read_experts,
    read_grouped_attention,
    vector,
)

HEAD_DIM, GLOBAL_HEAD_DIM = 256, 512
WINDOW = 512
INPUT_SIZE, INPUT_VOCABULARY = 256, 262_144
"""Default width and vocabulary size of the per-layer embeddings."""


def architecture(config: ConfigJson) -> Architecture:
    """Return the shapes; without `layer_types` every sixth layer has no window, and the last layer never has one."""
    if (bidirectional := config.text("use_bidirectional_attention", default="vision")) != "vision":
        raise config.contradiction(f"use_bidirectional_attention is {bidirectional!r:.80}; only causal models are supported")
    hidden_size, num_layers = config.count("hidden_size"), config.count("num_hidden_layers")
    experts, mixture = None, ()
    if config.switch("enable_moe_block", default=False):
        experts = read_experts(config, num_experts_key="num_experts", chosen_key="top_k_experts", shared=False)
        experts = replace(experts, has_softmax_router=True)
        scales = vector(PartKind.ROUTER, hidden_size + experts.num_experts)  # of the router, per input and per expert
        mixture = (*expert_mlp_parts(experts, hidden_size), scales)
    heads, input_size = _read_heads(config), config.index("hidden_size_per_layer_input", default=INPUT_SIZE)
    # gate and output projection of a layer's per-layer embeddings
    gates = (matrix(PartKind.LAYER_INPUT, 2 * hidden_size * input_size, Split.REPLICATED, quantizable=False),) if input_size else ()
    first_borrowing = num_layers - config.index("num_kv_shared_layers", default=0)
    window, width = config.count("sliding_window", default=WINDOW), config.count("intermediate_size")
    doubles = config.switch("use_double_wide_mlp", default=False)

    def layer(number: int, kind: str) -> Layer:
        borrows = number >= first_borrowing
        own = replace(heads[kind], borrows_keys=borrows)
        size = 2 * width if doubles and borrows else width
        parts = (
            *grouped_attention_parts(own, hidden_size),
            *dense_mlp_parts(hidden_size, size),
            *mixture,
            *gates,
            norms((4 + (3 if experts else 0) + (1 if input_size else 0)) * hidden_size),
        )
        return Layer(
            number,
            parts,
            is_moe=experts is not None,
            window=window if kind == SLIDING else None,
            attention=own,
            dense_size=size,
            input_size=input_size,
        )

    kinds = _kinds(config)
    _require_lenders(config, kinds, first_borrowing)
    layers = [layer(number, kind) for number, kind in enumerate(kinds)]
    whole = assemble(config, heads[SLIDING], layers, experts=experts, ties_by_default=True)
    embedding = replace(whole.embedding, split=Split.REPLICATED)  # as in SGLang
    return replace(
        whole,
        embedding=embedding,
        layer_inputs=_layer_inputs(config, input_size, hidden_size, num_layers),
        numerics=Numerics(activation=Activation.GELU_TANH, norms_outputs=True, scales_in_float32=True, embedding_scale=hidden_size**0.5),
    )


def towers(config: ConfigJson) -> Part:
    """Return the parameters of the model's vision and audio towers, with the projections of their outputs."""
    hidden_size = ConfigJson.of(config.values, config.source).count("hidden_size")
    image, sound = config.part("vision_config"), config.part("audio_config")
    total = 0
    if image is not None:
        total += _image_tower(image) + image.count("hidden_size", default=768) * hidden_size
    if sound is not None:
        total += _audio_tower_parameters(sound) + sound.count("output_proj_dims", default=1536) * hidden_size
    return vector(PartKind.VISION_TOWER, total)


def _read_heads(config: ConfigJson) -> Mapping[str, GroupedAttention]:
    """Return the attention of layers with a window and of layers without, by layer type."""
    bias = config.switch("attention_bias", default=False)
    windowed = read_grouped_attention(config, qkv_bias=bias, output_bias=bias, qk_norm=True, default_head_dim=HEAD_DIM)
    windowed = replace(windowed, norms_values=True)
    full = replace(windowed, head_dim=config.count("global_head_dim", default=GLOBAL_HEAD_DIM))
    if config.switch("attention_k_eq_v", default=False):
        num_kv_heads = config.count("num_global_key_value_heads")
        if full.num_heads % num_kv_heads:
            raise config.contradiction(f"num_global_key_value_heads {num_kv_heads} does not divide num_attention_heads {full.num_heads}")
        full = replace(full, num_kv_heads=num_kv_heads, has_value_projection=False)
    return {SLIDING: windowed, FULL: full}


def _kinds(config: ConfigJson) -> list[str]:
    by_pattern = [SLIDING if number % WINDOW_PATTERN else FULL for number in range(1, config.count("num_hidden_layers") + 1)]
    return [*(config.per_layer("layer_types", (FULL, SLIDING)) or by_pattern)[:-1], FULL]


def _require_lenders(config: ConfigJson, kinds: list[str], first_borrowing: int) -> None:
    """Raise ConfigError unless each layer without its own keys and values has an earlier layer of its type to read them from."""
    if first_borrowing <= 0:
        raise config.contradiction(
            f"num_kv_shared_layers is {config.values['num_kv_shared_layers']}; it must be less than num_hidden_layers ({len(kinds)})"
        )
    if lacking := set(kinds[first_borrowing:]) - set(kinds[:first_borrowing]):
        raise config.contradiction(
            f"num_kv_shared_layers is {config.values['num_kv_shared_layers']}, but no {min(lacking)} layer before the last "
            f"{len(kinds) - first_borrowing} has keys and values to share"
        )


def _layer_inputs(config: ConfigJson, input_size: int, hidden_size: int, num_layers: int) -> Parts:
    """Return the per-layer embeddings of all layers, the projection of the token embedding to their size, and its norm."""
    if not input_size:
        return ()
    rows, width = config.count("vocab_size_per_layer_input", default=INPUT_VOCABULARY), num_layers * input_size
    return (
        Part(PartKind.EMBEDDING, rows * width, Split.REPLICATED, quantizable=False, is_matmul=False),
        matrix(PartKind.LAYER_INPUT, hidden_size * width, Split.REPLICATED, quantizable=False),
        norms(input_size),
    )


def _image_tower(config: ConfigJson) -> int:
    """Return the number of parameters of the vision tower: patch and position embeddings, and layers."""
    hidden, inner = config.count("hidden_size", default=768), config.count("intermediate_size", default=3072)
    head_dim = config.count("head_dim", default=64)
    query, key = (config.count(f"num_{name}_heads", default=12) * head_dim for name in ("attention", "key_value"))
    pixels, positions = 3 * config.count("patch_size", default=16) ** 2, config.count("position_embedding_size", default=10_240)
    attention = 2 * hidden * (query + key) + 2 * head_dim
    layer = attention + 3 * hidden * inner + 4 * hidden
    return (pixels + 2 * positions) * hidden + config.count("num_hidden_layers", default=16) * layer


def _audio_tower_parameters(config: ConfigJson) -> int:
    """Return the number of parameters of the audio tower: convolutions before the layers, layers, and output projection."""
    hidden, output = config.count("hidden_size", default=1024), config.count("output_proj_dims", default=1536)
    channels = config.indices("subsampling_conv_channels") or (128, 32)
    if len(channels) != 2:
        raise config.contradiction(f"subsampling_conv_channels is {list(channels)}; it must have two numbers")
    first, second = channels
    before = 9 * first + first + 9 * first * second + second + first // 4 * second * hidden
    attention = 5 * hidden * hidden + hidden // config.count("num_attention_heads", default=8)
    feed_forward = 8 * hidden * hidden + 2 * hidden
    convolution = 3 * hidden * hidden + hidden * config.count("conv_kernel_size", default=5) + 2 * hidden
    layer = attention + 2 * feed_forward + convolution + 3 * hidden
    return before + config.count("num_hidden_layers", default=12) * layer + hidden * output + output


FAMILY = Family(
    architecture=architecture,
    why_not_megatron="the Megatron trainer supports neither two head sizes nor keys and values shared between layers",
    why_not_sglang="SGLang 0.5.15.post1 reads its head sizes only from the config.json of the published model with its towers",
    whole_type="gemma4",
    vision_tower=towers,
    sees_images=False,
    stored_experts=StoredExperts.WHOLE,
    sglang_attention=("triton", "trtllm_mha"),
    has_window_pool=True,
)
