"""Format of FP8 checkpoints: quantized tensors, names of scales, and `quantization_config` in config.json. Pure Python.

A weight is a float8 e4m3 value times the scale of its block (tiles of a matrix as in DeepSeek-V3, arXiv 2412.19437, section 3.3). Block
scales follow the published DeepSeek, Qwen and GLM checkpoints (`quant_method` fp8); channel and tensor scales follow compressed-tensors.
transformers 5.12.1 and SGLang 0.5.15.post1 load both.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any, Literal, get_args

from fuligo.errors import ConfigError
from fuligo.formats.hugging_face import MXFP4, DamagedFileError, read_config_json, read_stored_tensors

Strategy = Literal["block", "channel", "tensor"]
STRATEGIES: Mapping[Strategy, str] = {
    "block": "one scale per block",
    "channel": "one scale per output channel",
    "tensor": "one scale per tensor",
}
assert get_args(Strategy) == tuple(STRATEGIES)
DEFAULT_BLOCK = (128, 128)
"""Block size that DeepEP and DeepGEMM support."""

_MATRICES = {
    *("q_proj", "k_proj", "v_proj", "o_proj"),
    *("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"),  # latent attention
    *("wq_b", "wk"),  # the indexer of sparse attention
    *("gate_proj", "up_proj", "down_proj", "gate_up_proj"),
}
"""Modules whose weight is quantized; norms, embeddings, the head, routers, `eh_proj` and `weights_proj` are not."""
_FUSED_EXPERTS = re.compile(r"(?P<experts>.+\.experts)\.(?P<projection>gate_up_proj|down_proj)")
_NEVER = "lm_head"
"""Module that is listed as not quantized even if it is tied to the embedding: transformers would otherwise make it an FP8 layer."""

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Quantization:
    """Granularity of the scales."""

    strategy: Strategy
    block_size: tuple[int, int] | None = None
    """[rows, columns] of a block; None for the other strategies."""

    def __post_init__(self) -> None:
        assert (self.block_size is not None) == (self.strategy == "block")

    def block_of(self, shape: Shape) -> tuple[int, int]:
        """Return the numbers of rows and columns of a matrix of `shape` that share a scale."""
        if self.block_size is not None:
            return self.block_size
        rows, columns = shape
        return (1, columns) if self.strategy == "channel" else (rows, columns)

    def scale_shape(self, shape: Shape) -> Shape:
        """Return the shape of a matrix's scales: [blocks down, blocks across], [rows, 1] by channel, or [1] by tensor."""
        if self.strategy == "tensor":
            return (1,)
        return tuple(ceil(size / block) for size, block in zip(shape, self.block_of(shape), strict=True))

    def scale_name(self, name: str) -> str:
        """Return the name of the scale tensor of weight `name`."""
        return f"{name}_scale_inv" if self.strategy == "block" else f"{name}_scale"

    def quantization_config(self, unquantized: Sequence[str]) -> dict[str, Any]:
        """Return the `quantization_config` of config.json. `unquantized`: modules with a matrix that is not quantized."""
        kept = sorted({*unquantized, _NEVER})
        if self.block_size is not None:
            return {
                "quant_method": "fp8",
                "fmt": "e4m3",
                "activation_scheme": "dynamic",
                "weight_block_size": list(self.block_size),
                "modules_to_not_convert": kept,
            }
        number = {"num_bits": 8, "type": "float", "symmetric": True}
        group = {
            "targets": ["Linear"],
            "weights": {**number, "strategy": self.strategy, "dynamic": False},
            "input_activations": {**number, "strategy": "token" if self.strategy == "channel" else "tensor", "dynamic": True},
        }
        return {
            "quant_method": "compressed-tensors",
            "format": "float-quantized",
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "ignore": kept,
        }


def is_quantized_matrix(name: str, shape: Shape) -> bool:
    """Return whether the weight `name` is stored in FP8 in an FP8 checkpoint."""
    module, _, kind = name.rpartition(".")
    return kind == "weight" and len(shape) == 2 and module.rpartition(".")[2] in _MATRICES


@dataclass(frozen=True, slots=True)
class ExpertPart:
    """Matrix of one expert inside a tensor that fuses all experts of a layer."""

    name: str
    expert: int
    first_row: int
    num_rows: int


def expert_parts(name: str, shape: Shape) -> list[ExpertPart]:
    """Return the matrices fused in `experts.gate_up_proj` [E, 2 * intermediate, hidden] or `experts.down_proj` [E, hidden, intermediate].

    transformers 5 fuses experts in memory; most checkpoints and engines have separate matrices for each expert. Empty for any other tensor.
    """
    match = _FUSED_EXPERTS.fullmatch(name)
    if match is None or len(shape) != 3:
        return []
    num_experts, num_rows, _ = shape
    projections = ("gate_proj", "up_proj") if match["projection"] == "gate_up_proj" else ("down_proj",)
    share = num_rows // len(projections)
    return [
        ExpertPart(f"{match['experts']}.{expert}.{projection}.weight", expert, number * share, share)
        for expert in range(num_experts)
        for number, projection in enumerate(projections)
    ]


@dataclass(frozen=True, slots=True)
class EngineQuantization:
    """Quantization of the checkpoint that engines were started from; synced weights must use the same."""

    quantization: Quantization
    names: frozenset[str]
    """Names of the weights stored in FP8."""

    @classmethod
    def read(cls, directory: Path) -> EngineQuantization | None:
        """Read a directory's quantization; None if it has none. Raises ConfigError unless it is FP8 by blocks, which engines can update."""
        config = read_config_json(directory).get("quantization_config")
        if config is None:
            return None
        quantization = _published_blocks(config, directory)
        try:
            stored = read_stored_tensors(directory)
        except DamagedFileError as error:
            raise ConfigError(str(error)) from None
        names = frozenset(name for name in stored if quantization.scale_name(name) in stored)
        if not names:
            raise ConfigError(
                f"cannot use {directory}: config.json has a quantization_config, but no tensor has scales; use the weights' own config.json"
            )
        return cls(quantization, names)


def unsupported_in_updates(values: Mapping[str, Any]) -> list[str]:
    """Return what in a `quantization_config` keeps SGLang from updating the weights; empty for FP8 in blocks."""
    expected = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "scale_fmt": "float"}
    other = [f"{key} {values[key]}" for key, value in expected.items() if values.get(key, value) != value]
    block = values.get("weight_block_size")
    if not isinstance(block, list) or len(block) != 2 or any(not isinstance(size, int) or size < 1 for size in block):
        other.append("no weight_block_size of two numbers")
    return other


def _published_blocks(config: Any, directory: Path) -> Quantization:
    """Return the block quantization that a `quantization_config` describes.

    Raises ConfigError for other quantizations: SGLang transposes weights with channel or tensor scales on loading and cannot update them in
    place, nor experts in MXFP4.
    """
    values = config if isinstance(config, Mapping) else {}
    if values.get("quant_method") == MXFP4:
        raise ConfigError(
            f"cannot sync weights to engines on {directory}: they cannot update experts in MXFP4; let them serve bfloat16: "
            f"fuligo convert mxfp4-to-bf16 --hf-checkpoint {directory} --save DIR"
        )
    other = unsupported_in_updates(values)
    if other:
        raise ConfigError(
            f"cannot sync weights to engines on {directory}: its quantization does not support updates ({', '.join(other)}); "
            "convert the bf16 checkpoint with fuligo convert fp8 --strategy block"
        )
    rows, columns = values["weight_block_size"]
    return Quantization("block", (rows, columns))
