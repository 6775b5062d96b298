"""GLM-5: DeepSeek-V3.2's layers, only some of which have an indexer (arXiv 2603.12201).

Layers without an indexer reuse the token choice of the nearest layer below that has one.
"""

from dataclasses import replace

from fuligo.models.architecture import Architecture, Layer, PartKind
from fuligo.models.config_json import ConfigJson
from fuligo.models.families import deepseek_v32
from fuligo.models.family import Family, ModelArgs


def architecture(config: ConfigJson) -> Architecture:
    every = deepseek_v32.architecture(config)
    computing = _computing_layers(config)
    # MTP layers keep their indexer: they have no layer below whose token choice they could reuse.
    return replace(
        every, layers=tuple(layer if computes else _without_indexer(layer) for layer, computes in zip(every.layers, computing, strict=True))
    )


def _without_indexer(layer: Layer) -> Layer:
    return replace(layer, parts=tuple(part for part in layer.parts if part.kind is not PartKind.INDEXER), computes_index=False)


def _computing_layers(config: ConfigJson) -> tuple[bool, ...]:
    """Return for each layer whether it has an indexer, by `indexer_types`, else `index_topk_pattern`, else frequency and offset."""
    num_layers = config.count("num_hidden_layers")
    frequency = config.count("index_topk_freq", default=1)
    offset = config.index("index_skip_topk_offset", default=2)
    by_schedule = tuple(max(number - offset + 1, 0) % frequency == 0 for number in range(num_layers))
    pattern = config.text("index_topk_pattern", default="")
    if pattern:
        if len(pattern) != num_layers or set(pattern) - {"F", "S"}:
            raise config.contradiction(f"index_topk_pattern must be {num_layers} letters (num_hidden_layers), F or S")
        by_schedule = tuple(letter == "F" for letter in pattern)
    types = config.per_layer("indexer_types", ("full", "shared"))
    computing = by_schedule if types is None else tuple(word == "full" for word in types)
    has_schedule = bool(pattern) or config.values.get("index_topk_freq") is not None
    if has_schedule and computing != by_schedule:
        key = "index_topk_pattern" if pattern else f"index_topk_freq {frequency} and index_skip_topk_offset {offset}"
        raise config.contradiction(f"indexer_types does not agree with {key}; remove one of them")
    if not computing[0]:
        raise config.contradiction(
            "the first layer must compute its token choice (indexer_types, index_topk_pattern): no layer below it has one to reuse"
        )
    return computing


FAMILY = Family(
    architecture=architecture,
    names=deepseek_v32.names,
    why_not_transformers=deepseek_v32.WHY_NOT_TRANSFORMERS,
    model_args=ModelArgs(
        identified_by={"experimental_attention_variant": "dsa"},
        precedence=7,
        is_latent=True,
        needs_experts=True,
        specs=("slime_plugins.models.glm5.glm5.get_glm5_spec",),
        incomplete_because="no flag says which layers compute their token choice",
    ),
)
