"""Checkpoint of the torch trainer: weights, optimizer, random state and counters, in safetensors and JSON (no pickle).

hf/         float32 weights as a Hugging Face directory; tensors.json: data types of the original checkpoint, for an export; also the
            unchanged tensors of an MTP layer that the run did not load
adapter/    LoRA runs, instead of hf/: the adapter in float32 as a PEFT directory; base_precision.json if the base was quantized
optimizer/  exp_avg, exp_avg_sq and step of every trained parameter, not sharded, so that any number of ranks can resume
reference/  weights of the reference model, if it changes in training
critic/     value model, if there is one: like hf/, with an output layer of one row; critic_optimizer/ is like optimizer/
rng/        random state of every rank
trainer.json  counters and, in a LoRA run, the digest of the base weights
"""

import json
import re
import shutil
from collections import deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any, Self

import torch
from torch import Tensor, nn
from transformers.generation.configuration_utils import GenerationConfig
from transformers.modeling_utils import PreTrainedModel

from fuligo.errors import CheckpointError
from fuligo.formats.adapter_config import ADAPTER, NAME, TOWER_MODULES
from fuligo.formats.checkpoint_files import VALUE_MODEL, other_files, record_dtypes
from fuligo.formats.hugging_face import MTP_PREFIX, language_part, read_config_json
from fuligo.formats.quantized_base import QuantizedBase, other_storage
from fuligo.models.adapter import adapter_tensors, has_adapter, scaling_of, write_adapter_config, write_adapter_weights
from fuligo.models.registry import unwritten_keys
from fuligo.trainer.adapter_sender import other_base, require_scaling
from fuligo.trainer.ranks.world import World
from fuligo.trainer.resume_state import Counters, has_random_state, read_random_state, set_random_state, write_random_state
from fuligo.trainer.step import Progress
from fuligo.trainer.torch_backend.critic import Critic
from fuligo.trainer.torch_backend.learner import Learner
from fuligo.trainer.torch_backend.lora import named_adapter_weights
from fuligo.trainer.torch_backend.tensor_files import TensorFiles, write_tensors
from fuligo.trainer.torch_backend.weights import full_tensor, load_tensors, named_weights, shard_like, weight_tensors

MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(slots=True)
class TrainingState:
    """Live objects that a checkpoint is written from and read into."""

    policy: Learner
    reference: PreTrainedModel | None
    """Reference model; None if training does not change it."""
    critic: Critic | None = None
    """Value model; None without one."""
    base_digest: str | None = None
    """Digest of the base weights of an adapter; None without an adapter."""
    base: QuantizedBase | None = None
    """Storage of the base weights; None: not quantized."""
    carried: dict[str, Tensor] = field(default_factory=dict)
    """Tensors of an MTP layer that was not loaded, on rank 0. Checkpoints contain them, and a restore replaces them."""


@dataclass(slots=True)
class _Part:
    """Large tensors of one directory of a checkpoint. Iterating over them is a collective."""

    place: str
    stem: str
    tensors: Iterator[tuple[str, Tensor]]

    def write(self, directory: Path) -> None:
        if self.place == ADAPTER:
            write_adapter_weights(dict(self.tensors), directory / ADAPTER)
        else:
            write_tensors(directory / self.place, self.tensors, stem=self.stem)


def save_state(directory: Path, state: TrainingState, *, model_files: Path, world: World) -> None:
    """Write a checkpoint. A collective; rank 0 writes everything except the random state of the other ranks.

    The caller renames `directory` when it is complete. The tokenizer files of the Hugging Face directory `model_files` are copied next to
    the weights. Raises CheckpointError or OSError if a file cannot be written.
    """
    for part in _gathered(state, world):
        part.write(directory)
    _write_small_files(directory, state, model_files, world)


def copy_state(directory: Path, state: TrainingState, *, model_files: Path, world: World) -> Callable[[], None]:
    """Write the small files of `save_state` and copy the large tensors to rank 0's host memory. A collective.

    Return the function that writes the copies; on other ranks it does nothing.
    """
    copies: list[_Part] = []
    for part in _gathered(state, world):
        held = [(name, tensor.detach().to("cpu", copy=True)) for name, tensor in part.tensors]
        copies.append(_Part(part.place, part.stem, iter(held)))
    _write_small_files(directory, state, model_files, world)

    def write() -> None:
        for part in copies:
            part.write(directory)

    return write


