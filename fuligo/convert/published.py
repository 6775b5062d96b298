"""Weights of the torch trainer's checkpoint under the names of published files, which engines load."""

import torch
from torch import Tensor

from fuligo.formats.checkpoint_files import checkpoint_weights
from fuligo.formats.hf_tensors import InOwnDtypes
from fuligo.formats.hugging_face import MTP_PREFIX
from fuligo.formats.stored_experts import StoredExperts


class PublishedWeights:
    """Implementation of `dist_to_hf.Weights` that stores experts in the layout `experts` of the family's published files.

    MTP layers keep the layout of the original directory, which may differ.
    """

    def __init__(self, weights: InOwnDtypes, experts: StoredExperts) -> None:
        self._weights = weights
        self._experts = experts
        self._sources: dict[str, tuple[str, int]] = {}
        """By name of a published tensor: the stored tensor that holds it, and its index among those in the stored tensor."""
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.dtypes: dict[str, torch.dtype] = {}
        for name, shape in weights.shapes.items():
            parts = checkpoint_weights([(name, torch.empty(shape, device="meta"))], self._form(name))
            for number, (published, part) in enumerate(parts):
                self._sources[published] = name, number
                self.shapes[published], self.dtypes[published] = tuple(part.shape), weights.dtypes[name]
        self._open: tuple[str, list[Tensor]] = ("", [])

    def _form(self, name: str) -> StoredExperts:
        """Return the published layout of the experts in a stored tensor; it matters only for tensors of experts."""
        if not name.startswith(MTP_PREFIX):
            return self._experts
        return StoredExperts.WHOLE if name in self._weights.recorded else StoredExperts.APART

    def read(self, name: str) -> Tensor:
        """Return a whole tensor on the CPU. If all are read in the order of `shapes`, each stored tensor is read from disk once."""
        source, number = self._sources[name]
        if self._open[0] != source:
            stored = self._weights.read(source)
            self._open = (source, [part for _, part in checkpoint_weights([(source, stored)], self._form(source))])
        return self._open[1][number].clone()
