"""Named tensors from one process to another through shared memory, in the plain format of SGLang's `/update_weights_from_tensor`.

A payload is base64 of a pickled list of (name, tensor). The tensors travel as handles: files in shared memory on a CPU, CUDA IPC handles
on a GPU, so sender and receiver must be on one machine. Reading admits only what rebuilds a tensor: a payload cannot run other code.
"""

from __future__ import annotations

import base64
import binascii
import io
import pickle
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import torch
import torch.multiprocessing as torch_mp
from torch.multiprocessing import reductions

from fuligo.errors import WeightSyncError
from fuligo.machine.disk import room

NamedTensors = Sequence[tuple[str, torch.Tensor]]
SHARED_MEMORY = Path("/dev/shm")


def encode_named_tensors(named_tensors: NamedTensors, *, num_receivers: int = 1) -> str:
    """A payload that `num_receivers` processes may decode, each once.

    CPU tensors are copied to shared memory, which is freed when the last receiver lets go of it. GPU tensors are not copied: keep them
    until the receivers have answered. Where a receiver may fail, use `shared_payload`.

    Raises:
        WeightSyncError: shared memory is full; or GPU tensors for several receivers: a CUDA IPC handle can be opened once
    """
    return _encode(_copies(named_tensors), num_receivers)


@contextmanager
def shared_payload(named_tensors: NamedTensors, *, num_receivers: int = 1) -> Iterator[str]:
    """The same for a `with` block in which the receivers answer.

    When the block fails, nobody may ever take the tensors out: then nothing of them stays behind, and who comes late is refused.
    """
    copies = _copies(named_tensors)
    try:
        yield _encode(copies, num_receivers)
    except BaseException:
        for _, tensor in copies:
            if tensor.device.type == "cpu" and tensor.is_shared():
                _remove_file(tensor)
        copies.clear()
        raise


def _remove_file(tensor: torch.Tensor) -> None:
    """Remove a tensor's file from shared memory; whoever has opened it keeps what it sees.

    torch removes a file when its count of references falls to zero, and aborts the process where the file is gone by then: one more
    reference, which nobody gives up, leaves that to us. Its shared memory daemon would do so only at our end, if that finds it alive.
    """
    storage: Any = tensor.untyped_storage()
    _, handle, _ = storage._share_filename_cpu_()
    storage._shared_incref()
    (SHARED_MEMORY / handle.decode().lstrip("/")).unlink(missing_ok=True)


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


def _copies(named_tensors: NamedTensors) -> list[tuple[str, torch.Tensor]]:
    """CPU tensors are copied, since sharing moves a tensor's own storage: the sender's model must stay where it is."""
    return [
        (name, tensor.detach().clone(memory_format=torch.contiguous_format) if tensor.device.type == "cpu" else tensor.detach())
        for name, tensor in named_tensors
    ]


def _encode(named_tensors: list[tuple[str, torch.Tensor]], num_receivers: int) -> str:
    on_gpu = any(tensor.is_cuda for _, tensor in named_tensors)
    if on_gpu and num_receivers > 1:
        raise WeightSyncError(f"GPU tensors cannot be encoded for {num_receivers} receivers at once: encode them for each")
    strategy = torch_mp.get_sharing_strategy()
    torch_mp.set_sharing_strategy("file_system")  # descriptors travel to child processes only
    try:
        buffer = io.BytesIO()
        _TensorPickler(buffer, pickle.HIGHEST_PROTOCOL).dump(named_tensors)
        for _, tensor in named_tensors:
            for _ in range(num_receivers - 1):  # a receiver gives up the reference that pickling took for it
                tensor.untyped_storage()._shared_incref()  # pyright: ignore[reportAttributeAccessIssue]
    except RuntimeError as error:
        raise WeightSyncError(
            f"a bucket of weights does not get into shared memory: {error} ({room(SHARED_MEMORY)}). Give it more (in a container "
            "--shm-size), or lower --update-weight-buffer-size; resume from the last checkpoint."
        ) from error
    finally:
        torch_mp.set_sharing_strategy(strategy)
    return base64.b64encode(buffer.getvalue()).decode()


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


_ADMITTED: dict[tuple[str, str], Any] = {
    ("torch.multiprocessing.reductions", name): getattr(reductions, name)
    for name in ("rebuild_tensor", "rebuild_typed_storage", "rebuild_storage_filename", "rebuild_storage_empty")
} | {
    ("torch.multiprocessing.reductions", "rebuild_cuda_tensor"): _rebuild_cuda_tensor,
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