def _gathered(state: TrainingState, world: World) -> Iterator[_Part]:
    """Yield all parts on rank 0; on other ranks, take part in their collectives."""
    for part in _parts(state):
        if world.rank == 0:
            yield part
        else:
            deque(part.tensors, maxlen=0)


def _parts(state: TrainingState) -> Iterator[_Part]:
    learners = [(state.policy, "hf", "optimizer")]
    if state.critic is not None:
        learners.append((state.critic.learner, VALUE_MODEL, "critic_optimizer"))
    for learner, weights, moments in learners:
        if has_adapter(learner.model):
            yield _Part(ADAPTER, "adapter_model", named_adapter_weights(learner.model))
        else:
            carried = state.carried.items() if weights == "hf" else ()
            yield _Part(weights, "model", chain(named_weights(learner.model), carried))
        yield _Part(moments, "optimizer", _named_moments(learner.model, learner.optimizer))
    if state.reference is not None:
        yield _Part("reference", "model", named_weights(state.reference))


def _write_small_files(directory: Path, state: TrainingState, model_files: Path, world: World) -> None:
    write_random_state(directory, world, {})
    if world.rank == 0:
        if state.base_digest is None:
            _write_model_files(directory / "hf", state.policy.model, model_files)
        else:
            peft_config: Any = state.policy.model.peft_config
            write_adapter_config(peft_config[NAME], directory / ADAPTER)
            if state.base is not None:
                state.base.write(directory / ADAPTER)
        if state.critic is not None:
            _write_model_files(directory / VALUE_MODEL, state.critic.learner.model, model_files)
        of_critic = None if state.critic is None else state.critic.learner.progress
        Counters(state.policy.progress, state.base_digest, of_critic).write(directory, world.size)


def restore_state(directory: Path, state: TrainingState, world: World) -> None:
    """Load a checkpoint that `save_state` wrote with any number of ranks. Names and shapes are checked before any state changes.

    A rank without random state in the checkpoint keeps its current one. If the checkpoint has no value model and the settings allow that,
    the run's initial value model is kept.

    Raises:
        CheckpointError: a file is missing or truncated, belongs to another architecture or base model, or contains NaN or infinities.
    """
    counters = Counters.read(directory, "torch")
    if counters.base_digest != state.base_digest:
        raise CheckpointError(other_base(directory, counters.base_digest, state.base_digest, weights=directory / "hf"))
    if state.base_digest is not None and (trained_on := QuantizedBase.read(directory / ADAPTER)) != state.base:
        raise CheckpointError(
            f"cannot resume {directory}: its adapter {other_storage(trained_on, state.base)}; use the --lora-base-precision (and the "
            "engine's data type) that it was trained with"
        )
    weights = TensorFiles(directory / "hf") if state.base_digest is None else TensorFiles(directory / ADAPTER, stem=None)
    saved = [_Saved.open(state.policy, counters.progress, weights=weights, directory=directory / "optimizer")]
    if has_adapter(state.policy.model):
        require_scaling(directory, scaling_of(state.policy.model))
    reference = TensorFiles(directory / "reference") if state.reference is not None else None
    if state.reference is not None and reference is not None:
        reference.check_shapes(_weight_shapes(state.reference))
    if state.critic is not None and counters.critic is not None:
        weights = TensorFiles(directory / VALUE_MODEL)
        saved.append(_Saved.open(state.critic.learner, counters.critic, weights=weights, directory=directory / "critic_optimizer"))
    elif state.critic is not None:
        state.critic.begin_at(directory)
    random_state = read_random_state(directory, world) if has_random_state(directory, world) else None

    for of_learner in saved:
        of_learner.load()
    if world.rank == 0 and (carried := saved[0].read_carried()):
        state.carried.clear()
        state.carried.update(carried)
    if state.reference is not None and reference is not None:
        load_tensors(weight_tensors(state.reference), reference.read_all())
    if random_state is not None:
        set_random_state(random_state, world)


