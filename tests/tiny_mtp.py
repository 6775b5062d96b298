"""Random MTP layers of tiny Qwen3-Next and Qwen3.5 checkpoints, and the same layer in plain torch on top of a transformers model.

Inputs, norms and names are those of SGLang 0.5.15.post1 (models/qwen3_next_mtp.py, qwen3_5_mtp.py), with which tests/sglang/test_mtp.py
compares the layer.
"""

import copy
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from fuligo.formats.checkpoint_files import checkpoint_weights
from fuligo.formats.stored_experts import StoredExperts
from fuligo.models.transformers_types import model_class, read_config
from fuligo.types import TrainSample


class PlainMTP(nn.Module):
    """MTP layer: the embedding of a token's successor and the token's hidden state give the state that predicts the token after both."""

    def __init__(self, trunk: Any) -> None:
        super().__init__()
        language = _language(trunk)
        config = copy.deepcopy(language.config)
        config.num_hidden_layers, config.layer_types = 1, ["full_attention"]
        norm, size = type(language.norm), config.hidden_size
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden, self.norm = (norm(size, config.rms_norm_eps) for _ in range(3))
        self.fc = nn.Linear(2 * size, size, bias=False)
        self.layers = nn.ModuleList([type(language.layers[0])(config, 0)])

    def forward(self, hidden: Tensor, embedded: Tensor, **inputs: Any) -> Tensor:
        """Map [1, T, E] hidden states and [1, T, E] embeddings to [1, T, E]."""
        joined = self.fc(torch.cat([self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden)], dim=-1))
        return self.norm(self.layers[0](joined, **inputs))


class PredictingModel:
    """Model of a checkpoint as transformers loads it, in float32, with its MTP layer."""

    def __init__(self, checkpoint: Path) -> None:
        config = read_config(checkpoint)
        self.trunk: Any = model_class(config).from_pretrained(checkpoint, dtype=torch.float32, attn_implementation="eager")
        self.layer = PlainMTP(self.trunk)
        stored = {name.removeprefix("mtp."): tensor.float() for name, tensor in tensors_of(checkpoint).items() if name.startswith("mtp.")}
        self.layer.load_state_dict(_fused(stored))

    def logprobs(self, sample: TrainSample, *, temperature: float = 1.0) -> tuple[Tensor, Tensor]:
        """Return [R] log-probabilities by the model and by the layer; 0 where the layer would need a token before the sample."""
        ids = torch.from_numpy(sample.tokens).long()[None, :-1]
        language, length = _language(self.trunk), ids.size(1)
        hidden = language(input_ids=ids, use_cache=False).last_hidden_state
        later = torch.cat([ids[:, 1:], torch.zeros_like(ids[:, :1])], dim=1)
        positions = torch.arange(length)[None]
        inputs = {
            "attention_mask": torch.full((length, length), -torch.inf).triu(1)[None, None],
            "position_embeddings": language.rotary_emb(hidden, self._positions(positions)),
        }
        further = self.layer(hidden, language.embed_tokens(later), **inputs)
        return self._of_response(hidden, sample, 0, temperature), self._of_response(further, sample, 1, 1.0)

    def _positions(self, positions: Tensor) -> Tensor:
        """Return [1, T] positions as the rotary embedding takes them: Qwen3.5's has three axes, which are equal for text."""
        return positions if "Next" in type(self.trunk).__name__ else positions[None].expand(3, 1, -1)

    def _of_response(self, hidden: Tensor, sample: TrainSample, depth: int, temperature: float) -> Tensor:
        targets = torch.from_numpy(sample.tokens).long()[sample.prompt_length :]
        rows = torch.arange(len(targets)) + sample.prompt_length - 1 - depth
        log_softmax = (self.trunk.lm_head(hidden[0, rows.clamp(min=0)]) / temperature).log_softmax(-1)
        return torch.where(rows >= 0, log_softmax.gather(1, targets[:, None])[:, 0], 0.0)

    def gradients(self) -> dict[str, Tensor]:
        """Return the gradients by the names of the trainer's parameters."""
        found = dict(self.trunk.named_parameters()) | {f"mtp.{name}": each for name, each in self.layer.named_parameters()}
        return {name: parameter.grad for name, parameter in found.items() if parameter.grad is not None}


def add_mtp(directory: Path, *, whole_experts: bool = False, seed: int = 11, dtype: torch.dtype = torch.float32) -> Path:
    """Add a random MTP layer to the files of a checkpoint, and its number to config.json; return `directory`."""
    config = read_config(directory)
    trunk: Any = model_class(config).from_pretrained(directory, dtype=torch.float32)
    torch.manual_seed(seed)
    layer = PlainMTP(trunk)
    layer.apply(_language(trunk)._init_weights)
    for parameter in layer.parameters():
        if parameter.dim() == 1:  # norms, which begin as constants
            nn.init.normal_(parameter, std=0.2)
    named = ((f"mtp.{name}", parameter.detach().to(dtype)) for name, parameter in layer.named_parameters())
    parts = checkpoint_weights(named, StoredExperts.WHOLE if whole_experts else StoredExperts.APART)
    file = directory / "model.safetensors"
    held = {name: tensor for name, tensor in load_file(file).items() if not name.startswith("mtp.")}
    save_file(held | {name: tensor.clone() for name, tensor in parts}, file, metadata={"format": "pt"})
    written = json.loads((directory / "config.json").read_text())
    language = written.get("text_config", written)
    language["num_nextn_predict_layers" if written["model_type"] == "qwen3_next" else "mtp_num_hidden_layers"] = 1
    (directory / "config.json").write_text(json.dumps(written, indent=2))
    return directory


def tensors_of(directory: Path) -> dict[str, Tensor]:
    return {name: tensor for file in sorted(directory.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def _language(trunk: Any) -> Any:
    return getattr(trunk.base_model, "language_model", trunk.base_model)


def _fused(stored: dict[str, Tensor]) -> dict[str, Tensor]:
    """Join the experts that the files hold one by one."""
    apart = [name for name in stored if ".experts." in name and name.endswith(".weight")]
    if not apart:
        return stored
    prefix, count = apart[0].partition(".experts.")[0] + ".experts", len(apart) // 3
    gate, up, down = (
        torch.stack([stored[f"{prefix}.{expert}.{kind}_proj.weight"] for expert in range(count)]) for kind in ("gate", "up", "down")
    )
    rest = {name: tensor for name, tensor in stored.items() if name not in apart}
    return rest | {f"{prefix}.gate_up_proj": torch.cat([gate, up], dim=1), f"{prefix}.down_proj": down}
