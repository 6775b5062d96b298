"""Loading of a Hugging Face checkpoint into a Megatron model with any layout."""

import logging
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from safetensors import SafetensorError
from torch import Tensor, nn

from fuligo.errors import CheckpointError
from fuligo.formats.hugging_face import read_config_json
from fuligo.models.architecture import Architecture
from fuligo.models.names import HEAD, Weight, value_names
from fuligo.models.registry import names_of
from fuligo.trainer.megatron_backend.weights.forms import read_pieces
from fuligo.trainer.megatron_backend.weights.local import RankGroups, local_weights, misfits, rank_groups, unwrapped
from fuligo.trainer.megatron_backend.weights.stored import StoredPart, StoredWeights, has_value_head
from fuligo.trainer.parameters import require_finite_weights

logger = logging.getLogger(__name__)

NUM_READERS = 4
"""Number of threads that read weights; several, because a copy waits for file pages and for the transfer to the GPU."""


def load_hugging_face(chunks: Sequence[nn.Module], directory: Path, *, is_value_model: bool = False) -> None:
    """Load this rank's weights, in place and in their data types, from a Hugging Face checkpoint.

    Every rank reads only its slices of the files; ranks do not communicate.

    Args:
        directory: directory with config.json and safetensors files, as published or as saved by transformers 5.
        is_value_model: the stages are those of a value model, whose head is loaded only if the files contain one.

    Raises:
        CheckpointError: the files are damaged, or tensors are missing, unknown, or differ in shape from the model's.
        ConfigError: config.json cannot be read, or describes an unsupported model.
    """
    names = names_of(read_config_json(directory), str(directory / "config.json"))
    num_mtp_layers = unwrapped(chunks[0]).config.mtp_num_layers or 0
    groups, local = rank_groups(), local_weights(chunks)
    if is_value_model and has_value_head(directory):
        names = value_names(names)
    elif is_value_model:
        local.pop(HEAD, None)
    with StoredWeights(directory, names, num_mtp_layers) as stored:
        if different := misfits(local, names):
            raise CheckpointError(
                f"cannot load {directory}: its architecture differs from that of MODEL_ARGS and --hf-checkpoint: only one of them has "
                f"{different[0]}; use matching MODEL_ARGS and checkpoints"
            )

        @torch.no_grad()
        def read(name: str, tensor: Tensor) -> None:
            weight = names.by_megatron_name[name]
            if weight.is_float32 and tensor.dtype != torch.float32:
                tensor.data = tensor.data.float()  # Float16Module has cast it, and Megatron restores float32 only in the next forward pass
            try:
                _fill(tensor, weight, stored.parts(weight), names.architecture, groups)
            except (OSError, SafetensorError) as error:
                raise CheckpointError(
                    f"cannot load {', '.join(weight.checkpoint)} from {directory}: {error}; copy or download the checkpoint again"
                ) from error
            except _ShapeError as error:
                raise CheckpointError(
                    f"cannot load {', '.join(weight.checkpoint)} from {directory}: {error}; use matching MODEL_ARGS and checkpoints"
                ) from error
            require_finite_weights([(", ".join(weight.checkpoint), tensor)], directory)

        started = time.perf_counter()
        with ThreadPoolExecutor(NUM_READERS, "weights") as readers:
            list(readers.map(read, local, local.values()))
    num_bytes, seconds = sum(tensor.nbytes for tensor in local.values()), time.perf_counter() - started
    logger.info("read %d weights, %.2f GB, from %s in %.1f s", len(local), num_bytes / 1e9, directory, seconds)


class _ShapeError(Exception):
    pass


def _fill(tensor: Tensor, weight: Weight, parts: Sequence[StoredPart], architecture: Architecture, groups: RankGroups) -> None:
    index, count = _place(weight, groups)
    if weight.is_vocabulary:
        start, stop = (min(share * tensor.shape[0], weight.shape[0]) for share in (index, index + 1))
        tensor[: stop - start].copy_(parts[0].read(0, start, stop))
        tensor[stop - start :].zero_()
        return
    if tensor.shape == weight.shape:
        index, count = 0, 1
    pieces = read_pieces(weight, parts, architecture, index, count)
    lengths = [len(piece) for piece in pieces]
    if (shape := (sum(lengths), *pieces[0].shape[1:])) != tensor.shape:
        share = "the stored weight" if count == 1 else f"part {index + 1} of {count} of the stored weight"
        raise _ShapeError(f"{share} has the shape {list(shape)}, but the model's tensor has {list(tensor.shape)}")
    for rows, piece in zip(tensor.split(lengths), pieces, strict=True):
        rows.copy_(piece)


def _place(weight: Weight, groups: RankGroups) -> tuple[int, int]:
    """Return this rank's index among the ranks that share the weight, and the number of these ranks."""
    if weight.axis is None:
        return 0, 1
    group = groups.tensor if weight.expert is None else groups.expert_tensor
    return group.rank(), group.size()
