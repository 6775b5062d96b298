"""Checkpoint of the Megatron trainer: weights, optimizer, random state and counters, readable with any layout of ranks.

*.distcp, .metadata       weights by their names in Megatron's local layers, with layers and experts counted over all ranks;
                          `optimizer.state.*` of trained weights; `reference.*` if training changes the reference
common.pt, metadata.json  metadata of Megatron-Core's torch_dist checkpoints
model/                    config.json and tokenizer of the model, and the list of tensors in its Hugging Face checkpoint
rng/                      random state of every rank
trainer.json              counters, the layout and, in a LoRA run, the digest of the base weights
critic/                   the same files for the value model, if there is one
adapter/                  LoRA runs: the adapter in float32 as a PEFT directory; *.distcp then contain only the adapter and its optimizer
                          state, no base weights

Only an adapter is gathered. Each part of other weights is written by one of the ranks that hold it. A data-parallel rank's share of the
optimizer state, a range of each flattened weight, is written as a few rectangular shards.
"""

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Self, TypeVar

import torch
import torch.distributed as dist
from megatron.core import tensor_parallel
from megatron.core.optimizer.optimizer import MegatronOptimizer
from megatron.core.tensor_parallel.random import CudaRNGStatesTracker
from torch import Tensor, nn

from fuligo.errors import CheckpointError
from fuligo.formats.adapter_config import ADAPTER
from fuligo.formats.checkpoint_files import MODEL_FILES, copy_model_files
from fuligo.formats.dist_tensors import DistributedTensors
from fuligo.formats.shards import Shard, write_format, write_shards
from fuligo.layout.megatron import Layout
from fuligo.models.adapter import stored_config, write_adapter_config, write_adapter_weights
from fuligo.models.adapter_names import AdapterNames
from fuligo.models.names import HEAD, ModelNames
from fuligo.trainer.adapter_sender import other_base, require_scaling
from fuligo.trainer.megatron_backend.parts import STATES, LocalWeight, ParameterState, held_weights, parameter_states, set_step
from fuligo.trainer.megatron_backend.weights.export import named_weights
from fuligo.trainer.parameters import require_finite_weights
from fuligo.trainer.ranks.compute_thread import ComputeThread
from fuligo.trainer.ranks.world import World
from fuligo.trainer.resume_state import Counters, read_random_state, set_random_state, write_random_state
from fuligo.trainer.step import Progress

logger = logging.getLogger(__name__)

_OPTIMIZER, _REFERENCE = "optimizer.state.", "reference."
_TRACKER = "tracker."
T = TypeVar("T")


@dataclass(slots=True, frozen=True)
class SavedAdapter:
    """Adapter that a checkpoint contains instead of the base weights."""

    names: AdapterNames
    base_digest: str


@dataclass(slots=True)
class MegatronState:
    """Live objects that a checkpoint is written from and read into."""

    chunks: Sequence[nn.Module]
    """This rank's stages, bare or wrapped."""
    names: ModelNames
    optimizer: MegatronOptimizer
    layout: Layout
    progress: Progress
    reference: Mapping[str, Tensor] | None = None
    """This rank's weights of the reference model by the names of `local_weights`; None if training does not change it."""
    adapter: SavedAdapter | None = None
    """Adapter of a LoRA run; None if the weights themselves are trained."""

    @property
    def saved_names(self) -> ModelNames:
        """Names of the saved tensors: the model's weights, or its adapter in a LoRA run."""
        return self.names if self.adapter is None else self.adapter.names

    @property
    def base_digest(self) -> str | None:
        return None if self.adapter is None else self.adapter.base_digest


