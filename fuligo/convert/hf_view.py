"""View of a distributed checkpoint as Hugging Face tensors, converted on demand."""

import json
from pathlib import Path

import torch
from torch import Tensor

from fuligo.errors import CheckpointError
from fuligo.formats.checkpoint_files import MODEL_FILES
from fuligo.formats.dist_tensors import DistributedTensors
from fuligo.formats.hf_tensors import DTYPES
from fuligo.formats.hugging_face import TENSORS, read_config_json
from fuligo.models.names import EMBEDDING, HEAD, Weight, value_names
from fuligo.models.registry import names_of
from fuligo.trainer.megatron_backend.weights.forms import join_shards


class HuggingFaceView:
    """Hugging Face tensors of a distributed checkpoint.

    Tensors have the names of published checkpoints. Their dtypes are those of the Hugging Face checkpoint that training started from if
    they are recorded, else that of config.json (float32 for weights that always have it). A value model's `lm_head.weight` has one row, as
    the torch trainer saves it.
    """

    def __init__(self, directory: Path, model: Path | None = None) -> None:
        """Open a distributed checkpoint. `model`: a directory with the model's config.json; None: that in the checkpoint is used.

        Raises CheckpointError if the checkpoint is damaged or lacks weights of the model.
        """
        self.tensors = DistributedTensors(directory)
        self.model = model or directory / MODEL_FILES
        config = read_config_json(self.model)
        policy_names = names_of(config, str(self.model / "config.json"))
        self.is_value_model = self.tensors.shapes.get(HEAD) == (1, policy_names.architecture.hidden_size)
        self._names = value_names(policy_names) if self.is_value_model else policy_names
        stated: torch.dtype = getattr(torch, str(config.get("dtype") or config.get("torch_dtype") or "float32"))
        file = directory / MODEL_FILES / TENSORS
        recorded = json.loads(file.read_text()) if file.exists() else {}
        self._origin = {name: DTYPES[dtype] for name, dtype in recorded.items() if dtype in DTYPES}
        self._sources: dict[str, tuple[Weight, str]] = {}
        """Megatron weight that each tensor is made from, and the tensor's name in `weight.checkpoint`, by tensor name."""
        self.shapes: dict[str, tuple[int, ...]] = {}
        self._find()
        unrecorded = {name: torch.float32 if weight.is_float32 else stated for name, (weight, _) in self._sources.items()}
        self.dtypes = {name: self._origin.get(name, dtype) for name, dtype in unrecorded.items()}
        self._last: tuple[str, dict[str, Tensor]] | None = None

    def read(self, name: str) -> Tensor:
        """Return a whole tensor on the CPU. Raises CheckpointError if its bytes are damaged."""
        weight, part = self._sources[name]
        if self._last is None or self._last[0] != weight.megatron:
            whole = self.tensors.read(weight.megatron)
            self._last = weight.megatron, dict(join_shards(weight, [whole], self._names.architecture))
        return self._last[1][part].to(self.dtypes[name])

    def _find(self) -> None:
        for weight in self._names.weights():
            if weight.megatron not in self.tensors.shapes and weight.megatron.startswith("mtp."):
                continue  # the model was trained without MTP layers
            if (shape := self.tensors.shapes.get(weight.megatron)) != weight.shape:
                found = "is missing" if shape is None else f"has shape {shape}"
                raise CheckpointError(
                    f"cannot read {self.tensors.directory} as the model of {self.model / 'config.json'}: {weight.megatron} {found}, "
                    f"expected {weight.shape}; use the config.json of the checkpoint's model"
                )
            for name, shape in zip(weight.checkpoint, self._names.checkpoint_shapes(weight), strict=True):
                self._sources[name], self.shapes[name] = (weight, name), shape
        for name in self._origin:
            if name not in self._sources and (original := self._copied(name)) is not None:
                self._sources[name], self.shapes[name] = (original, original.checkpoint[0]), original.shape

    def _copied(self, name: str) -> Weight | None:
        """Return the weight that a tensor of the original checkpoint copies (tied head, embeddings and heads of MTP layers), or None."""
        is_tied_head = name == "lm_head.weight"
        has_mtp = any(stored.startswith("mtp.") for stored in self.tensors.shapes)
        if not self._names.is_superfluous(name, len(self._names.architecture.mtp_layers)) or not (is_tied_head or has_mtp):
            return None
        kind = next((kind for kind, end in ((HEAD, "head.weight"), (EMBEDDING, ".embed_tokens.weight")) if name.endswith(end)), None)
        return None if kind is None else self._names.by_megatron_name[kind]
