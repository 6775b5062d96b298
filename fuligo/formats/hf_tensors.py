"""Lazy reader of the tensors of a Hugging Face directory."""

import json
from collections import Counter
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fuligo.errors import CheckpointError
from fuligo.formats.hugging_face import TENSORS, read_stored_tensors

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""Dtypes from which training can start, by their safetensors names."""


class HuggingFaceTensors:
    """Tensors of a Hugging Face directory, read on demand. `stem`: beginning of the name of the index file."""

    def __init__(self, directory: Path, stem: str = "model") -> None:
        """Read the headers of all files. Raises CheckpointError if the directory has no tensors, or a file is damaged."""
        self._stored = read_stored_tensors(directory, stem)
        self.directory = directory
        self.shapes = {name: tensor.shape for name, tensor in self._stored.items()}
        self.dtypes = {name: DTYPES[tensor.dtype] for name, tensor in self._stored.items() if tensor.dtype in DTYPES}
        """Dtypes by name; tensors whose dtype is not in `DTYPES`, such as quantized ones, are left out."""

    def read(self, name: str) -> Tensor:
        """Return a whole tensor on the CPU. Raises CheckpointError if its file cannot be read."""
        file = self.directory / self._stored[name].file
        try:
            with safe_open(file, framework="pt") as tensors:
                return tensors.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"cannot read {file}: {error}; copy or download it again") from error


class InOwnDtypes(HuggingFaceTensors):
    """Tensors of a Hugging Face directory, converted on reading to the dtypes in its `tensors.json`; unchanged without that file."""

    def __init__(self, directory: Path) -> None:
        """Read the headers of all files. Raises CheckpointError if the directory has no tensors, or a file is damaged."""
        super().__init__(directory)
        file = directory / TENSORS
        recorded = json.loads(file.read_text()) if file.exists() else {}
        self.recorded = frozenset(recorded)
        """Names of all tensors of the directory that training started from; empty without `tensors.json`."""
        own = {name: DTYPES[dtype] for name, dtype in recorded.items() if dtype in DTYPES}
        counted = Counter(own.values() if own else self.dtypes.values())
        self.common: torch.dtype = counted.most_common(1)[0][0]
        """Dtype of most tensors, to which floating-point tensors that `tensors.json` lacks are converted."""
        if own:
            self.dtypes = {name: own.get(name, self.common) if stored.is_floating_point else stored for name, stored in self.dtypes.items()}

    def read(self, name: str) -> Tensor:
        """Return a whole tensor on the CPU. Raises CheckpointError if its file cannot be read."""
        return super().read(name).to(self.dtypes[name])
