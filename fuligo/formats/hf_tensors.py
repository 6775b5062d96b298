"""The tensors of a Hugging Face directory, each read when it is asked for."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from fuligo.errors import CheckpointError
from fuligo.formats.hugging_face import DamagedFileError, read_stored_tensors

DTYPES = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}
"""As safetensors names them: what a checkpoint that training starts from may hold."""


class HuggingFaceTensors:
    """Opening it reads what is where."""

    def __init__(self, directory: Path) -> None:
        """
        Raises:
            CheckpointError: there are none, or a file is damaged.
        """
        try:
            self._stored = read_stored_tensors(directory)
        except DamagedFileError as error:
            raise CheckpointError(str(error)) from None
        self.directory = directory
        self.shapes = {name: tensor.shape for name, tensor in self._stored.items()}
        self.dtypes = {name: DTYPES[tensor.dtype] for name, tensor in self._stored.items() if tensor.dtype in DTYPES}
        """Without tensors of other types, which are quantised."""

    def read(self, name: str) -> Tensor:
        """A whole tensor, on the CPU.

        Raises:
            CheckpointError: its file cannot be read.
        """
        file = self.directory / self._stored[name].file
        try:
            with safe_open(file, framework="pt") as tensors:
                return tensors.get_tensor(name)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{file}: cannot be read: {error}") from error
