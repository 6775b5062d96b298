"""Named tensors on disk: safetensors shards with the index of Hugging Face loaders, written and read one shard at a time."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Self

from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from fuligo.errors import CheckpointError
from fuligo.formats.adapter_config import ADAPTER_WEIGHTS
from fuligo.formats.buckets import cut_into_buckets
from fuligo.trainer.parameters import require_finite_weights

SHARD_BYTES = 4 * 1024**3


def write_tensors(directory: Path, named_tensors: Iterable[tuple[str, Tensor]], *, stem: str = "model") -> None:
    """Write `<stem>-00000.safetensors`, ... and `<stem>.safetensors.index.json` into `directory`, which is created.

    Host memory holds at most one shard of tensors; a GPU's tensors are copied one at a time.

    Raises:
        CheckpointError: a file cannot be written.
    """
    directory.mkdir(parents=True, exist_ok=True)
    weight_map: dict[str, str] = {}
    num_bytes = 0
    on_host = ((name, tensor.cpu()) for name, tensor in named_tensors)
    for number, bucket in enumerate(cut_into_buckets(on_host, SHARD_BYTES)):
        file = f"{stem}-{number:05d}.safetensors"
        try:
            save_file({name: tensor.contiguous() for name, tensor in bucket}, directory / file, metadata={"format": "pt"})
        except SafetensorError as error:  # includes errors of the disk
            raise CheckpointError(f"cannot write {directory / file}: {error}") from error
        weight_map |= {name: file for name, _ in bucket}
        num_bytes += sum(tensor.nbytes for _, tensor in bucket)
    index = {"metadata": {"total_size": num_bytes}, "weight_map": weight_map}
    (directory / f"{stem}.safetensors.index.json").write_text(json.dumps(index, indent=2))


class TensorFiles:
    """Reader of the files of `write_tensors`; opening it reads and checks headers only."""

    def __init__(self, directory: Path, *, stem: str = "model") -> None:
        """Read and check the headers.

        Raises:
            CheckpointError: the index or a file is missing, truncated, or lacks a tensor of the index.
        """
        index = directory / f"{stem}.safetensors.index.json"
        try:
            files: dict[str, str] = json.loads(index.read_text())["weight_map"]
        except (OSError, ValueError, KeyError) as error:
            raise CheckpointError(f"cannot read {index}: {error}") from error
        self._read_headers(directory, files)
        absent = sorted(files.keys() - self.shapes.keys())
        if absent:
            raise CheckpointError(f"{directory / files[absent[0]]}: lacks {absent[0]}, which {index.name} lists")

    @classmethod
    def of_adapter(cls, directory: Path) -> Self:
        """Open the single file of a PEFT directory, which has no index.

        Raises:
            CheckpointError: it is missing or truncated.
        """
        files = cls.__new__(cls)
        files._read_headers(directory, {"": ADAPTER_WEIGHTS})
        files._files = dict.fromkeys(files.shapes, ADAPTER_WEIGHTS)
        return files

    def _read_headers(self, directory: Path, files: dict[str, str]) -> None:
        self._directory, self._files = directory, files
        self.shapes: dict[str, tuple[int, ...]] = {}
        for file in sorted(set(self._files.values())):
            with self._open(file) as tensors:
                self.shapes |= {name: tuple(tensors.get_slice(name).get_shape()) for name in tensors.keys()}  # noqa: SIM118

    def read(self) -> Iterator[tuple[str, Tensor]]:
        """Yield all tensors, on the CPU, one at a time.

        Raises:
            CheckpointError: a file is damaged, or a tensor holds NaN.
        """
        for file in sorted(set(self._files.values())):
            with self._open(file) as tensors:
                for name in tensors.keys():  # noqa: SIM118
                    tensor = tensors.get_tensor(name)
                    require_finite_weights([(name, tensor)], self._directory / file)
                    yield name, tensor

    def check_shapes(self, expected: dict[str, tuple[int, ...]]) -> None:
        """Check names and shapes.

        Raises:
            CheckpointError: the files have other names or shapes than `expected`.
        """
        for name in sorted(expected.keys() | self.shapes.keys()):
            held, wanted = self.shapes.get(name), expected.get(name)
            if held != wanted:
                where = self._directory / self._files[name] if held else self._directory
                raise CheckpointError(
                    f"{where}: belongs to another architecture: {name} is {_described(held)} there but {_described(wanted)} in this run. "
                    "Resume with the --hf-checkpoint and the trained parameters that the checkpoint was made with."
                )

    def _open(self, file: str):
        try:
            return safe_open(self._directory / file, framework="pt")
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{self._directory / file}: missing, truncated or corrupt: {error}") from error


def _described(shape: tuple[int, ...] | None) -> str:
    return "absent" if shape is None else f"of shape {list(shape)}"
