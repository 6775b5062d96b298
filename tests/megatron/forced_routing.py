"""Transformers models that send each token to given experts: the oracle of routing replay."""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from fuligo.models.routing import RoutingShape
from fuligo.types import RoutedExperts, TrainSample


def with_random_experts(samples: Sequence[TrainSample], shape: RoutingShape, *, seed: int = 0) -> list[TrainSample]:
    """Return samples with random experts per token and layer; one has a record for its first tokens only, another has none."""
    rng = np.random.default_rng(seed)

    def drawn(num_tokens: int) -> RoutedExperts:
        order = rng.random((num_tokens, len(shape.moe_layers), shape.num_experts)).argsort(-1)
        return order[..., : shape.top_k].astype(shape.dtype)

    named = [replace(sample, routed_experts=drawn(len(sample.tokens) - 1)) for sample in samples]
    named[0] = replace(named[0], routed_experts=drawn(len(named[0].tokens) - 4))
    named[1] = replace(named[1], routed_experts=None)
    return named


class ForcedModel:
    """Transformers model (qwen3_moe or glm4_moe) whose routers use given experts."""

    def __init__(self, directory: Path) -> None:
        self.model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32, attn_implementation="eager")
        self._layers = [layer.mlp for layer in self.model.model.layers if hasattr(layer.mlp, "experts")]
        self._known: list[Tensor] = []
        self.chosen: list[Tensor] = [torch.empty(0)] * len(self._layers)
        """[T - 1, K] experts of the last sample's tokens, per layer with experts."""
        self.num_changed = 0
        """Number of experts that the routers would not have chosen."""
        for number, mixture in enumerate(self._layers):
            if hasattr(mixture, "route_tokens_to_experts"):
                mixture.route_tokens_to_experts = partial(self._sigmoid, number)
            else:
                mixture.gate.forward = partial(self._softmax, number)

    def logprobs(self, sample: TrainSample) -> Tensor:
        """Return [R] log-probabilities of the response tokens."""
        known = sample.routed_experts
        shape = (0, len(self._layers), 1)
        self._known = list(torch.from_numpy(np.zeros(shape) if known is None else known.astype(np.int64)).long().unbind(1))
        ids = torch.from_numpy(sample.tokens).long()
        log_softmax = self.model(input_ids=ids[None, :-1], use_cache=False).logits[0].log_softmax(-1)
        return log_softmax.gather(1, ids[1:, None])[sample.prompt_length - 1 :, 0]

    def _force(self, number: int, own: Tensor) -> Tensor:
        known = self._known[number]
        chosen = torch.cat([known, own[len(known) :]]) if len(known) else own
        self.num_changed += int((chosen[:, :, None] != own[:, None, :]).all(-1).sum())
        self.chosen[number] = chosen
        return chosen

    def _softmax(self, number: int, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Weigh the chosen experts as Qwen3-MoE does: softmax over only these."""
        gate = self._layers[number].gate
        logits = hidden.reshape(-1, gate.weight.size(1)) @ gate.weight.T
        chosen = self._force(number, logits.topk(gate.top_k).indices)
        return logits, logits.gather(1, chosen).softmax(-1), chosen

    def _sigmoid(self, number: int, logits: Tensor) -> tuple[Tensor, Tensor]:
        """Weigh the chosen experts as GLM-4.5 does: choose by corrected scores, weigh by the uncorrected ones."""
        mixture = self._layers[number]
        scores = logits.sigmoid()
        chosen = self._force(number, (scores + mixture.gate.e_score_correction_bias).topk(mixture.top_k).indices)
        weights = scores.gather(1, chosen)
        return chosen, mixture.routed_scaling_factor * weights / weights.sum(-1, keepdim=True)