class CheckpointWriter:
    """Writer of checkpoints, one at a time, either synchronously (`save`) or in the background (`begin`)."""

    def __init__(self, world: World) -> None:
        self._world = world
        self._thread: ComputeThread | None = None
        self._group: dist.ProcessGroup | None = None

    def save(self, states: Mapping[Path, MegatronState], *, model_files: Path) -> None:
        """Write each state into its directory, which the caller renames when it is complete. A collective.

        config.json and tokenizer are copied from the Hugging Face directory `model_files`. Raises CheckpointError, on every rank, if one
        could not write.
        """
        self._write_small_files(states, model_files)
        for directory, state in states.items():
            adapter = _gathered_adapter(state, self._world)
            write_shards(directory, list(_shards(state)), self._world.objects)
            _agreed(self._world, partial(_write_adapter, directory, state, adapter))

    def begin(self, states: Mapping[Path, MegatronState], *, model_files: Path) -> Future[None]:
        """Write the small files, copy the tensors to host memory, and write the copies in the background. A collective.

        The future completes on each rank when all ranks have written their shards, with a CheckpointError if one of them could not write.
        Rank 0's future also covers the adapter. Raises CheckpointError, on every rank, if one could not write its small files.
        """
        if self._thread is None:
            self._thread = ComputeThread("checkpoint writer")
            # A separate group, so that the writers' collectives do not mix with the trainer's.
            self._group = dist.new_group(backend="gloo") if self._world.size > 1 else None  # pyrefly: ignore[bad-assignment]
        self._write_small_files(states, model_files)
        copies = {directory: [shard.on_cpu() for shard in _shards(state)] for directory, state in states.items()}
        adapters = {directory: _gathered_adapter(state, self._world) for directory, state in states.items()}

        def write() -> None:
            for directory, shards in copies.items():
                write_shards(directory, shards, self._group)
                _write_adapter(directory, states[directory], adapters[directory])

        return self._thread.submit(write)

    def _write_small_files(self, states: Mapping[Path, MegatronState], model_files: Path) -> None:
        def write() -> None:
            for directory, state in states.items():
                # In addition to torch's random state, that of Megatron's parallel regions.
                tracked = {_TRACKER + name: tensor.cpu() for name, tensor in _tracker().get_states().items()}
                write_random_state(directory, self._world, tracked)
                if self._world.rank == 0:
                    write_format(directory)
                    copy_model_files(model_files, directory / MODEL_FILES)
                    counters = Counters(state.progress, state.base_digest, layout=state.layout)
                    counters.write(directory, self._world.size)

        _agreed(self._world, write)


def restore_state(directory: Path, state: MegatronState, world: World) -> None:
    """Load a checkpoint that `CheckpointWriter` wrote with any layout. A collective.

    Names and shapes are checked before any state changes. If the layout differs, every rank keeps its current random state.

    Raises:
        CheckpointError: a file is missing or truncated, or the checkpoint belongs to another model; raised on every rank. Also raised, on
            the ranks that read it, if a weight contains NaN or infinities.
    """
    opened = _agreed(world, lambda: _Opened.of(directory, state, world))
    _read_weights(opened.tensors, opened.weights)
    set_step(state.optimizer, opened.saved.progress.num_updates)
    if opened.saved.progress.num_updates:
        for held, parameter in _trained(opened.weights, state.optimizer):
            values = parameter.tensors()
            for shard in _state_shards(held, parameter, values):
                opened.tensors.read_into(shard)
            parameter.overwrite(values)
    else:
        state.optimizer.reload_model_params()
    if state.reference is not None:
        for shard in _reference_shards(opened.weights, state.reference):
            opened.tensors.read_into(shard)
    if opened.random is not None:
        states = {name.removeprefix(_TRACKER): tensor for name, tensor in opened.random.items() if name.startswith(_TRACKER)}
        _tracker().set_states(states)
        set_random_state(opened.random, world)
    elif world.rank == 0:
        logger.info("%s was saved with another layout (%s); random states are not restored", directory, opened.saved.layout)
    state.progress.num_optimizer_steps = opened.saved.progress.num_optimizer_steps
    state.progress.num_rollouts = opened.saved.progress.num_rollouts
    state.progress.num_skipped_steps = opened.saved.progress.num_skipped_steps


