"""Named tensors from one process to another through shared memory, in the plain format of SGLang's `/update_weights_from_tensor`.

A payload is base64 of a pickled list of (name, tensor). The tensors travel as handles: a file in shared memory on a CPU, CUDA IPC handles
on a GPU, so sender and receiver must be on one machine. Reading admits only what rebuilds a tensor: a payload cannot run other code.

torch could share tensors on a CPU by itself, with a daemon beside the sender that counts who has a file open. But receivers stay connected
to it for as long as they live: with engines that somebody else runs it would outlive the run.
"""

from __future__ import annotations

import base64
import binascii
import io
import os
import pickle
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import accumulate
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing import reductions

from fuligo.errors import WeightSyncError
from fuligo.formats.disk import room

NamedTensors = Sequence[tuple[str, torch.Tensor]]
SHARED_MEMORY = Path("/dev/shm")
_ALIGNMENT = 64
"""Bytes: where a tensor of any type may begin."""


@contextmanager
def shared_payload(named_tensors: NamedTensors) -> Iterator[str]:
    """A payload that is decoded while the `with` block runs: on a CPU by any number of processes, from a GPU by one.

    CPU tensors are copied to shared memory. Whoever has opened it keeps what it sees; nothing stays behind, however this process ends. GPU
    tensors are not copied.

    Raises:
        WeightSyncError: shared memory is full
    """
    with ExitStack() as stack:
        try:
            buffer = io.BytesIO()
            _TensorPickler(buffer, pickle.HIGHEST_PROTOCOL).dump(_handles(named_tensors, stack))
        except OSError as error:
            raise WeightSyncError(
                f"a bucket of weights does not get into shared memory: {error} ({room(SHARED_MEMORY)}). Give it more (in a container "
                "--shm-size), or lower --update-weight-buffer-size; resume from the last checkpoint."
            ) from error
        yield base64.b64encode(buffer.getvalue()).decode()


def decode_named_tensors(payload: str) -> list[tuple[str, torch.Tensor]]:
    """The tensors of a payload; they share the sender's memory, so copy what is to be kept.

    Raises:
        WeightSyncError: it is not such a payload, or the memory is gone
    """
    try:
        decoded = _TensorUnpickler(io.BytesIO(base64.b64decode(payload, validate=True))).load()
    except (binascii.Error, pickle.UnpicklingError, EOFError, AttributeError, TypeError, ValueError, IndexError) as error:
        raise WeightSyncError(f"the payload is not a list of named tensors: {error}") from error
    except (RuntimeError, OSError) as error:
        raise WeightSyncError(
            f"the payload's shared memory cannot be opened (is the sender on this machine, and alive?): {error}"
        ) from error
    if not isinstance(decoded, list) or not all(
        isinstance(entry, tuple) and len(entry) == 2 and isinstance(entry[0], str) and isinstance(entry[1], torch.Tensor)
        for entry in decoded
    ):
        raise WeightSyncError("the payload is not a list of (name, tensor)")
    return decoded


@dataclass(slots=True, frozen=True)
class _File:
    """Pickled, it is a storage on the file: a receiver's changes are its own."""

    path: str
    num_bytes: int

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return torch.UntypedStorage.from_file, (self.path, False, self.num_bytes)


@dataclass(slots=True, frozen=True)
class _Typed:
    file: _File
    dtype: torch.dtype

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return reductions.rebuild_typed_storage, (self.file, self.dtype)


@dataclass(slots=True, frozen=True)
class _Tensor:
    """Pickled, it is a contiguous tensor of the file."""

    storage: _Typed
    offset: int
    """In elements."""
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return reductions.rebuild_tensor, (torch.Tensor, self.storage, (self.offset, self.shape, self.stride, False))


def _handles(named_tensors: NamedTensors, stack: ExitStack) -> list[tuple[str, torch.Tensor | _Tensor]]:
    """GPU tensors as they are, copies of CPU tensors in a file that is open as long as the stack.

    Raises:
        OSError: shared memory is full
    """
    copies = _copies([tensor for _, tensor in named_tensors if tensor.device.type == "cpu"], stack)
    return [(name, next(copies) if tensor.device.type == "cpu" else tensor.detach()) for name, tensor in named_tensors]


