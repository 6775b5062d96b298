"""Weight sync of a policy with a LoRA adapter, and the digest of its base weights, for every backend."""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor

from fuligo.errors import CheckpointError
from fuligo.formats.adapter_config import ADAPTER, AdapterConfig
from fuligo.formats.payload import SharedCopies
from fuligo.formats.weight_manifest import (
    EngineAddress,
    MergeRounding,
    Undelivered,
    WeightManifest,
    WeightsDigest,
    WeightTarget,
    weights_checksum,
)
from fuligo.trainer.ranks.world import World
from fuligo.weights.adapter import send_adapter
from fuligo.weights.senders import WeightSender

NUM_DIGESTED = 4096
"""Minimum number of evenly spaced values of each tensor that `base_digest` covers; smaller tensors are covered completely."""


class AdaptedPolicy(Protocol):
    """Policy with an adapter. Full tensors, in the data type of the sync, are gathered one after another during iteration."""

    def base(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the base weights by their Hugging Face names. A collective."""
        ...

    def adapter(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the adapter's tensors by their names in PEFT's files. A collective."""
        ...

    def merged(self) -> Iterator[tuple[str, Tensor]]:
        """Yield Hugging Face names and full tensors with the adapter merged in. A collective: every rank must iterate to the end."""
        ...

    @property
    def rounding(self) -> MergeRounding:
        """Number of adapted elements, and how many of them `merged` changed after rounding; complete after its last tensor."""
        ...


class AdapterSender:
    """Sender of a policy with an adapter, on every trainer rank.

    Args:
        merges: send all weights with the adapter merged in; otherwise send each engine the base weights once, then only the adapter.
        named: the adapter's configuration, for engines that load adapters by name and already have the base weights; None for others.
    """

    def __init__(
        self, policy: AdaptedPolicy, sender: WeightSender, world: World, *, merges: bool, named: AdapterConfig | None = None
    ) -> None:
        self._policy, self._sender, self._world, self._merges, self._named = policy, sender, world, merges, named
        self._copies = SharedCopies()
        self._with_base: frozenset[EngineAddress] = frozenset()
        """Engines that have the base weights; complete on rank 0 only. A restart changes `EngineAddress.start`, so a restarted engine is
        not included."""

    def send(self, target: WeightTarget) -> WeightManifest | Undelivered | None:
        """Send the policy to all engines of `target`. A collective; results and errors are those of `WeightSender.send`."""
        if self._merges:
            sent = self._sender.send(self._policy.merged(), target)
            trained = weights_checksum(self._policy.adapter())
            return replace(sent, merged=self._policy.rounding, trained=trained) if isinstance(sent, WeightManifest) else sent
        if self._named is not None:
            tensors = list(self._policy.adapter())
            return send_adapter(tensors, self._named, target, self._copies) if self._world.rank == 0 else None
        receivers = frozenset(target.engines)
        lacks_base = not receivers <= self._with_base or target.with_checksum  # a checksum covers all weights
        needs_base = self._world.sum(torch.tensor([float(self._world.rank == 0 and lacks_base)])).item() > 0
        base = self._policy.base() if needs_base else iter(())
        digests: list[WeightsDigest] = []

        def adapter() -> Iterator[tuple[str, Tensor]]:
            gathered = list(self._policy.adapter())  # all tensors, whose digest is then computed on several cores
            digests.append(weights_checksum(gathered))
            yield from gathered

        sent = self._sender.send(chain(base, adapter()), target)
        urls = {engine.url for engine in receivers}
        others = frozenset(engine for engine in self._with_base if engine.url not in urls)
        self._with_base = others | receivers if isinstance(sent, WeightManifest) else others
        if not isinstance(sent, WeightManifest):
            return sent
        return replace(sent, adapter=digests[0].checksum, trained=digests[0])

    def close(self) -> None:
        self._copies.close()


def base_digest(weights: Iterable[tuple[str, Tensor]]) -> str:
    """Return a hexadecimal digest of some values of every base weight. A resume compares it, because an adapter fits only its base.

    Args:
        weights: names and tensors as loaded, before any quantization, which `QuantizedBase` records.
    """
    digest = hashlib.blake2b(digest_size=16)
    for name, tensor in weights:
        values = tensor.detach().reshape(-1)[:: max(1, tensor.numel() // NUM_DIGESTED)].float().cpu().contiguous()
        digest.update(f"{name} {list(tensor.shape)} ".encode() + values.numpy().tobytes())
    return digest.hexdigest()


def other_base(checkpoint: Path, saved: str | None, own: str | None, *, weights: Path) -> str:
    """Return the error message for a checkpoint that does not fit this run's adapter, or its lack of one.

    `saved` and `own` are the digests of the base weights of the checkpoint's adapter and of this run's, None without an adapter. `weights`
    is the weights directory of the checkpoint, to start from if it has no adapter.
    """
    if saved is None:
        return f"cannot resume {checkpoint} with LoRA: it holds all weights; start from them with --ref-load {weights}"
    if own is None:
        return f"cannot resume {checkpoint} without LoRA: it holds an adapter; add the --lora-* flags that it was trained with"
    return (
        f"cannot resume {checkpoint}: its adapter was trained on weights that differ from this run's; use the --hf-checkpoint or "
        "--ref-load that it was trained with"
    )


def require_scaling(checkpoint: Path, scaling: float) -> None:
    """Check that a checkpoint's adapter was trained with this run's scale, the factor of B A, which tensor shapes do not reveal.

    Raises CheckpointError if the scale differs or `adapter_config.json` is damaged.
    """
    saved = AdapterConfig.read(checkpoint / ADAPTER)
    if saved.scaling != scaling:
        variant = "with" if saved.rank_stabilised else "without"
        raise CheckpointError(
            f"cannot resume {checkpoint}: its adapter was trained with the scale {saved.scaling:g}, but this run has {scaling:g}; use "
            f"--lora-alpha {saved.alpha:g} {variant} --lora-use-rslora"
        )
