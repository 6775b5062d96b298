"""Conversion of a Hugging Face checkpoint to FP8, file by file.

A file is complete or absent: it is written under a temporary name, flushed, read back, compared and renamed. Files of an interrupted
conversion are kept if they compare equal. config.json, which makes the directory a checkpoint, is written last.
"""

import shutil
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from functools import partial
from io import BufferedReader
from pathlib import Path

import torch
from torch import Tensor

from fuligo.convert.fp8_plan import CONFIG, INDEX, UNFINISHED, Fp8Plan
from fuligo.errors import CheckpointError
from fuligo.formats.disk import replace_text, sync
from fuligo.formats.fp8 import block_maxima, fp8_scales, fp8_values, scales_for
from fuligo.formats.fp8_shards import Shard, TargetTensor
from fuligo.formats.hf_tensors import DTYPES
from fuligo.quantities import amount

_CHUNK_BYTES = 4 * 2**20
"""Number of bytes read at a time. A thread needs about ten times as much memory, regardless of the size of tensors and files."""
Report = Callable[[str], None]
Piece = tuple[int, bytes | bytearray]
"""(offset in the new file, bytes)."""


def convert(plan: Fp8Plan, report: Report) -> None:
    """Carry out a plan; existing files with the right content are kept. `report` gets a line of text for each complete weight file.

    Raises CheckpointError if a file cannot be read or written, a weight is not finite, or a written file does not read back correctly.
    """
    assert plan.shards
    num_threads = torch.get_num_threads()
    try:
        plan.target.mkdir(parents=True, exist_ok=True)
        for leftover in plan.target.rglob(f"{UNFINISHED}*"):
            leftover.unlink()
        stop = threading.Event()
        one_thread = partial(torch.set_num_threads, 1)  # pieces are small
        with ThreadPoolExecutor(plan.num_workers, "fp8", one_thread) as workers:
            waiting = [workers.submit(_convert_shard, shard, plan.source, plan.target, stop) for shard in plan.shards]
            try:
                for number, done in enumerate(as_completed(waiting), 1):
                    report(f"{done.result()}  ({number} of {len(waiting)})")
            except BaseException:
                stop.set()
                workers.shutdown(wait=True, cancel_futures=True)
                raise
        for name in plan.other_files:
            source = plan.source / name
            target = plan.target / name
            target.parent.mkdir(parents=True, exist_ok=True)
            unfinished = target.with_name(f"{UNFINISHED}{target.name}")
            shutil.copyfile(source, unfinished)
            sync(unfinished)
            unfinished.replace(target)
        if len(plan.shards) > 1 or (plan.source / INDEX).exists():
            replace_text(plan.target / INDEX, plan.index_json())
        replace_text(plan.target / CONFIG, plan.config_json())
    except OSError as error:
        raise CheckpointError(
            f"cannot convert to FP8: {error.filename or plan.target}: {error.strerror}; repeat the command to continue"
        ) from error
    finally:
        torch.set_num_threads(num_threads)


def _convert_shard(shard: Shard, source: Path, target: Path, stop: threading.Event) -> str:
    """Convert one file and return a line that describes it."""
    final, unfinished = target / shard.file, target / f"{UNFINISHED}{shard.file}"
    note = ""
    if final.exists():
        if _is_written(shard, source, final, stop):
            return f"{shard.file}  already exists and is correct"
        note = " (replaced a file with wrong content)"
    started = time.perf_counter()
    num_bytes = 0
    with unfinished.open("wb") as file:
        for place, data in _pieces(shard, source, stop):
            file.seek(place)
            num_bytes += file.write(data)
    sync(unfinished)
    if not _is_written(shard, source, unfinished, stop):
        raise CheckpointError(f"cannot verify {unfinished}: it reads back differently from what was written; check the disk and memory")
    unfinished.replace(final)
    sync(target)
    seconds = time.perf_counter() - started
    read = sum(tensor.end - tensor.start for tensor in shard.tensors)
    return f"{shard.file}  {amount(read)} -> {amount(num_bytes)}, {read / 1e6 / seconds:.0f} MB/s{note}"


def _is_written(shard: Shard, source: Path, path: Path, stop: threading.Event) -> bool:
    """Return whether `path` holds exactly the bytes of the converted file."""
    beginning, _ = shard.header()
    if path.stat().st_size != len(beginning) + shard.num_bytes:
        return False
    with path.open("rb") as file:
        for place, data in _pieces(shard, source, stop):
            file.seek(place)
            if file.read(len(data)) != data:
                return False
    return True


def _pieces(shard: Shard, source: Path, stop: threading.Event) -> Iterator[Piece]:
    """Yield all bytes of a new file in the order of the source. Raises CheckpointError if a weight is not finite, or `stop` is set."""
    beginning, places = shard.header()
    yield 0, beginning
    with (source / shard.file).open("rb") as file:
        for tensor in shard.tensors:
            content = _quantized(tensor, shard, places, file) if tensor.is_quantized else _copied(tensor, places[tensor.name], file)
            for piece in content:
                if stop.is_set():
                    raise CheckpointError(f"conversion of {shard.file} stopped because another file failed")
                yield piece


def _copied(tensor: TargetTensor, place: int, file: BufferedReader) -> Iterator[Piece]:
    for start in range(tensor.start, tensor.end, _CHUNK_BYTES):
        yield place + start - tensor.start, _read(file, start, min(_CHUNK_BYTES, tensor.end - start))


def _quantized(tensor: TargetTensor, shard: Shard, places: dict[str, int], file: BufferedReader) -> Iterator[Piece]:
    """Yield the values and scales of a tensor, quantized in whole blocks of rows; a per-tensor scale needs a first pass over the tensor."""
    quantization = shard.quantization
    values_place, scales_place = places[tensor.name], places[quantization.scale_name(tensor.name)]
    try:
        whole = None
        if quantization.strategy == "tensor":
            whole = scales_for(torch.stack([block_maxima(rows, quantization) for rows in _rows(tensor, shard, file)]).amax(dim=0))
            yield scales_place, _bytes(whole)
        for rows in _rows(tensor, shard, file):
            scales = fp8_scales(rows, quantization) if whole is None else whole
            values = _bytes(fp8_values(rows, scales, quantization))
            yield values_place, values
            values_place += len(values)
            if whole is None:
                yield scales_place, (written := _bytes(scales))
                scales_place += len(written)
    except ValueError as error:
        raise CheckpointError(f"cannot quantize {tensor.name} in {file.name}: {error}; use a checkpoint with finite weights") from None


def _rows(tensor: TargetTensor, shard: Shard, file: BufferedReader) -> Iterator[Tensor]:
    height, width = tensor.shape
    row_bytes = width * tensor.itemsize
    block_rows = 1 if shard.quantization.block_size is None else shard.quantization.block_size[0]
    num_rows = max(block_rows, _CHUNK_BYTES // row_bytes // block_rows * block_rows)
    for first in range(0, height, num_rows):
        count = min(num_rows, height - first)
        data = _read(file, tensor.start + first * row_bytes, count * row_bytes)
        yield torch.frombuffer(data, dtype=DTYPES[tensor.source.dtype]).view(count, width)


def _read(file: BufferedReader, start: int, num_bytes: int) -> bytearray:
    data = bytearray(num_bytes)
    file.seek(start)
    if file.readinto(data) != num_bytes:
        raise CheckpointError(f"cannot read {file.name}: it became shorter while it was being read; repeat the command")
    return data


def _bytes(tensor: Tensor) -> bytes:
    return tensor.contiguous().view(torch.uint8).numpy().tobytes()
