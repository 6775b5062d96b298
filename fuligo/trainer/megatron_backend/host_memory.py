"""Device memory that goes to the host and comes back: tensors keep their identity, and every view of theirs stays a view."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from megatron.core.distributed import DistributedDataParallel
from megatron.core.optimizer.optimizer import ChainedOptimizer
from torch import Tensor, UntypedStorage, nn

from fuligo.trainer.megatron_backend.weights.local import local_weights, unwrapped


class HostMemory:
    """Empties tensors' storages and fills them again. What was copied once has its place in host memory for good."""

    def __init__(self) -> None:
        self._places: dict[int, Tensor] = {}
        """By the address of the storage's object: bytes in host memory."""
        self._kept: list[tuple[UntypedStorage, Tensor]] = []
        self._dropped: list[tuple[UntypedStorage, int]] = []

    def take(self, kept: Iterable[Tensor], dropped: Iterable[Tensor] = ()) -> None:
        """Empty the tensors' storages.

        Args:
            kept: `give_back` restores what they hold.
            dropped: come back as zeros, for instance buffers of gradients.
        """
        assert not (self._kept or self._dropped), "taken already"
        for storage in _storages(dropped):
            self._dropped.append((storage, storage.nbytes()))
        for storage in _storages(kept):
            place = self._place(storage)
            place.copy_(_as_bytes(storage), non_blocking=True)
            self._kept.append((storage, place))
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        for storage, _ in (*self._kept, *self._dropped):
            storage.resize_(0)

    def give_back(self) -> None:
        for storage, place in self._kept:
            storage.resize_(place.numel())
            _as_bytes(storage).copy_(place, non_blocking=True)
        for storage, num_bytes in self._dropped:
            storage.resize_(num_bytes)
            _as_bytes(storage).zero_()
        self._kept, self._dropped = [], []

    def _place(self, storage: UntypedStorage) -> Tensor:
        key = storage._cdata
        if key not in self._places or self._places[key].numel() != storage.nbytes():
            self._places[key] = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=torch.cuda.is_available())
        return self._places[key]


class HostWeights:
    """The weights of another model of the same shape, in host memory until they are exchanged with those on the device."""

    def __init__(self, chunks: Sequence[nn.Module]) -> None:
        """
        Args:
            chunks: this rank's stages; their present weights are copied.
        """
        pinned = torch.cuda.is_available()
        self.tensors: Mapping[str, Tensor] = {
            name: torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=pinned) for name, tensor in local_weights(chunks).items()
        }
        self.copy_from(chunks)

    @torch.no_grad()
    def copy_from(self, chunks: Sequence[nn.Module]) -> None:
        for name, tensor in local_weights(chunks).items():
            self.tensors[name].copy_(tensor)

    @torch.no_grad()
    def exchange(self, chunks: Sequence[nn.Module]) -> None:
        """What was here is in the stages, and the other way round; done twice, all is as before, bit by bit."""
        for name, tensor in local_weights(chunks).items():
            present = tensor.clone()
            tensor.copy_(self.tensors[name])
            self.tensors[name].copy_(present)


def state_tensors(chunks: Sequence[DistributedDataParallel], optimizer: ChainedOptimizer) -> list[Tensor]:
    """Weights, and everything that the optimizer keeps for them."""
    models = [unwrapped(chunk) for chunk in chunks]
    weights = [tensor.detach() for model in models for tensor in (*model.parameters(), *model.buffers())]
    groups = [parameter.detach() for group in optimizer.param_groups for parameter in group["params"]]
    states = [value for part in optimizer.chained_optimizers if part.optimizer is not None for value in _states(part.optimizer)]
    return [*weights, *groups, *states]


def gradient_tensors(chunks: Sequence[DistributedDataParallel]) -> list[Tensor]:
    """The buffers that gradients are summed in."""
    buffers: list[Any] = [buffer for chunk in chunks for buffer in (chunk.buffers, chunk.expert_parallel_buffers)]
    return [buffer.grad_data for part in buffers for buffer in part]


def _states(optimizer: torch.optim.Optimizer) -> Iterable[Tensor]:
    return (value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor))


def _storages(tensors: Iterable[Tensor]) -> list[UntypedStorage]:
    """Each once; of those on the host none, where there is a device."""
    wanted = [tensor for tensor in tensors if tensor.is_cuda or not torch.cuda.is_available()]
    found = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in wanted}
    return [storage for storage in found.values() if storage.nbytes()]


def _as_bytes(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
