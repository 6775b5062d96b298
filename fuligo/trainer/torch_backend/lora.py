"""Adapter of the torch trainer's policy: its layers, its full tensors, merged weights, and the sync of either to engines."""

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from itertools import chain

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from fuligo.formats.weight_manifest import EngineAddress, MergeRounding, Undelivered, WeightManifest, WeightsChecksum, WeightTarget
from fuligo.models.adapter import LowRankUpdate, adapter_tensors, add_adapter, load_adapter, lora_layers, update_of
from fuligo.trainer.ranks.settings import LoraSettings
from fuligo.trainer.ranks.world import World
from fuligo.trainer.torch_backend.weights import full_tensor, named_weights, weight_tensors
from fuligo.weights.senders import WeightSender

NUM_DIGESTED = 4096
"""Values of a tensor in `base_digest`, evenly spaced."""


def add_policy_adapter(model: PreTrainedModel, lora: LoraSettings, *, seed: int) -> None:
    """Add the adapter of a run to its policy, which freezes all else.

    Raises:
        ConfigError: the model lacks a layer that is to be adapted.
        CheckpointError: the adapter to start from is damaged, or is another model's.
    """
    add_adapter(model, lora.adapter, seed=seed)
    if lora.initial_adapter is not None:
        load_adapter(model, lora.initial_adapter)


def base_digest(model: PreTrainedModel) -> str:
    """Return a digest of the whole weights below an adapter, from some values of every tensor: an adapter is worth nothing on others."""
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in weight_tensors(model).items():
        values = tensor.detach().reshape(-1)[:: max(1, tensor.numel() // NUM_DIGESTED)].float().contiguous()
        digest.update(f"{name} {list(tensor.shape)} ".encode() + values.numpy().tobytes())
    return digest.hexdigest()


def store_base_in_half_precision(model: nn.Module) -> None:
    """Keep frozen parameters in bfloat16, in which the passes use them: nothing is ever added to them."""
    for parameter in model.parameters():
        if not parameter.requires_grad:
            parameter.data = parameter.data.to(torch.bfloat16)


def named_adapter_weights(model: PreTrainedModel, *, dtype: torch.dtype | None = None) -> Iterator[tuple[str, Tensor]]:
    """Yield the adapter's full tensors by their names in PEFT's files, cast to `dtype`. A collective if the model is sharded."""
    for name, parameter in adapter_tensors(model).items():
        full = full_tensor(parameter)
        yield name, full if dtype is None else full.to(dtype)


@dataclass(slots=True)
class MergedWeights:
    """Weights with the adapter merged into them, and the measure of what rounding them left of its update."""

    model: PreTrainedModel
    dtype: torch.dtype
    rounding: MergeRounding = field(default_factory=MergeRounding)

    def named(self) -> Iterator[tuple[str, Tensor]]:
        """Yield names and full tensors as `named_weights` does, W + scaling B A for adapted layers. A collective if it is sharded.

        Sums are computed in float32 and rounded once. `rounding` is complete after the last tensor.
        """
        layers = {f"{name}.weight": layer for name, layer in lora_layers(self.model).items()}
        self.rounding = MergeRounding()
        for name, tensor in weight_tensors(self.model).items():
            full = full_tensor(tensor)
            if name in layers:
                live = update_of(layers[name])
                update = LowRankUpdate(full_tensor(live.a), full_tensor(live.b), live.scaling)
                merged = update.added_to(full).to(self.dtype)
                if self.dtype != torch.float32 and update.b.any():
                    self.rounding += MergeRounding(int((merged != full.to(self.dtype)).sum()), merged.numel())
                yield name, merged
            else:
                is_cast = full.is_floating_point() and isinstance(tensor, nn.Parameter)
                yield name, full.to(self.dtype) if is_cast else full


class AdapterSender:
    """Sender of a policy with an adapter, on every trainer rank.

    Args:
        merges: send weights with the adapter merged into them; otherwise the weights once to each engine, and then the adapter alone.
    """

    def __init__(self, model: PreTrainedModel, sender: WeightSender, world: World, dtype: torch.dtype, *, merges: bool) -> None:
        self._model, self._sender, self._world, self._dtype, self._merges = model, sender, world, dtype, merges
        self._with_base: tuple[EngineAddress, ...] = ()
        """Engines that have the weights below the adapter; known to rank 0."""

    def send(self, target: WeightTarget) -> WeightManifest | Undelivered | None:
        """Send to all engines of `target`, as `WeightSender.send` does."""
        if self._merges:
            weights = MergedWeights(self._model, self._dtype)
            sent = self._sender.send(weights.named(), target)
            return replace(sent, merged=weights.rounding) if isinstance(sent, WeightManifest) else sent
        lacks_base = self._with_base != target.engines or target.with_checksum  # the checksum is one of all weights
        needs_base = self._world.sum(torch.tensor([float(self._world.rank == 0 and lacks_base)])).item() > 0
        adapter = named_adapter_weights(self._model, dtype=self._dtype)
        base = named_weights(self._model, dtype=self._dtype) if needs_base else iter(())
        digest = WeightsChecksum()
        sent = self._sender.send(chain(base, _digested(adapter, digest)), target)
        self._with_base = target.engines if isinstance(sent, WeightManifest) else ()
        return replace(sent, adapter=digest.result().checksum) if isinstance(sent, WeightManifest) else sent


def _digested(tensors: Iterator[tuple[str, Tensor]], digest: WeightsChecksum) -> Iterator[tuple[str, Tensor]]:
    for name, tensor in tensors:
        digest.update(name, tensor)
        yield name, tensor
