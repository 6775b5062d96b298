"""Named tensors passed between processes through shared memory, in the format of SGLang's `/update_weights_from_tensor`.

A payload is base64 of a pickled list of (name, tensor). Tensors are passed as handles (a file in shared memory on a CPU, CUDA IPC handles
on a GPU), so sender and receiver must share a machine. The unpickler admits only the functions that rebuild a tensor, so a payload cannot
run other code.

torch's own sharing of CPU tensors is not used: it starts a daemon beside the sender that lives as long as any receiver, and so would
outlive a run whose engines were started separately.
"""

import base64
import binascii
import ctypes
import io
import os
import pickle
import re
import sys
import tempfile
from collections.abc import Callable, Collection, Hashable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from itertools import accumulate
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import torch
from torch.multiprocessing import reductions

from fuligo.errors import WeightSyncError
from fuligo.formats.disk import free_space
from fuligo.limits import num_cores

NamedTensors = Sequence[tuple[str, torch.Tensor]]
SHARED_MEMORY = Path("/dev/shm")
_WRITE_THREADS = 8
_ALIGNMENT = 64
"""Alignment of each tensor in bytes, enough for any dtype."""


@contextmanager
def shared_payload(named_tensors: NamedTensors) -> Iterator[str]:
    """Yield a payload that can be decoded during the `with` block, by any number of processes (CPU tensors) or one (GPU tensors).

    CPU tensors are copied to shared memory. Receivers that opened it keep their view; nothing is left behind however this process ends.
    GPU tensors are not copied. Raises WeightSyncError if shared memory is full.
    """
    with ExitStack() as stack:
        try:
            payload = _encode(_handles(named_tensors, stack))
        except OSError as error:
            raise WeightSyncError(
                f"cannot copy a bucket of weights to shared memory: {error} ({free_space(SHARED_MEMORY)}); enlarge it (--shm-size for a "
                "container) or lower --update-weight-buffer-size, then resume from the last checkpoint"
            ) from error
        yield payload


class SharedCopies:
    """Copies of named tensors in shared memory, for receivers that expect a dict of tensors by name, as SGLang does for an adapter.

    Two files are written in turn, so receivers may use one while the next tensors are written to the other. Their pages are kept for later
    writes to the same receivers, and GPUs write to them directly. As with a `shared_payload`, nothing is left behind however this process
    ends.
    """

    def __init__(self) -> None:
        self._receivers: Collection[Hashable] = ()
        self._in_use: _Pages | None = None
        self._spare: _Pages | None = None

    def write(self, named_tensors: NamedTensors, receivers: Collection[Hashable] = ()) -> tuple[NamedTensors, str]:
        """Copy tensors; return the copies and their payload, which stay valid until the second write after this one to the same receivers.

        New files are used if `receivers`, the identities of the processes that read the payload, change. Raises WeightSyncError if shared
        memory is full.
        """
        if receivers != self._receivers:
            self.close()  # receivers keep the files that they have mapped
            self._receivers = receivers
        names = [name for name, _ in named_tensors]
        tensors = [tensor.detach() for _, tensor in named_tensors]
        alike: dict[tuple[torch.device, torch.dtype], list[int]] = {}
        for position, tensor in enumerate(tensors):
            alike.setdefault((tensor.device, tensor.dtype), []).append(position)
        *begins, num_bytes = accumulate(
            (_aligned(sum(tensors[position].nbytes for position in positions)) for positions in alike.values()), initial=0
        )
        pages = self._turn(num_bytes, is_pinned=any(device.type == "cuda" for device, _ in alike))
        placed: dict[int, tuple[torch.Tensor, _Handle]] = {}
        for begin, positions in zip(begins, alike.values()):
            placed |= zip(positions, pages.take(begin, [tensors[position] for position in positions]))
        copies = [(name, placed[position][0]) for position, name in enumerate(names)]
        return copies, _encode({name: placed[position][1] for position, name in enumerate(names)})

    def close(self) -> None:
        """Free the shared memory."""
        for pages in (self._in_use, self._spare):
            if pages is not None:
                pages.close()
        self._in_use = self._spare = None

    def _turn(self, num_bytes: int, *, is_pinned: bool) -> "_Pages":
        """Swap the two files: return the spare one, replaced if it has less than `num_bytes`, and keep the other one as the spare."""
        pages, self._spare = self._spare, None
        if pages is not None and pages.file.num_bytes < num_bytes:
            pages.close()
            pages = None
        if pages is None:
            try:
                pages = _Pages.map(max(num_bytes, _ALIGNMENT), is_pinned=is_pinned)
            except OSError as error:
                raise WeightSyncError(
                    f"cannot copy an adapter to shared memory: {error} ({free_space(SHARED_MEMORY)}); enlarge it (--shm-size for a "
                    "container), then resume from the last checkpoint"
                ) from error
        self._in_use, self._spare = pages, self._in_use
        return pages


