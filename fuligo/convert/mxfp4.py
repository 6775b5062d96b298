"""Conversion of a checkpoint whose experts are in MXFP4 (OCP Microscaling Formats 1.0) to bfloat16, one file of weights at a time."""

from pathlib import Path

import torch
from torch import Tensor
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from fuligo.convert.dist_to_hf import write_directory
from fuligo.errors import CheckpointError
from fuligo.formats.hf_tensors import HuggingFaceTensors
from fuligo.formats.hugging_face import MXFP4, MXFP4_BLOCKS, MXFP4_SCALES, quantization_method

_CHUNK_BLOCKS = 2**20
"""Number of blocks, of 32 weights each, that are converted at a time; the temporary tensors take 0.3 GiB."""


class DequantizedTensors(HuggingFaceTensors):
    """Tensors of an MXFP4 checkpoint; `NAME_blocks` and `NAME_scales` are read as the bfloat16 tensor NAME [experts, inputs, outputs]."""

    def __init__(self, directory: Path) -> None:
        """Read the headers of all files. Raises CheckpointError if a file is damaged, or blocks and scales do not match."""
        super().__init__(directory)
        packed = sorted(name.removesuffix(MXFP4_BLOCKS) for name in self.shapes if name.endswith(MXFP4_BLOCKS))
        if not packed:
            raise CheckpointError(f"cannot convert {directory}: it has no tensor in MXFP4 (NAME{MXFP4_BLOCKS}); use it as it is")
        for name in packed:
            blocks, scales = self.shapes.pop(name + MXFP4_BLOCKS), self.shapes.pop(name + MXFP4_SCALES, None)
            if len(blocks) != 4 or scales != blocks[:3]:
                raise CheckpointError(
                    f"cannot convert {directory}: {name} has blocks {list(blocks)} and scales {list(scales or ()) or 'absent'}; they must "
                    "be [experts, outputs, blocks, bytes] and [experts, outputs, blocks]; download it again"
                )
            num_experts, outputs, num_blocks, num_bytes = blocks
            self.shapes[name] = (num_experts, 2 * num_blocks * num_bytes, outputs)
            self.dtypes[name] = torch.bfloat16
        self._packed = frozenset(packed)

    def read(self, name: str) -> Tensor:
        """Return a whole tensor on the CPU. Raises CheckpointError if its file cannot be read."""
        if name not in self._packed:
            return super().read(name)
        blocks, scales = super().read(name + MXFP4_BLOCKS), super().read(name + MXFP4_SCALES)
        return convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16, rows_per_chunk=_CHUNK_BLOCKS)


def mxfp4_to_bf16(source: Path, target: Path) -> None:
    """Write an MXFP4 model in bfloat16 to `target`, new or empty. Raises CheckpointError if `source` is not in MXFP4, or damaged."""
    method = quantization_method(source)
    if method != MXFP4:
        raise CheckpointError(
            f"cannot convert {source}: its config.json states {method or 'no'} quantization, not {MXFP4}; use it as it is"
        )
    write_directory(DequantizedTensors(source), source, target, changed={"dtype": "bfloat16"})
