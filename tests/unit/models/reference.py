"""Parameter counts of transformers' models on the meta device, for comparison."""

import re
from collections import Counter
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from fuligo.models.architecture import PartKind
from fuligo.models.transformers_types import register_types

_KINDS = {
    r"embed_tokens": PartKind.EMBEDDING,
    r"per_layer_(input_gate|projection|model_projection)\.": PartKind.LAYER_INPUT,
    r"lm_head": PartKind.HEAD,
    r"indexer\.": PartKind.INDEXER,
    r"norm": PartKind.NORM,
    r"self_attn\.": PartKind.ATTENTION,
    r"linear_attn\.": PartKind.LINEAR_ATTENTION,
    r"mlp\.(gate|router)\.|\d\.router\.": PartKind.ROUTER,
    r"mlp\.experts\.|\d\.experts\.": PartKind.ROUTED_EXPERTS,
    r"mlp\.shared_expert": PartKind.SHARED_EXPERT,
    r"mlp\.": PartKind.DENSE_MLP,
}
"""Name pattern -> kind of parameter; the first match counts."""

Counts = dict[tuple[int | None, PartKind], int]
"""(layer, kind) -> parameters; layer None outside the layers."""


def build(config: dict[str, Any]) -> torch.nn.Module:
    """Build the transformers model of a config.json on the meta device."""
    register_types()
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    model.tie_weights()
    return model


def parameter_counts(model: torch.nn.Module) -> Counts:
    counts: Counter[tuple[int | None, PartKind]] = Counter()
    for name, parameter in model.named_parameters():
        kind = next(kind for pattern, kind in _KINDS.items() if re.search(pattern, name))
        counts[_layer(name), kind] += parameter.numel()
    return dict(counts)


def correction_biases(model: torch.nn.Module) -> dict[int | None, int]:
    """Return layer -> elements of the router's correction bias, which is a buffer."""
    return {_layer(name): buffer.numel() for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias")}


def _layer(name: str) -> int | None:
    match = re.search(r"layers\.(\d+)\.", name)
    return int(match[1]) if match else None
