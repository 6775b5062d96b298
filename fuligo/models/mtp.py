"""MTP layer of Qwen3-Next and Qwen3.5, which transformers 5.12.1 does not implement.

`fc` joins the normalized embedding and hidden state; a decoder layer with full attention and a norm follow, as in SGLang 0.5.15.post1
(models/qwen3_next_mtp.py, qwen3_5_mtp.py). Embedding and head are shared with the model.
"""

import copy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fuligo.errors import CheckpointError
from fuligo.formats.checkpoint_files import checkpoint_weights
from fuligo.formats.hf_tensors import HuggingFaceTensors
from fuligo.formats.hugging_face import MTP_PREFIX, is_quantized, read_config_json
from fuligo.formats.stored_experts import StoredExperts
from fuligo.models.adapter import empty_model
from fuligo.models.registry import has_mtp_module
from fuligo.models.transformers_types import language_model

_NAME = MTP_PREFIX.removesuffix(".")


class MTPModule(nn.Module):
    """MTP layer whose parameters have the names in published files, made of the classes of `language`, transformers' language model."""

    def __init__(self, language: Any) -> None:
        super().__init__()
        config = copy.deepcopy(language.config)
        config.num_hidden_layers, config.layer_types = 1, ["full_attention"]
        size, norm = config.hidden_size, type(language.norm)
        self.pre_fc_norm_embedding, self.pre_fc_norm_hidden, self.norm = (norm(size, eps=config.rms_norm_eps) for _ in range(3))
        self.fc = nn.Linear(2 * size, size, bias=False)
        self.layers = nn.ModuleList([type(language.layers[0])(config, 0)])

    def forward(self, hidden: Tensor, embedded: Tensor, **inputs: Any) -> Tensor:
        """Return [1, T, E] hidden states that predict the token after the next one.

        Args:
            hidden: [1, T, E] hidden states of the model after its final norm.
            embedded: [1, T, E] embedding of each position's next token.
            inputs: arguments of a decoder layer: rotary embeddings and the starts of packed sequences.
        """
        joined = self.fc(torch.cat([self.pre_fc_norm_embedding(embedded), self.pre_fc_norm_hidden(hidden)], dim=-1))
        return self.norm(self.layers[0](joined, **inputs))


def mtp_module(model: nn.Module) -> MTPModule | None:
    """Return the MTP layer that `add_mtp_module` added to a model; None if it has none."""
    found = getattr(model, _NAME, None)
    return found if isinstance(found, MTPModule) else None


@torch.no_grad()
def add_mtp_module(model: Any, directory: Path) -> None:
    """Add the MTP layer of a checkpoint to its model on the CPU, as submodule `mtp`; its weights get names that begin with `MTP_PREFIX`.

    Raises CheckpointError if the model's family has no MTP module, or the files do not hold a complete one.
    """
    if not has_mtp_module(read_config_json(directory)):
        raise CheckpointError(f"--mtp-num-layers: the torch trainer has no MTP layer for {model.config.model_type} models; remove the flag")
    module, files = MTPModule(language_model(model)), HuggingFaceTensors(directory)
    for stored, part in _stored_parts(module, files):
        part.copy_(files.read(stored))
    model.add_module(_NAME, module)


def mtp_problem(directory: Path) -> str | None:
    """Return why the MTP layer of a directory's files cannot be loaded; None if it can. Only headers are read."""
    with torch.device("meta"):
        module = MTPModule(language_model(empty_model(directory)))
    try:
        _stored_parts(module, HuggingFaceTensors(directory))
    except CheckpointError as error:
        return str(error)
    return None


def _stored_parts(module: MTPModule, files: HuggingFaceTensors) -> list[tuple[str, Tensor]]:
    """Return the names of the MTP tensors in the files, each with the view of the module's weights that it is copied to."""
    names = {name for name in files.shapes if name.startswith(MTP_PREFIX)}
    if not names:
        raise CheckpointError(f"--mtp-num-layers 1: {files.directory} has no MTP layer (no tensors {MTP_PREFIX}*); remove the flag")
    cannot, fix = f"cannot load the MTP layer of {files.directory}", "copy or convert the checkpoint again, or remove --mtp-num-layers"
    parts: list[tuple[str, Tensor]] = []
    for name, parameter in module.named_parameters(prefix=_NAME):
        form = StoredExperts.WHOLE if name in names else StoredExperts.APART
        for stored, part in checkpoint_weights([(name, parameter)], form):
            if (held := files.shapes.get(stored)) != tuple(part.shape):
                found = "is missing" if held is None else f"has shape {list(held)}"
                raise CheckpointError(f"{cannot}: {stored} {found}, expected {list(part.shape)}; {fix}")
            parts.append((stored, part))
    if unknown := names - dict(parts).keys():
        raise CheckpointError(f"{cannot}: unknown tensors {', '.join(sorted(unknown)[:3])}; {fix}")
    return parts


def stored_mtp(*directories: Path) -> dict[str, Tensor]:
    """Return the MTP tensors, by name, of the first of these directories that has any; quantized directories are skipped."""
    for directory in directories:
        has_weights = any(directory.glob("*.safetensors"))
        if not has_weights or is_quantized(directory) or not has_mtp_module(read_config_json(directory)):
            continue
        files = HuggingFaceTensors(directory)
        if names := [name for name in files.shapes if name.startswith(MTP_PREFIX)]:
            return {name: files.read(name).clone() for name in names}  # copies, not views of the memory map
    return {}
