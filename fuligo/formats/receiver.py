"""Receiving side of a weight sync: checks a bucket completely, then copies it into the loaded model."""

from typing import Any, cast

import torch
from transformers.modeling_utils import PreTrainedModel
from transformers.models.auto.modeling_auto import AutoModelForCausalLM, AutoModelForImageTextToText

from fuligo.errors import WeightSyncError
from fuligo.formats.adapter_config import is_adapter_name, stored_name
from fuligo.formats.checkpoint_files import checkpoint_weights, prediction_prefixes
from fuligo.formats.payload import NamedTensors
from fuligo.formats.stored_experts import StoredExperts
from fuligo.formats.weight_manifest import weights_checksum
from fuligo.quantities import count


class WeightStore:
    """Parameters and persistent buffers of a model, by the names of its checkpoint, with routed experts in the form `experts`.

    A weight sync may arrive in several buckets; the last one carries the new version. A sync whose first bucket has only tensors of a LoRA
    adapter must contain the whole adapter; any other sync must contain all weights. Tensors of MTP layers (`prediction_prefixes`) are
    skipped, because transformers' models do not have them.
    """

    def __init__(self, module: PreTrainedModel, *, experts: StoredExperts) -> None:
        self.module = module
        self.version = 0
        self.num_loads = 0
        """Number of buckets and directories loaded so far."""
        self._unused = prediction_prefixes(module.config.to_dict())
        self._experts = experts
        self.adapter_digest = _adapter_digest(self._under_all_names())
        """Digest of the adapter at the start, then after the last complete sync; None without one."""
        self._missing: set[str] = set()
        """Names that an unfinished weight sync still has to send; empty if none is in progress."""

    @property
    def torn(self) -> bool:
        """True while a sync is unfinished and weights have mixed versions, so that nothing may be sampled."""
        return bool(self._missing)

    def named_weights(self) -> dict[str, torch.Tensor]:
        """Return views of the model's weights, tied ones once, under their first name."""
        weights = self._under_all_names()
        first_names = _first_names(weights)
        return {name: tensor for name, tensor in weights.items() if first_names[name] == name}

    def load_tensors(self, tensors: NamedTensors, version: int | None, *, source: str = "this bucket") -> None:
        """Load one bucket. The last bucket comes with a `version`; by then every weight must have been sent.

        Raises WeightSyncError for an unknown name, a wrong shape or dtype, or weights missing at the end; then nothing of this
        bucket is loaded.
        """
        tensors = [(name, tensor) for name, tensor in tensors if not name.startswith(self._unused)]
        weights = self._under_all_names()
        first_names = _first_names(weights)
        problems = [problem for name, tensor in tensors if (problem := _misfit(name, tensor, weights.get(name)))]
        is_adapter_alone = bool(tensors) and all(is_adapter_name(name) for name, _ in tensors)
        expected = self._missing or {first for first in first_names.values() if is_adapter_name(first) or not is_adapter_alone}
        missing = expected - {first_names[name] for name, _ in tensors if name in first_names}
        if version is not None:
            problems += [f"{name} was not sent" for name in weights if name in missing]
        if problems:
            more = f" and {count(len(problems) - 8, 'more problem')}" if len(problems) > 8 else ""
            raise WeightSyncError(f"cannot load weights from {source}: {'; '.join(problems[:8])}{more}; nothing was loaded")
        with torch.no_grad():
            for name, tensor in tensors:
                weights[name].copy_(tensor)
        self._missing = missing
        self.num_loads += 1
        if version is not None:
            self.version = version
            self.adapter_digest = _adapter_digest(weights)

    def load_directory(self, path: str, version: int) -> None:
        """Load all weights from a Hugging Face directory.

        Raises WeightSyncError, and loads nothing, if they cannot be read or do not match the model.
        """
        dtype = next(self.module.parameters()).dtype
        try:
            given: dict[str, Any] = {"dtype": dtype, "output_loading_info": True, "trust_remote_code": False, "local_files_only": True}
            given["use_safetensors"] = True  # other formats are pickles
            auto: Any = AutoModelForImageTextToText if hasattr(self.module.config, "vision_config") else AutoModelForCausalLM
            loaded, report = cast(Any, auto.from_pretrained(path, **given))
        except Exception as error:  # loaders may raise anything on a damaged directory
            raise WeightSyncError(f"cannot load weights from {path}: {type(error).__name__}: {error}") from error
        unexpected = [name for name in report["unexpected_keys"] if not name.startswith(self._unused)]
        found = {**report, "unexpected_keys": unexpected}
        problems = [
            f"{kind}: {sorted(map(str, found[kind]))[:8]}" for kind in ("missing_keys", "unexpected_keys", "mismatched_keys") if found[kind]
        ]
        if problems:
            raise WeightSyncError(
                f"cannot load weights from {path}: it is not a checkpoint of this model ({'; '.join(problems)}); send weights "
                "of the model that the engine serves"
            )
        weights = checkpoint_weights(loaded.state_dict().items(), self._experts)
        self.load_tensors(list(weights), version, source=path)

    def _under_all_names(self) -> dict[str, torch.Tensor]:
        named = ((stored_name(name), tensor) for name, tensor in self.module.state_dict(keep_vars=True).items())
        return dict(checkpoint_weights(named, self._experts))


def _adapter_digest(weights: dict[str, torch.Tensor]) -> str | None:
    adapter = [(name, weight) for name, weight in weights.items() if is_adapter_name(name)]
    return weights_checksum(adapter).checksum if adapter else None


def _first_names(weights: dict[str, torch.Tensor]) -> dict[str, str]:
    """Map each name to the first name of the same tensor."""
    first: dict[int, str] = {}
    return {name: first.setdefault(id(tensor), name) for name, tensor in weights.items()}


def _misfit(name: str, tensor: torch.Tensor, weight: torch.Tensor | None) -> str | None:
    if weight is None:
        return f"the model has no weight named {name}"
    if tensor.shape != weight.shape:
        return f"{name} has shape {list(tensor.shape)}, but the model's has {list(weight.shape)}"
    if not tensor.is_floating_point():
        return f"{name} is {tensor.dtype}, not a float type"
    return None