def load_weights(directory: Path, chunks: Sequence[nn.Module], names: ModelNames, world: World) -> None:
    """Load this rank's weights, in place and in their data types, from a distributed checkpoint. A collective.

    The head of a value model (`value_names`) is not changed if the checkpoint is that of a policy. Raises CheckpointError, on every rank,
    if a file is missing or truncated, or the checkpoint belongs to another model; on the ranks that read it, if a weight contains NaN or
    infinities.
    """

    def opened() -> tuple[DistributedTensors, list[LocalWeight]]:
        tensors, weights = DistributedTensors(directory), held_weights(chunks, names)
        if names.by_megatron_name[HEAD].shape[0] == 1 and tensors.shapes.get(HEAD) != names.by_megatron_name[HEAD].shape:
            weights = [held for held in weights if held.weight.megatron != HEAD]
        _check_weights(tensors, weights, names)
        return tensors, weights

    _read_weights(*_agreed(world, opened))


@dataclass(slots=True, frozen=True)
class _Opened:
    """Opened checkpoint whose names and shapes match the state to load it into."""

    tensors: DistributedTensors
    weights: list[LocalWeight]
    saved: Counters
    random: dict[str, Tensor] | None
    """This rank's random state; None if the checkpoint was saved with another layout."""

    @classmethod
    def of(cls, directory: Path, state: MegatronState, world: World) -> Self:
        saved = Counters.read(directory, "megatron")
        if saved.base_digest != state.base_digest:
            raise CheckpointError(other_base(directory, saved.base_digest, state.base_digest, weights=directory))
        tensors, weights = DistributedTensors(directory), held_weights(state.chunks, state.saved_names)
        _check_weights(tensors, weights, state.saved_names)
        if state.reference is not None:
            _check_shapes(tensors, {_REFERENCE + held.weight.megatron: held.weight.shape for held in weights})
        if saved.progress.num_updates:
            _check_trained(tensors, weights)
        if state.adapter is not None:
            require_scaling(directory, state.adapter.names.adapter.scaling)
        return cls(tensors, weights, saved, read_random_state(directory, world) if saved.layout == state.layout else None)


def _shards(state: MegatronState) -> Iterator[Shard]:
    weights = held_weights(state.chunks, state.saved_names)
    own = [held for number, held in enumerate(weights) if _is_written_here(held, number)]
    yield from (part.shard for held in own for part in held.parts)
    if state.reference is not None:
        yield from _reference_shards(own, state.reference)
    if state.progress.num_updates:
        written = {id(held.tensor) for held in own}
        for held, parameter in _trained(weights, state.optimizer):
            if held.is_first_copy and (parameter.is_spread or id(held.tensor) in written):
                yield from _state_shards(held, parameter, parameter.tensors())


def _is_written_here(held: LocalWeight, number: int) -> bool:
    """Return whether this rank writes the weight. Data-parallel ranks hold the same weights, so each writes every n-th one."""
    rank, size = held.data_parallel
    return held.is_first_copy and number % size == rank


def _reference_shards(weights: Sequence[LocalWeight], reference: Mapping[str, Tensor]) -> Iterator[Shard]:
    for held in weights:
        tensor = reference[held.name].view(-1)
        yield from held.range_shards(_REFERENCE + held.weight.megatron, tensor, 0, tensor.numel())


def _trained(weights: Sequence[LocalWeight], optimizer: MegatronOptimizer) -> Iterator[tuple[LocalWeight, ParameterState]]:
    by_parameter = {id(held.tensor): held for held in weights}
    for state in parameter_states(optimizer):
        yield by_parameter[id(state.parameter)], state


def _state_shards(held: LocalWeight, state: ParameterState, values: Mapping[str, Tensor]) -> Iterator[Shard]:
    for name, value in values.items():
        yield from held.range_shards(f"{_OPTIMIZER}{name}.{held.weight.megatron}", value, state.start, state.end)


