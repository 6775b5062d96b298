"""Qwen3-VL, dense (arXiv 2511.21631): Qwen3 with a vision tower whose features also enter the first layers (DeepStack)."""

from fuligo.models.architecture import Part, PartKind
from fuligo.models.config_json import ConfigJson
from fuligo.models.families import qwen3
from fuligo.models.family import Family
from fuligo.models.parts import vector


def vision_tower(whole: ConfigJson) -> Part:
    """Return the parameters of the vision tower: patch and position embeddings, blocks, and mergers, one more for each DeepStack layer."""
    config = whole.part("vision_config") or ConfigJson({}, f"{whole.source}, vision_config")
    hidden, inner, output = (config.count(key) for key in ("hidden_size", "intermediate_size", "out_hidden_size"))
    pixels = config.count("in_channels", 3) * config.count("temporal_patch_size", 2) * config.count("patch_size") ** 2
    embeddings = (pixels + 1) * hidden + config.count("num_position_embeddings") * hidden
    attention = 4 * hidden * hidden + 4 * hidden
    block = attention + 2 * hidden * inner + inner + hidden + 4 * hidden
    merged = hidden * config.count("spatial_merge_size", 2) ** 2
    merger = merged * merged + merged + merged * output + output
    num_deep = len(config.indices("deepstack_visual_indexes"))
    total = embeddings + config.count("depth") * block + (1 + num_deep) * merger + 2 * hidden + num_deep * 2 * merged
    return vector(PartKind.VISION_TOWER, total)


FAMILY = Family(
    architecture=qwen3.architecture,
    why_not_megatron="the Megatron trainer does not support its vision tower",
    whole_type="qwen3_vl",
    vision_tower=vision_tower,
)
