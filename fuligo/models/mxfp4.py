"""Loading of checkpoints whose experts are in MXFP4, in the type that a model computes in."""

from typing import Any

import torch
from torch import nn
from transformers.utils.quantization_config import Mxfp4Config

from fuligo.formats.hugging_face import MXFP4


def loading_options(config: Any) -> dict[str, Any]:
    """Return the arguments of `from_pretrained` that make transformers dequantise MXFP4 to bfloat16; empty for other checkpoints."""
    return {"quantization_config": Mxfp4Config(dequantize=True)} if _is_mxfp4(config) else {}


def take_dtype(model: nn.Module, config: Any, dtype: torch.dtype) -> None:
    """Convert the parameters that transformers 5.12.1 leaves in bfloat16 whatever `dtype` it was given."""
    if _is_mxfp4(config) and dtype != torch.bfloat16:
        model.to(dtype)


def _is_mxfp4(config: Any) -> bool:
    given = getattr(config, "quantization_config", None)
    return isinstance(given, dict) and given.get("quant_method") == MXFP4