@dataclass(slots=True, frozen=True)
class _Saved:
    """One model's checked files in a checkpoint."""

    learner: Learner
    progress: Progress
    weights: TensorFiles
    moments: TensorFiles | None
    """Optimizer state; None if the checkpoint was saved before the first update of the weights."""

    @classmethod
    def open(cls, learner: Learner, progress: Progress, *, weights: TensorFiles, directory: Path) -> Self:
        """Open one model's files. `directory`: directory of the optimizer's state.

        Raises CheckpointError if names or shapes of tensors are not those of the model.
        """
        moments = TensorFiles(directory, stem="optimizer") if progress.num_updates else None
        own = _shapes(adapter_tensors(learner.model)) if has_adapter(learner.model) else _weight_shapes(learner.model)
        carried = {} if _holds_mtp(own) else {name: shape for name, shape in weights.shapes.items() if name.startswith(MTP_PREFIX)}
        weights.check_shapes(own | carried)
        if moments is not None:
            moments.check_shapes(_moment_shapes(learner.model, saved=moments.shapes))
        return cls(learner, progress, weights, moments)

    def load(self) -> None:
        model = self.learner.model
        if has_adapter(model):
            load_tensors(adapter_tensors(model), self.weights.read_all())
        else:
            own = _weight_shapes(model)
            load_tensors(weight_tensors(model), ((name, tensor) for name, tensor in self.weights.read_all() if name in own))
        parameters, state = _trained_parameters(model), self.learner.optimizer.state
        state.clear()
        for name, full in self.moments.read_all() if self.moments is not None else ():
            parameter_name, _, key = name.rpartition(".")
            if parameter_name not in parameters:  # it belongs to a tower that is frozen in this run
                continue
            parameter = parameters[parameter_name]
            own = full.to(parameter.device) if key == "step" else shard_like(full, parameter)
            state[parameter][key] = own.clone()  # on a CPU, `own` maps the file's memory, which cannot be freed for engines
        self.learner.progress = self.progress

    def read_carried(self) -> dict[str, Tensor]:
        """Return the tensors of an MTP layer that the model has not loaded."""
        own = {} if has_adapter(self.learner.model) else _weight_shapes(self.learner.model)
        names = [name for name in self.weights.shapes if name.startswith(MTP_PREFIX) and not _holds_mtp(own)]
        return {name: self.weights.read(name).clone() for name in names}


def _holds_mtp(names: Iterable[str]) -> bool:
    return any(name.startswith(MTP_PREFIX) for name in names)


def _weight_shapes(model: PreTrainedModel) -> dict[str, tuple[int, ...]]:
    return _shapes(weight_tensors(model))


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors.items()}


def _write_model_files(directory: Path, model: PreTrainedModel, model_files: Path) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    model.config.save_pretrained(directory)
    if isinstance(model.generation_config, GenerationConfig):
        model.generation_config.save_pretrained(directory)
    if lost := unwritten_keys(read_config_json(model_files)):
        config = directory / "config.json"
        written = json.loads(config.read_text())
        language_part(written).update(lost)
        config.write_text(json.dumps(written, indent=2) + "\n")
    for file in other_files(model_files):
        if not (directory / file.name).exists():
            shutil.copy(file, directory)
    record_dtypes(model_files, directory)


def _trained_parameters(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: parameter for name, parameter in model.named_parameters() if parameter.requires_grad}


def _named_moments(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in _trained_parameters(model).items():
        if state := optimizer.state.get(parameter):
            yield f"{name}.step", state["step"]
            for moment in MOMENTS:
                yield f"{name}.{moment}", full_tensor(state[moment])


def _moment_shapes(model: nn.Module, *, saved: Container[str]) -> dict[str, tuple[int, ...]]:
    """Return the shapes of the optimizer state by name.

    They include `saved` state of a tower that is frozen in this run, because a run on images may continue on text.
    """
    shapes: dict[str, tuple[int, ...]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad or (f"{name}.step" in saved and re.match(TOWER_MODULES, name)):
            shapes |= {f"{name}.step": (), **{f"{name}.{moment}": tuple(parameter.shape) for moment in MOMENTS}}
    return shapes