def _copies(tensors: Sequence[torch.Tensor], stack: ExitStack) -> Iterator[_Tensor]:
    *begins, num_bytes = accumulate((-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for tensor in tensors), initial=0)
    file = stack.enter_context(_open_file(max(num_bytes, _ALIGNMENT)))
    storage: Any = torch.UntypedStorage.from_file(file.path, True, file.num_bytes)
    for tensor, begin in zip(tensors, begins):
        copy = torch.empty(0, dtype=tensor.dtype).set_(storage, begin // tensor.element_size(), tensor.shape)  # pyright: ignore[reportCallIssue]  # the stride may be left out
        copy.copy_(tensor.detach())
        yield _Tensor(_Typed(file, copy.dtype), copy.storage_offset(), tuple(copy.shape), copy.stride())


@contextmanager
def _open_file(num_bytes: int) -> Iterator[_File]:
    """On Linux it has no name: it is gone with the last process that has it open, however those end.

    Raises:
        OSError: there is no room for it
    """
    if sys.platform == "linux":
        with tempfile.TemporaryFile(dir=SHARED_MEMORY) as file:
            os.posix_fallocate(file.fileno(), 0, num_bytes)  # else a full file system kills who writes
            yield _File(f"/proc/{os.getpid()}/fd/{file.fileno()}", num_bytes)
    else:
        with tempfile.NamedTemporaryFile() as file:
            file.truncate(num_bytes)
            yield _File(file.name, num_bytes)


_DEVICE = 6
"""Position of the device's index among the arguments of torch's `rebuild_cuda_tensor` (2.11 and 2.13; SGLang counts on it, too)."""


class _TensorPickler(ForkingPickler):
    """Names a GPU by its UUID, as SGLang does: sender and receiver may see different GPUs, each counted from 0."""

    def reducer_override(self, obj: Any) -> Any:
        if not (isinstance(obj, torch.Tensor) and obj.is_cuda):
            return NotImplemented
        reduced: Any = reductions.reduce_tensor(obj)
        rebuild, arguments = reduced
        uuid = str(torch.cuda.get_device_properties(arguments[_DEVICE]).uuid)
        return rebuild, (*arguments[:_DEVICE], uuid, *arguments[_DEVICE + 1 :])


def _rebuild_cuda_tensor(*arguments: Any) -> torch.Tensor:
    """On the GPU with the sender's UUID, which this process must see."""
    uuid = arguments[_DEVICE]
    seen = [str(torch.cuda.get_device_properties(index).uuid) for index in range(torch.cuda.device_count())]
    if uuid not in seen:
        raise RuntimeError(f"the tensor is on GPU {uuid}, this process sees {seen}")
    rebuild: Any = reductions.rebuild_cuda_tensor
    return rebuild(*arguments[:_DEVICE], seen.index(uuid), *arguments[_DEVICE + 1 :])


def _map_file(path: str, shared: bool, num_bytes: int) -> torch.UntypedStorage:
    """What a sender has open; no other file is read, none is written."""
    if shared or (sys.platform == "linux" and not re.fullmatch(r"/proc/\d+/fd/\d+", path)):
        raise pickle.UnpicklingError(f"the file {path} is not admitted")
    storage: Any = torch.UntypedStorage.from_file(path, False, num_bytes)
    return storage


def _attribute(owner: str, name: str) -> Callable[..., torch.UntypedStorage]:
    """Python pickles a static method of a C type as an attribute of it."""
    if (owner, name) != (_STORAGE, "from_file"):
        raise pickle.UnpicklingError(f"the attribute {name} is not admitted")
    return _map_file


_STORAGE = "torch._C.StorageBase"
_ADMITTED: dict[tuple[str, str], Any] = {
    ("torch.multiprocessing.reductions", "rebuild_tensor"): reductions.rebuild_tensor,
    ("torch.multiprocessing.reductions", "rebuild_typed_storage"): reductions.rebuild_typed_storage,
    ("torch.multiprocessing.reductions", "rebuild_cuda_tensor"): _rebuild_cuda_tensor,
    ("builtins", "getattr"): _attribute,
    ("torch._C", "StorageBase"): _STORAGE,
    ("torch.storage", "UntypedStorage"): torch.UntypedStorage,
    ("torch.storage", "TypedStorage"): torch.TypedStorage,
    ("torch", "Tensor"): torch.Tensor,
    ("torch", "Size"): torch.Size,
    ("torch.nn.parameter", "Parameter"): torch.nn.Parameter,
}


class _TensorUnpickler(pickle.Unpickler):
    """Resolves only the names that rebuild a tensor from shared memory."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        try:
            return _ADMITTED[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"{module}.{name} is not admitted") from None
