"""Which experts each token went to: what of it is kept, and how engines report it. Pure Python and numpy."""

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
    """Of the experts that one token of a model goes to. M layers have experts, of which a token uses K each."""

    num_layers: int
    """Of the model, dense ones included, prediction layers not."""
    moe_layers: tuple[int, ...]
    """[M] numbers of the layers with experts, from 0."""
    num_experts: int
    top_k: int
    """K"""

    @classmethod
    def of(cls, architecture: Architecture) -> RoutingShape:
        """
        Raises:
            ConfigError: the model has no experts.
        """
        experts = architecture.experts
        if experts is None:
            raise ConfigError(
                f"routing replay (--use-routing-replay, --use-rollout-routing-replay) of a {architecture.model_type} model: "
                "it has no experts; leave the flags out"
            )
        moe_layers = tuple(layer.number for layer in architecture.layers if layer.is_moe)
        return cls(architecture.num_layers, moe_layers, experts.num_experts, experts.num_experts_per_token)

    @classmethod
    def read(cls, hf_checkpoint: Path) -> RoutingShape:
        """Of the model that a Hugging Face directory holds.

        Raises:
            ConfigError: it has no experts, or its shape is not known.
        """
        return cls.of(read_architecture(hf_checkpoint))

    @property
    def dtype(self) -> type[np.uint8] | type[np.uint16]:
        """The smallest that holds an expert's number."""
        return np.uint8 if self.num_experts <= 256 else np.uint16

    @property
    def bytes_per_token(self) -> int:
        return len(self.moe_layers) * self.top_k * np.dtype(self.dtype).itemsize

    def empty(self) -> RoutedExperts:
        """Of no tokens: [0, M, K]."""
        return np.empty((0, len(self.moe_layers), self.top_k), self.dtype)

    def decode(self, text: object, num_tokens: int) -> RoutedExperts:
        """What SGLang 0.5.15 answers as `routed_experts`: base64 of int32 [tokens, all layers, K], zeros in dense layers.

        Returns:
            [num_tokens, M, K]

        Raises:
            ValueError: it is missing, of another shape, or no choice of experts; says which.
        """
        if not isinstance(text, str):
            raise ValueError("routed_experts are missing from the answer: the engine must run with --enable-return-routed-experts")
        try:
            flat = np.frombuffer(base64.b64decode(text, validate=True), np.int32)
        except (binascii.Error, ValueError) as error:
            raise ValueError(f"routed_experts are not base64 of int32: {error}") from error
        expected = (num_tokens, self.num_layers, self.top_k)
        if flat.size != np.prod(expected):
            raise ValueError(
                f"routed_experts are {flat.size} numbers, not {' x '.join(map(str, expected))} (tokens, layers, experts a token)"
            )
        chosen = flat.reshape(expected)[:, list(self.moe_layers)]
        if chosen.size and not 0 <= chosen.min() <= chosen.max() < self.num_experts:
            raise ValueError(f"routed_experts name experts from {chosen.min()} to {chosen.max()}, the model has {self.num_experts}")
        # What an engine has not recorded is zeros. Experts of a token differ, so looking at two tells.
        if self.top_k > 1 and (chosen[..., 0] == chosen[..., 1]).any():
            raise ValueError("routed_experts name one expert twice for a token: the engine has not recorded all of its tokens")
        return chosen.astype(self.dtype)
