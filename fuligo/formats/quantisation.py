"""FP8 checkpoints: which tensors are quantised, what their scales are called, and the `quantization_config` of config.json. Pure Python.

Values are float8 e4m3, each multiplied by the scale of its block: that of DeepSeek-V3 (arXiv 2412.19437, section 3.3) where a block is a
tile of the matrix. Blocks are written as published DeepSeek, Qwen and GLM checkpoints have them (`quant_method` fp8), channels and tensors
as compressed-tensors does: what transformers 5.12.1 and SGLang 0.5.15.post1 load.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import ceil
from pathlib import Path
from typing import Any, Literal, get_args

from fuligo.errors import ConfigError
from fuligo.formats.hugging_face import DamagedFileError, read_config_json, read_stored_tensors

Strategy = Literal["block", "channel", "tensor"]
STRATEGIES: Mapping[Strategy, str] = {"block": "a scale a block", "channel": "a scale an output channel", "tensor": "a scale a tensor"}
assert get_args(Strategy) == tuple(STRATEGIES)
DEFAULT_BLOCK = (128, 128)
"""What DeepEP and DeepGEMM take."""

_MATRICES = {
    *("q_proj", "k_proj", "v_proj", "o_proj"),
    *("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj"),  # latent attention
    *("wq_b", "wk"),  # the indexer of sparse attention
    *("gate_proj", "up_proj", "down_proj", "gate_up_proj"),
}
"""Modules whose weight is quantised. Norms, embeddings, the head, routers, `eh_proj` and `weights_proj` are not among them."""
_FUSED_EXPERTS = re.compile(r"(?P<experts>.+\.experts)\.(?P<projection>gate_up_proj|down_proj)")
_NEVER = "lm_head"
"""Named also where it is tied to the embedding: transformers would make an FP8 layer of it."""

Shape = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Quantisation:
    """What shares a scale."""

    strategy: Strategy
    block_size: tuple[int, int] | None = None
    """Rows and columns of a block; None for the other strategies."""

    def __post_init__(self) -> None:
        assert (self.block_size is not None) == (self.strategy == "block")

    def block_of(self, shape: Shape) -> tuple[int, int]:
        """Rows and columns of a matrix of `shape` that share a scale."""
        if self.block_size is not None:
            return self.block_size
        rows, columns = shape
        return (1, columns) if self.strategy == "channel" else (rows, columns)

    def scale_shape(self, shape: Shape) -> Shape:
        """Of the scales of a matrix of `shape`: [rows of blocks, columns of blocks], [rows, 1], or [1]."""
        if self.strategy == "tensor":
            return (1,)
        return tuple(ceil(size / block) for size, block in zip(shape, self.block_of(shape), strict=True))

    def scale_name(self, name: str) -> str:
        """Of the tensor beside the weight `name`."""
        return f"{name}_scale_inv" if self.strategy == "block" else f"{name}_scale"

    def quantization_config(self, unquantised: Sequence[str]) -> dict[str, Any]:
        """For config.json.

        Args:
            unquantised: modules with a matrix that stays as it is.
        """
        kept = sorted({*unquantised, _NEVER})
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


def is_quantised_matrix(name: str, shape: Shape) -> bool:
    """Whether the weight `name` of a checkpoint is stored in FP8."""
    module, _, kind = name.rpartition(".")
    return kind == "weight" and len(shape) == 2 and module.rpartition(".")[2] in _MATRICES


@dataclass(frozen=True, slots=True)
class ExpertPart:
    """A matrix of one expert, as a part of a tensor that holds all experts of a layer."""

    name: str
    """As published checkpoints name it."""
    expert: int
    first_row: int
    num_rows: int


def expert_parts(name: str, shape: Shape) -> list[ExpertPart]:
    """The matrices in `experts.gate_up_proj` [experts, 2 * intermediate, hidden] or `experts.down_proj` [experts, hidden, intermediate].

    transformers 5 keeps experts so in memory; checkpoints, and engines, have each expert's matrices apart. Empty for any other tensor.
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
class EngineQuantisation:
    """How the checkpoint that engines started from is quantised: new weights must come in the same form."""

    quantisation: Quantisation
    names: frozenset[str]
    """Weights that it stores in FP8."""

    @classmethod
    def read(cls, directory: Path) -> EngineQuantisation | None:
        """Of a Hugging Face directory; None where it is not quantised.

        Raises:
            ConfigError: it is quantised otherwise than in blocks, which engines do not take new weights for; or it is damaged.
        """
        config = read_config_json(directory).get("quantization_config")
        if config is None:
            return None
        quantisation = _published_blocks(config, directory)
        try:
            stored = read_stored_tensors(directory)
        except DamagedFileError as error:
            raise ConfigError(str(error)) from None
        names = frozenset(name for name in stored if quantisation.scale_name(name) in stored)
        if not names:
            raise ConfigError(f"{directory} has a quantization_config, and no tensor with scales: its config.json is another model's")
        return cls(quantisation, names)


def _published_blocks(config: Any, directory: Path) -> Quantisation:
    """SGLang transposes weights with a scale a channel or a tensor when it loads them, and cannot load others in their place."""
    expected = {"quant_method": "fp8", "fmt": "e4m3", "activation_scheme": "dynamic", "scale_fmt": "float"}
    values = config if isinstance(config, Mapping) else {}
    other = [f"{key} {values[key]}" for key, value in expected.items() if values.get(key, value) != value]
    block = values.get("weight_block_size")
    if not isinstance(block, list) or len(block) != 2 or any(not isinstance(size, int) or size < 1 for size in block):
        other.append("no weight_block_size of two numbers")
    if other:
        raise ConfigError(
            f"{directory} is quantised in a way in which engines take no new weights from the trainer ({', '.join(other)}): "
            "convert the bf16 checkpoint with fuligo convert fp8 --strategy block"
        )
    rows, columns = values["weight_block_size"]
    return Quantisation("block", (rows, columns))
