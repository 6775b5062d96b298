"""Tiny Qwen3-VL and Qwen3.5 checkpoints for tests: random weights, a tokenizer with image tokens, an image processor; and images."""

import functools
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from safetensors.torch import load_file, save_file
from tokenizers import AddedToken
from transformers import AutoConfig, AutoModelForImageTextToText, PreTrainedTokenizerFast

from fuligo.models.vision.processor import ImageProcessor, image_digest
from fuligo.types import PromptImage
from tests import tiny, tiny_mtp

VISION_TOKENS = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
CHAT_TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>"
    "{% if message['content'] is string %}{{ message['content'] }}{% else %}"
    "{% for part in message['content'] %}{% if part['type'] == 'image' %}<|vision_start|><|image_pad|><|vision_end|>"
    "{% else %}{{ part['text'] }}{% endif %}{% endfor %}{% endif %}<|end|>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)
PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "patch_size": 4,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "size": {"shortest_edge": 64, "longest_edge": 4096},
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}
"""An image token is 8 x 8 pixels."""


@functools.cache
def tokenizer() -> PreTrainedTokenizerFast:
    """Return the tokenizer of `tiny` with the tokens of images, and a chat template that writes them."""
    tok = tiny.tokenizer.__wrapped__(396)
    tok.add_tokens([AddedToken(text, special=True, normalized=False) for text in VISION_TOKENS], special_tokens=True)
    tok.chat_template = CHAT_TEMPLATE
    return tok


def token_id(text: str) -> int:
    found = tokenizer().convert_tokens_to_ids(text)
    assert isinstance(found, int)
    return found


def token_ids() -> dict[str, int]:
    """Return the keys of config.json for the tokens of images."""
    keys = ("vision_start_token_id", "vision_end_token_id", "image_token_id", "video_token_id")
    return {key: token_id(text) for key, text in zip(keys, VISION_TOKENS, strict=True)}


LANGUAGE: dict[str, dict] = {
    "qwen3_vl": {"head_dim": 16},
    "qwen3_5": {**tiny.FAMILIES["qwen3_5_text"], "full_attention_interval": 3},
    "qwen3_5_moe": {**tiny.FAMILIES["qwen3_5_moe_text"], "full_attention_interval": 3},
}
"""Language models by the type of the whole model."""


