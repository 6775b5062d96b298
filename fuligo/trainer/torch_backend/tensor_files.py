"""Named tensors on disk: safetensors shards with a Hugging Face index, written one shard and read one tensor at a time."""

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from fuligo.errors import CheckpointError
from fuligo.formats.buckets import cut_into_buckets
from fuligo.formats.disk import default_mode
from fuligo.formats.hf_tensors import HuggingFaceTensors
from fuligo.formats.hugging_face import MTP_PREFIX
from fuligo.trainer.parameters import require_finite_weights

SHARD_BYTES = 4 * 1024**3
"""Largest size of a file, unless a single tensor is larger."""


def write_tensors(directory: Path, named_tensors: Iterable[tuple[str, Tensor]], *, stem: str = "model") -> None:
    """Write `<stem>-00000.safetensors`, ... and `<stem>.safetensors.index.json` into `directory`, which is created if missing.

    GPU tensors are copied to the host one at a time, and host memory holds at most one shard of them. Raises CheckpointError or OSError
    if a file cannot be written.
    """
    directory.mkdir(parents=True, exist_ok=True)
    weight_map: dict[str, str] = {}
    num_bytes = 0
    on_host = ((name, tensor.cpu()) for name, tensor in named_tensors)
    for number, bucket in enumerate(cut_into_buckets(on_host, SHARD_BYTES)):
        file = f"{stem}-{number:05d}.safetensors"
        try:
            with default_mode(directory / file):
                save_file({name: tensor.contiguous() for name, tensor in bucket}, directory / file, metadata={"format": "pt"})
        except (OSError, SafetensorError) as error:  # SafetensorError also wraps disk errors
            raise CheckpointError(f"cannot write {directory / file}: {error}") from error
        weight_map |= {name: file for name, _ in bucket}
        num_bytes += sum(tensor.nbytes for _, tensor in bucket)
    index = {"metadata": {"total_size": num_bytes}, "weight_map": weight_map}
    (directory / f"{stem}.safetensors.index.json").write_text(json.dumps(index, indent=2))


class TensorFiles(HuggingFaceTensors):
    """Reader of the files of `write_tensors`; opening it reads and checks headers only."""

    def __init__(self, directory: Path, *, stem: str | None = "model") -> None:
        """Read and check the headers.

        Args:
            stem: start of the files' names; None: a PEFT directory, which has a single file and no index.

        Raises:
            CheckpointError: the index or a file is missing, truncated, or lacks a tensor of the index.
        """
        if stem is not None and not (index := directory / f"{stem}.safetensors.index.json").is_file():
            raise CheckpointError(f"cannot read {index}: it is missing; resume from a complete checkpoint")
        super().__init__(directory, stem or "model")

    def read_all(self) -> Iterator[tuple[str, Tensor]]:
        """Yield the names and tensors of all files, on the CPU, one at a time.

        Raises CheckpointError if a file is damaged, or a tensor contains NaN or infinities.
        """
        for name, stored in self._stored.items():
            tensor = self.read(name)
            require_finite_weights([(name, tensor)], self.directory / stored.file)
            yield name, tensor

    def check_shapes(self, expected: dict[str, tuple[int, ...]]) -> None:
        """Raise CheckpointError if the names or shapes of the tensors differ from `expected`."""
        for name in sorted(expected.keys() | self.shapes.keys()):
            held, wanted = self.shapes.get(name), expected.get(name)
            if held != wanted:
                flags = "--mtp-num-layers and --enable-mtp-training" if name.startswith(MTP_PREFIX) else "--lora-*"
                where = self.directory / self._stored[name].file if held else self.directory
                raise CheckpointError(
                    f"cannot resume from {where}: it belongs to another architecture: {name} is {_described(held)} there but "
                    f"{_described(wanted)} in this run; use the --hf-checkpoint, trained parameters and {flags} flags of the run that "
                    "saved it"
                )


def _described(shape: tuple[int, ...] | None) -> str:
    return "absent" if shape is None else f"of shape {list(shape)}"