def decode_named_tensors(payload: str) -> list[tuple[str, torch.Tensor]]:
    """Return a payload's tensors, which are in the sender's memory; copy them to keep them.

    Raises WeightSyncError if the payload is malformed, or the memory is gone.
    """
    try:
        decoded = _TensorUnpickler(io.BytesIO(base64.b64decode(payload, validate=True))).load()
    except (binascii.Error, pickle.UnpicklingError, EOFError, AttributeError, TypeError, ValueError, IndexError) as error:
        raise WeightSyncError(f"cannot decode the payload: {error}; expected a list of (name, tensor)") from error
    except (RuntimeError, OSError) as error:
        raise WeightSyncError(
            f"cannot open the payload's shared memory: {error}; check that the sender is alive and on this machine"
        ) from error
    if not isinstance(decoded, list) or not all(
        isinstance(entry, tuple) and len(entry) == 2 and isinstance(entry[0], str) and isinstance(entry[1], torch.Tensor)
        for entry in decoded
    ):
        raise WeightSyncError("cannot decode the payload: expected a list of (name, tensor)")
    return decoded


@dataclass(slots=True, frozen=True)
class _Handle:
    """Stand-in for the result of a call that a receiver makes when it unpickles the payload."""

    call: Callable[..., Any]
    arguments: tuple[Any, ...]

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.call, self.arguments


@dataclass(slots=True, frozen=True)
class _File:
    """Shared-memory file."""

    path: str
    num_bytes: int
    descriptor: int
    """File descriptor in the sender's process."""
    storage: _Handle
    """Storage that maps the file copy-on-write; a payload holds it once for all its tensors."""

    @classmethod
    def sized(cls, path: str, num_bytes: int, descriptor: int) -> "_File":
        """Resize an open file to `num_bytes`, and return it."""
        os.ftruncate(descriptor, num_bytes)
        return cls(path, num_bytes, descriptor, _Handle(torch.UntypedStorage.from_file, (path, False, num_bytes)))

    def handle(self, begin: int, tensor: torch.Tensor) -> _Handle:
        """Return the handle of a contiguous tensor like `tensor` at byte `begin`."""
        typed = _Handle(reductions.rebuild_typed_storage, (self.storage, tensor.dtype))
        place = begin // tensor.element_size(), tuple(tensor.shape), tensor.stride(), False
        return _Handle(reductions.rebuild_tensor, (torch.Tensor, typed, place))


@dataclass(slots=True, frozen=True)
class _Pages:
    """Shared-memory file and its mapping; `close` frees both."""

    file: _File
    content: torch.Tensor
    """[num_bytes] uint8 content of the file."""
    close: Callable[[], None]

    @classmethod
    def map(cls, num_bytes: int, *, is_pinned: bool) -> "_Pages":
        """Map a new file, pinned for the transfers of GPUs if the system allows it. Raises OSError if shared memory is full."""
        with ExitStack() as stack:
            file = stack.enter_context(_open_file(num_bytes))
            if sys.platform == "linux":
                # Without reserved pages, a write through the mapping would kill the process where shared memory is full.
                os.posix_fallocate(file.descriptor, 0, num_bytes)
            content = torch.UntypedStorage.from_file(file.path, True, num_bytes)
            flat = torch.empty(0, dtype=torch.uint8).set_(content)  # pyrefly: ignore[bad-argument-type]
            if is_pinned:
                cuda: Any = torch.cuda.cudart()
                if int(cuda.cudaHostRegister(flat.data_ptr(), num_bytes, 0)) == 0:
                    stack.callback(cuda.cudaHostUnregister, flat.data_ptr())
                else:  # clear the error, which the next kernel launch would report
                    with suppress(RuntimeError):
                        torch.zeros(1, device="cuda")
            return cls(file, flat, stack.pop_all().close)

    def take(self, begin: int, tensors: Sequence[torch.Tensor]) -> Iterator[tuple[torch.Tensor, _Handle]]:
        """Copy tensors that share a data type and device to offset `begin`, in one transfer; yield the copies and their handles."""
        joined = torch.cat([tensor.reshape(-1) for tensor in tensors])
        self.content[begin : begin + joined.nbytes].view(joined.dtype).copy_(joined)
        for tensor in tensors:
            copy = self.content[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape)
            yield copy, self.file.handle(begin, copy)
            begin += tensor.nbytes


def _encode(handles: object) -> str:
    buffer = io.BytesIO()
    _TensorPickler(buffer, pickle.HIGHEST_PROTOCOL).dump(handles)
    return base64.b64encode(buffer.getvalue()).decode()


def _handles(named_tensors: NamedTensors, stack: ExitStack) -> list[tuple[str, torch.Tensor | _Handle]]:
    """Return the names with GPU tensors as they are and, for CPU tensors, handles of copies in a file that `stack` closes."""
    copies = _copies([tensor for _, tensor in named_tensors if tensor.device.type == "cpu"], stack)
    return [(name, next(copies) if tensor.device.type == "cpu" else tensor.detach()) for name, tensor in named_tensors]