@torch.no_grad()
def _read_weights(tensors: DistributedTensors, weights: Sequence[LocalWeight]) -> None:
    for held in weights:
        if held.weight.is_vocabulary:
            held.tensor.zero_()  # padding rows
        for part in held.parts:
            tensors.read_into(part.shard)
        require_finite_weights([(held.weight.megatron, held.tensor)], tensors.directory)


def _check_weights(tensors: DistributedTensors, weights: Sequence[LocalWeight], names: ModelNames) -> None:
    _check_shapes(tensors, {held.weight.megatron: held.weight.shape for held in weights})
    stored = {name for name in tensors.shapes if not name.startswith((_OPTIMIZER, _REFERENCE))}
    if unknown := sorted(stored - {weight.megatron for weight in names.weights()}):
        raise CheckpointError(
            f"cannot load {tensors.directory}: it belongs to another architecture: it contains {unknown[0]}, which this run's "
            f"{names.architecture.model_type} model does not have; use the --hf-checkpoint that it was made with"
        )


def _check_trained(tensors: DistributedTensors, weights: Sequence[LocalWeight]) -> None:
    for held in weights:
        key = f"{_OPTIMIZER}{STATES[0]}.{held.weight.megatron}"
        if held.tensor.requires_grad != (key in tensors.shapes):
            then, now = ("frozen", "trained") if held.tensor.requires_grad else ("trained", "frozen")
            raise CheckpointError(
                f"cannot resume {tensors.directory}: {held.weight.megatron} was {then} in the run that saved it but is {now} in this one; "
                "use the same --only-train-params-name-list, --freeze-params-name-list and --enable-mtp-training"
            )
    trained = [held.weight for held in weights if held.tensor.requires_grad]
    _check_shapes(tensors, {f"{_OPTIMIZER}{state}.{weight.megatron}": weight.shape for weight in trained for state in STATES})


def _check_shapes(tensors: DistributedTensors, expected: Mapping[str, tuple[int, ...]]) -> None:
    for name, shape in expected.items():
        held = tensors.shapes.get(name)
        if held != shape:
            there = "is missing there" if held is None else f"has the shape {list(held)} there"
            raise CheckpointError(
                f"cannot load {tensors.directory}: it belongs to another architecture: {name} {there}, but has the shape {list(shape)} in "
                "this run; use the --hf-checkpoint that it was made with"
            )


def _gathered_adapter(state: MegatronState, world: World) -> dict[str, Tensor]:
    """Return the full adapter in host memory on rank 0; an empty dict on other ranks, or without an adapter. A collective."""
    if state.adapter is None:
        return {}
    tensors = named_weights(state.chunks, state.adapter.names, dtype=torch.float32)
    return {name: tensor.to("cpu", copy=True) for name, tensor in tensors if world.rank == 0}


def _write_adapter(directory: Path, state: MegatronState, tensors: Mapping[str, Tensor]) -> None:
    if tensors and state.adapter is not None:
        names = state.adapter.names
        write_adapter_config(stored_config(names.adapter, names.peft_targets), directory / ADAPTER)
        write_adapter_weights(tensors, directory / ADAPTER)


def _tracker() -> CudaRNGStatesTracker:
    tracker = tensor_parallel.get_cuda_rng_tracker()
    assert tracker is not None
    return tracker


def _agreed(world: World, work: Callable[[], T]) -> T:
    """Run `work` on every rank, and return its result if it succeeded on all. A collective.

    Raises the CheckpointError or OSError of the first rank that raised one, as a CheckpointError on every rank.
    """
    result: list[T] = []
    problem: str | None = None
    try:
        result.append(work())
    except CheckpointError as error:
        problem = str(error)
    except OSError as error:
        problem = f"cannot access {error.filename}: {error.strerror}; check the disk, or use another directory"
    problems: list[str | None] = [problem]
    if world.size > 1:
        problems = [None] * world.size
        dist.all_gather_object(problems, problem, group=world.objects)
    if (first := next((text for text in problems if text is not None), None)) is not None:
        raise CheckpointError(first)
    return result[0]
