"""Tiny checkpoints with MTP layers, and those layers in plain torch on top of a transformers model.

transformers' classes have no MTP layers. Their inputs and names are those of SGLang's glm4_moe_nextn.py and mimo_mtp.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from fuligo.types import TrainSample
from tests.megatron.checkpoints import expert_by_expert, perturb, uneven_model

_MIMO = {"eh_proj": "input_proj", "enorm": "token_layernorm", "hnorm": "hidden_layernorm", "final_norm": "final_layernorm"}
_DEEPSEEK = {"final_norm": "shared_head.norm"}


class PredictionLayer(nn.Module):
    """MTP layer: a token's hidden state and the embedding of a later token give the hidden state that predicts the token after that."""

    def __init__(self, trunk: Any) -> None:
        super().__init__()
        config = trunk.config
        norm = type(trunk.model.norm)
        self.enorm, self.hnorm, self.final_norm = (norm(config.hidden_size, config.rms_norm_eps) for _ in range(3))
        self.eh_proj = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.layer = type(trunk.model.layers[-1])(config, config.num_hidden_layers - 1)

    def forward(self, hidden: Tensor, embedded: Tensor, **layer_inputs: Any) -> Tensor:
        """Map [1, T, E] hidden states and [1, T, E] embeddings to [1, T, E]."""
        joined = self.eh_proj(torch.cat([self.enorm(embedded), self.hnorm(hidden)], dim=-1))
        output = self.layer(joined, **layer_inputs)
        return self.final_norm(output[0] if isinstance(output, tuple) else output)  # sparse attention also returns its token choice


@dataclass(slots=True)
class PredictingModel:
    """Transformers model with MTP layers; `family` is mimo, glm4_moe, glm4_moe_lite, deepseek_v32 or glm_moe_dsa."""

    family: str
    trunk: Any
    layers: nn.ModuleList

    @classmethod
    def random(cls, family: str, *, num_predictions: int = 1, **overrides: Any) -> PredictingModel:
        """Return a model with random float32 weights."""
        trunk = uneven_model("qwen2" if family == "mimo" else family, **overrides)
        layers = nn.ModuleList(PredictionLayer(trunk) for _ in range(num_predictions))
        layers.apply(trunk._init_weights)
        perturb(layers)
        return cls(family, trunk, layers)

    def logprobs(self, sample: TrainSample) -> list[Tensor]:
        """Return [R] log-probabilities by the model and by each MTP layer; 0 where a layer would need tokens before the sample."""
        ids = torch.from_numpy(sample.tokens).long()[None, :-1]
        model, positions = self.trunk.model, torch.arange(ids.size(1))[None]
        hidden = model(ids, use_cache=False).last_hidden_state
        inputs = {
            "attention_mask": torch.full((ids.size(1),) * 2, -torch.inf).triu(1)[None, None],
            "position_embeddings": model.rotary_emb(hidden, positions),
            "position_ids": positions,
        }
        found = [self._of_response(hidden, sample, 0)]
        for depth, layer in enumerate(self.layers, start=1):
            later = torch.cat([ids[:, depth:], torch.zeros_like(ids[:, :depth])], dim=1)
            hidden = layer(hidden, model.embed_tokens(later), **inputs)
            found.append(self._of_response(hidden, sample, depth))
        return found

    def _of_response(self, hidden: Tensor, sample: TrainSample, depth: int) -> Tensor:
        targets = torch.from_numpy(sample.tokens).long()[sample.prompt_length :]
        rows = torch.arange(len(targets)) + sample.prompt_length - 1 - depth
        log_softmax = self.trunk.lm_head(hidden[0, rows.clamp(min=0)]).log_softmax(-1)
        return torch.where(rows >= 0, log_softmax.gather(1, targets[:, None])[:, 0], 0.0)

    def gradients(self) -> dict[str, Tensor]:
        """Return gradients by the names of published files, expert by expert."""
        return expert_by_expert(self._published(lambda parameter: parameter.grad))

    def save(self, directory: Path) -> Path:
        """Save a Hugging Face directory."""
        config = self.trunk.config.to_dict() | {"num_nextn_predict_layers": len(self.layers)}
        if self.family == "mimo":
            config |= {"model_type": "mimo", "architectures": ["MiMoForCausalLM"]}
        (directory / "config.json").write_text(json.dumps(config))
        corrections = {n: b for n, b in self.trunk.named_buffers() if n.endswith("e_score_correction_bias")}
        save_file({**self._published(lambda p: p.detach()), **corrections}, directory / "model.safetensors")
        return directory

    def _published(self, value: Callable[[Any], Tensor | None]) -> dict[str, Tensor]:
        found = {name: value(parameter) for name, parameter in self.trunk.named_parameters()}
        first, names = self.trunk.config.num_hidden_layers, _MIMO if self.family == "mimo" else _DEEPSEEK
        for number, layer in enumerate(self.layers):
            prefix = f"model.mtp_layers.{number}" if self.family == "mimo" else f"model.layers.{first + number}"
            buffers = [(n, b) for n, b in layer.named_buffers() if n.endswith("e_score_correction_bias")]
            for name, tensor in [*layer.named_parameters(), *buffers]:
                module, _, rest = name.partition(".")
                own = rest if module == "layer" else f"{names.get(module, module)}.{rest}"
                found[f"{prefix}.{own}"] = value(tensor)
            if self.family == "mimo" and (projection := found[f"{prefix}.input_proj.weight"]) is not None:
                embedded, hidden = projection.chunk(2, dim=1)  # MiMo concatenates the hidden state first
                found[f"{prefix}.input_proj.weight"] = torch.cat([hidden, embedded], dim=1)
        return {name: tensor for name, tensor in found.items() if tensor is not None}