def _aligned(num_bytes: int) -> int:
    return -(-num_bytes // _ALIGNMENT) * _ALIGNMENT


def _copies(tensors: Sequence[torch.Tensor], stack: ExitStack) -> Iterator[_Handle]:
    """Copy CPU tensors to a shared-memory file that `stack` closes; yield the handles of the copies."""
    *begins, num_bytes = accumulate((_aligned(tensor.nbytes) for tensor in tensors), initial=0)
    file = stack.enter_context(_open_file(max(num_bytes, _ALIGNMENT)))
    placed = [(tensor.detach().contiguous(), begin) for tensor, begin in zip(tensors, begins)]
    num_threads = min(_WRITE_THREADS, num_cores(), len(placed))
    if num_threads < 2:
        _write(file.descriptor, placed)
    else:
        with ThreadPoolExecutor(num_threads, thread_name_prefix="payload") as threads:
            list(threads.map(partial(_write, file.descriptor), (placed[first::num_threads] for first in range(num_threads))))
    for tensor, begin in placed:
        yield file.handle(begin, tensor)


def _write(descriptor: int, placed: Sequence[tuple[torch.Tensor, int]]) -> None:
    """Write contiguous tensors to a file, each at the given offset.

    A copy by torch would start and join a team of OpenMP threads, which is slow on busy cores: the hundreds of tensors of an adapter took
    seconds.
    """
    for tensor, begin in placed:
        # tensor.numpy() would make the storage unresizable, but an offloaded trainer resizes it.
        data, position = memoryview((ctypes.c_ubyte * tensor.nbytes).from_address(tensor.data_ptr())), begin
        while data:
            written = os.pwrite(descriptor, data, position)
            data, position = data[written:], position + written


@contextmanager
def _open_file(num_bytes: int) -> Iterator[_File]:
    """Open a shared-memory file. On Linux it has no name, so it disappears with the last process that has it open."""
    if sys.platform == "linux":
        with tempfile.TemporaryFile(dir=SHARED_MEMORY) as file:
            yield _File.sized(f"/proc/{os.getpid()}/fd/{file.fileno()}", num_bytes, file.fileno())
    else:
        with tempfile.NamedTemporaryFile() as file:
            yield _File.sized(file.name, num_bytes, file.fileno())


_DEVICE = 6
"""Position of the device index in the arguments of torch's `rebuild_cuda_tensor` (2.11 and 2.13; SGLang relies on it too)."""


class _TensorPickler(ForkingPickler):
    """Pickler that identifies a GPU by its UUID, as SGLang does: sender and receiver may number their visible GPUs differently."""

    def reducer_override(self, obj: Any) -> Any:
        if not (isinstance(obj, torch.Tensor) and obj.is_cuda):
            return NotImplemented
        reduced: Any = reductions.reduce_tensor(obj)
        rebuild, arguments = reduced
        uuid = str(torch.cuda.get_device_properties(arguments[_DEVICE]).uuid)
        return rebuild, (*arguments[:_DEVICE], uuid, *arguments[_DEVICE + 1 :])


def _rebuild_cuda_tensor(*arguments: Any) -> torch.Tensor:
    """Rebuild a tensor on the GPU with the sender's UUID, which must be visible to this process."""
    uuid = arguments[_DEVICE]
    seen = [str(torch.cuda.get_device_properties(index).uuid) for index in range(torch.cuda.device_count())]
    if uuid not in seen:
        raise RuntimeError(f"the tensor is on GPU {uuid}, but this process sees only {seen}")
    rebuild: Any = reductions.rebuild_cuda_tensor
    return rebuild(*arguments[:_DEVICE], seen.index(uuid), *arguments[_DEVICE + 1 :])


def _map_file(path: str, shared: bool, num_bytes: int) -> torch.UntypedStorage:
    """Map a file that a sender has open, copy-on-write; refuse any other path."""
    if shared or (sys.platform == "linux" and not re.fullmatch(r"/proc/\d+/fd/\d+", path)):
        raise pickle.UnpicklingError(f"the file {path} is not allowed")
    storage: Any = torch.UntypedStorage.from_file(path, False, num_bytes)
    return storage


def _attribute(owner: str, name: str) -> Callable[..., torch.UntypedStorage]:
    """Resolve `UntypedStorage.from_file`, which Python pickles as an attribute of a C type."""
    if (owner, name) != (_STORAGE, "from_file"):
        raise pickle.UnpicklingError(f"the attribute {name} is not allowed")
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
    """Unpickler restricted to the names that rebuild a tensor from shared memory."""

    def find_class(self, module: str, name: str) -> Any:
        if module == "torch" and isinstance(found := getattr(torch, name, None), torch.dtype):
            return found
        try:
            return _ADMITTED[module, name]
        except KeyError:
            raise pickle.UnpicklingError(f"{module}.{name} is not allowed") from None