def model_config(family: str = "qwen3_vl", *, tied: bool = True, layers: int = 3) -> AutoConfig:
    text = tiny.model_config("qwen3", layers=layers).to_dict()
    kept = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "num_key_value_heads")
    rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2], "mrope_interleaved": True}
    is_hybrid = "layer_types" in LANGUAGE[family]
    layer_types = {"layer_types": ["linear_attention", "linear_attention", "full_attention"][:layers]} if is_hybrid else {}
    return AutoConfig.for_model(
        family,
        **token_ids(),
        tie_word_embeddings=tied,
        text_config={
            **{name: text[name] for name in kept},
            **LANGUAGE[family],
            **layer_types,
            "max_position_embeddings": 1024,
            "rope_parameters": {**rope, **({"partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]} if is_hybrid else {})},
            "tie_word_embeddings": tied,
            "initializer_range": 0.1,
            "eos_token_id": tiny.EOS_ID,
            "pad_token_id": tiny.PAD_ID,
        },
        vision_config={
            "depth": 3,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_heads": 2,
            "patch_size": 4,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
            "out_hidden_size": text["hidden_size"],
            "num_position_embeddings": 64,
            "deepstack_visual_indexes": [] if is_hybrid else [0, 1],
            "initializer_range": 0.1,
        },
    )


def gemma4_config(**shape) -> AutoConfig:
    """Return the config of a tiny whole Gemma 4, with towers for images and sounds, whose tokens are beyond its vocabulary."""
    text: Any = tiny.model_config("gemma4_text", **{**tiny.GEMMA4, **shape})
    tower = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}
    vision = {"intermediate_size": 48, "num_key_value_heads": 2, "head_dim": 16, "global_head_dim": 16, "position_embedding_size": 64}
    clipped = {"standardize": True, "use_clipped_linears": True}
    return AutoConfig.for_model(
        "gemma4",
        text_config=text.to_dict(),
        vision_config={**tower, **vision, **clipped},
        audio_config={**tower, "output_proj_dims": 48, "subsampling_conv_channels": [8, 4]},
        **{f"{name}_token_id": 400 + number for number, name in enumerate(("image", "video", "audio", "boi", "eoi", "boa"))},
        eoa_token_index=406,
    )


def save_gemma4(directory: Path, *, seed: int = 0, **shape) -> Path:
    """Save a whole Gemma 4 without an image processor, which fuligo does not use; return `directory`."""
    torch.manual_seed(seed)
    model = AutoModelForImageTextToText.from_config(gemma4_config(**shape)).float().eval()
    tiny.spread(model)
    model.generation_config.eos_token_id = tiny.EOS_ID
    model.save_pretrained(directory)
    tiny.tokenizer().save_pretrained(directory)
    return directory


def save_checkpoint(directory: Path, family: str = "qwen3_vl", *, seed: int = 0, has_processor: bool = True, **shape) -> Path:
    """Save a Hugging Face directory with the model, the tokenizer and the image processor's settings; return `directory`."""
    torch.manual_seed(seed)
    model = AutoModelForImageTextToText.from_config(model_config(family, **shape)).float().eval()
    tiny.spread(model)
    model.generation_config.eos_token_id = tiny.EOS_ID
    model.save_pretrained(directory)
    tokenizer().save_pretrained(directory)
    if has_processor:
        (directory / "preprocessor_config.json").write_text(json.dumps(PROCESSOR))
    return directory


@torch.no_grad()
def save_as_published(directory: Path, family: str, *, whole_mtp_experts: bool = False, **shape) -> Path:
    """Save a Qwen3.5 checkpoint as the published ones are; return `directory`.

    It is in bfloat16 but for the decay rates and norms of Gated DeltaNet, has all experts of a layer in one tensor, and an MTP layer, whose
    experts are in one tensor if `whole_mtp_experts`.
    """
    save_checkpoint(directory, family, has_processor=False, **shape)
    model = AutoModelForImageTextToText.from_pretrained(directory)
    model.save_pretrained(directory, save_original_format=False)  # as in memory
    file = directory / "model.safetensors"
    tensors = {name: tensor.to(stored_dtype(name)) for name, tensor in load_file(file).items()}
    save_file(tensors, file, metadata={"format": "pt"})
    tiny_mtp.add_mtp(directory, whole_experts=whole_mtp_experts, dtype=torch.bfloat16)
    config = json.loads((directory / "config.json").read_text())
    config["text_config"] |= {"dtype": "bfloat16", "mtp_num_hidden_layers": 1, "mamba_ssm_dtype": "float32", "output_gate_type": "swish"}
    del config["dtype"], config["vision_config"]["dtype"]
    (directory / "config.json").write_text(json.dumps(config))
    return directory


def save_gemma4_as_published(directory: Path) -> Path:
    """Save a whole Gemma 4 in bfloat16; return `directory`."""
    save_gemma4(directory)
    model = AutoModelForImageTextToText.from_pretrained(directory, dtype=torch.bfloat16)
    for buffer in model.buffers():
        buffer.data = buffer.to(torch.bfloat16)
    model.save_pretrained(directory)
    return directory


def stored_dtype(name: str) -> torch.dtype:
    """Return the dtype of a tensor in published Qwen3.5 checkpoints."""
    return torch.float32 if name.endswith(("linear_attn.A_log", "linear_attn.norm.weight")) else torch.bfloat16


def png(width: int, height: int, seed: int = 0) -> bytes:
    """Return an image of random pixels."""
    pixels = np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    return file.getvalue()


def blank_png(width: int, height: int) -> bytes:
    """Return an image of one color, which takes few bytes."""
    file = io.BytesIO()
    Image.new("1", (width, height)).save(file, "PNG")
    return file.getvalue()


def decoded(data: bytes) -> Image.Image:
    return Image.open(io.BytesIO(data)).convert("RGB")


def prompt_of(processor: ImageProcessor, *parts: bytes | list[int]) -> tuple[np.ndarray, tuple[PromptImage, ...]]:
    """Return the token ids of a prompt, and its images: each of `parts` is an image or token ids."""
    ids: list[int] = []
    images: list[PromptImage] = []
    for part in parts:
        if isinstance(part, list):
            ids += part
            continue
        grid = processor.grid(part)
        ids.append(token_id("<|vision_start|>"))
        images.append(PromptImage("a test", part, image_digest(part), len(ids), grid.num_rows, grid.num_columns))
        ids += [token_id("<|image_pad|>")] * images[-1].num_tokens + [token_id("<|vision_end|>")]
    return np.asarray(ids, np.int32), tuple(images)
