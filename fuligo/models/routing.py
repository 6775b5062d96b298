"""Routing of tokens to experts: its layout in samples, and decoding of the routing that engines report. Imports no torch."""

from __future__ import annotations

import base64
import binascii
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fuligo.errors import ConfigError
from fuligo.models.architecture import Architecture
from fuligo.models.registry import read_architecture
from fuligo.types import RoutedExperts


@dataclass(slots=True, frozen=True)
class RoutingShape:
    """Shape of a token's routing: indices of K experts in each of M layers."""

    num_layers: int
    """Number of layers of the model, including dense layers but not MTP layers."""
    moe_layers: tuple[int, ...]
    """[M] indices of the layers with experts, from 0."""
    num_experts: int
    top_k: int
    """K, the number of experts per token."""

    @classmethod
    def of(cls, architecture: Architecture) -> RoutingShape:
        """Return the routing shape of an architecture. Raises ConfigError if the model has no experts."""
        experts = architecture.experts
        if experts is None:
            raise ConfigError(
                f"cannot replay the routing of a {architecture.model_type} model: it has no experts; "
                "remove --use-routing-replay and --use-rollout-routing-replay"
            )
        moe_layers = tuple(layer.number for layer in architecture.layers if layer.is_moe)
        return cls(architecture.num_layers, moe_layers, experts.num_experts, experts.num_experts_per_token)

    @classmethod
    def read(cls, hf_checkpoint: Path) -> RoutingShape:
        """Return the routing shape of the model in a Hugging Face directory."""
        return cls.of(read_architecture(hf_checkpoint))

    @property
    def dtype(self) -> type[np.uint8] | type[np.uint16]:
        """Smallest dtype that holds an expert's index."""
        return np.uint8 if self.num_experts <= 256 else np.uint16

    @property
    def bytes_per_token(self) -> int:
        return len(self.moe_layers) * self.top_k * np.dtype(self.dtype).itemsize

    def empty(self) -> RoutedExperts:
        """Return the routing of no tokens: [0, M, K]."""
        return np.empty((0, len(self.moe_layers), self.top_k), self.dtype)

    def decode(self, text: object, num_tokens: int) -> RoutedExperts:
        """Decode SGLang 0.5.15's `routed_experts`, base64 of int32 [tokens, all layers, K], 0 in dense layers, to [num_tokens, M, K].

        Raises ValueError if `text` is not a string, has another shape, or is not a valid choice of experts.
        """
        if not isinstance(text, str):
            raise ValueError("the answer has no routed_experts; start the engine with --enable-return-routed-experts")
        try:
            flat = np.frombuffer(base64.b64decode(text, validate=True), np.int32)
        except (binascii.Error, ValueError) as error:
            raise ValueError(f"cannot decode routed_experts as base64 of int32: {error}") from error
        expected = (num_tokens, self.num_layers, self.top_k)
        if flat.size != np.prod(expected):
            raise ValueError(
                f"routed_experts has {flat.size} numbers instead of {' x '.join(map(str, expected))} (tokens, layers, experts per token)"
            )
        chosen = flat.reshape(expected)[:, list(self.moe_layers)]
        if chosen.size and not 0 <= chosen.min() <= chosen.max() < self.num_experts:
            raise ValueError(f"routed_experts has experts from {chosen.min()} to {chosen.max()}, but the model has {self.num_experts}")
        # Engines leave zeros where they recorded nothing; since a token's experts are distinct, two equal ones reveal that.
        if self.top_k > 1 and (chosen[..., 0] == chosen[..., 1]).any():
            raise ValueError("routed_experts lists one expert twice for a token: the engine did not record all tokens")
        return chosen.astype(self.dtype)
