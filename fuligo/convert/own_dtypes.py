"""Weights of the torch trainer, which keeps them in float32, in the dtypes of the model that training started from."""

import json
from collections import Counter
from pathlib import Path

import torch
from torch import Tensor

from fuligo.formats.checkpoint_files import TENSORS
from fuligo.formats.hf_tensors import DTYPES, HuggingFaceTensors


class InOwnDtypes(HuggingFaceTensors):
    """Tensors of a Hugging Face directory, converted on reading; those of a directory without a record keep their dtype."""

    def __init__(self, directory: Path) -> None:
        """Read the headers of all files.

        Raises:
            CheckpointError: the directory has no tensors, or a file is damaged.
        """
        super().__init__(directory)
        file = directory / TENSORS
        recorded = json.loads(file.read_text()) if file.exists() else {}
        own = {name: DTYPES[dtype] for name, dtype in recorded.items() if dtype in DTYPES}
        counted = Counter(own.values() if own else self.dtypes.values())
        self.common: torch.dtype = counted.most_common(1)[0][0]
        """Dtype of most tensors; also that of tensors whose name the record lacks."""
        self.dtypes = {name: own.get(name, self.common) if stored.is_floating_point else stored for name, stored in self.dtypes.items()}

    def read(self, name: str) -> Tensor:
        """Return a whole tensor on the CPU.

        Raises:
            CheckpointError: its file cannot be read.
        """
        return super().read(name).to(self.dtypes[name])
