"""PEFT's LoRA layers in a Hugging Face model: adding, disabling, loading, saving and merging them, and sharing base weights.

PEFT is imported only where it is called, so a model without an adapter does not need it.
"""

import logging
import re
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers.modeling_utils import PreTrainedModel

from fuligo.errors import CheckpointError, ConfigError
from fuligo.formats.adapter_config import (
    ADAPTER_CONFIG,
    ADAPTER_WEIGHTS,
    EXPERT_PARAMETERS,
    NAME,
    TOWER_MODULES,
    AdapterConfig,
    is_adapter_name,
    stored_name,
)
from fuligo.formats.disk import default_mode
from fuligo.models.adapter_names import PeftTargets, require_rank, require_targets
from fuligo.models.experts_adapter import add_experts_adapter, experts_adapters, stacked_factors
from fuligo.models.transformers_types import model_class, read_config

if TYPE_CHECKING:
    from peft import LoraConfig
    from peft.tuners.lora import LoraLayer


# PEFT imports bitsandbytes if it is installed; bitsandbytes would then warn in every run about a kernel that fuligo does not use.
logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)


def empty_model(directory: Path) -> PreTrainedModel:
    """Return the model that config.json describes, on the meta device (no weights are allocated)."""
    config = read_config(directory)
    with torch.device("meta"):
        return model_class(config).from_config(config, trust_remote_code=False)


def linear_layers(model: PreTrainedModel) -> list[str]:
    """Return the names of the linear layers that can have an adapter.

    Excludes the output layer, the indexers of sparse attention (their token choice has no gradient), routers, and vision and audio towers.
    """
    head = model.get_output_embeddings()

    def may_adapt(name: str) -> bool:
        return ".indexer." not in name and ".router." not in name and re.match(TOWER_MODULES, name) is None

    return [name for name, module in model.named_modules() if isinstance(module, nn.Linear) and module is not head and may_adapt(name)]


def peft_targets(model: PreTrainedModel, config: AdapterConfig) -> PeftTargets:
    """Return the `target_modules` and `target_parameters` of the adapter's `adapter_config.json`."""
    has_experts = any(
        name.endswith(".experts") and next(module.parameters(recurse=False), None) is not None for name, module in model.named_modules()
    )
    return PeftTargets.of(config, linear_layers(model), has_experts=has_experts)


def add_adapter(model: PreTrainedModel, config: AdapterConfig, *, seed: int) -> None:
    """Add PEFT's LoRA layers to the model, in place. All other parameters are frozen; B starts as zeros, so the outputs do not change.

    `seed` is for A, so that all ranks start with the same adapter; the global random state does not change. Raises ConfigError if the
    adapter cannot be added to this model.
    """
    from peft import inject_adapter_in_model

    names = linear_layers(model)
    require_targets(config.target_modules, names, model=type(model).__name__)
    layers = [cast(nn.Linear, model.get_submodule(name)) for name in names]
    require_rank(config.rank, max(max(layer.in_features, layer.out_features) for layer in layers), model=type(model).__name__)
    every = {name.rpartition(".")[2] for name in names}
    excluded = _excluded_modules(model, [target.rpartition(".")[2] for target in config.target_modules] or every)
    added = _peft_config(config, list(config.target_modules) or sorted(every), excluded)
    stored = stored_config(config, peft_targets(model, config), excluded)
    # A model with a config would make PEFT adapt the experts for targets such as `gate_proj` (see `EXPERT_MATRICES`).
    parts = nn.Module()
    for name, part in model.named_children():
        parts.add_module(name, part)
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about tied embeddings, which are not adapted
        torch.manual_seed(seed)
        inject_adapter_in_model(added, parts, NAME)
        if config.adapts_experts:
            add_experts_adapter(model, config)
    model.peft_config = {NAME: stored}  # pyrefly: ignore[bad-assignment]
    set_dropout(model, on=False)


def _excluded_modules(model: PreTrainedModel, adapted: Collection[str]) -> str | None:
    """Return the pattern of the modules that PEFT must exclude, or None if no tower has modules with these names."""
    collide = any(re.match(TOWER_MODULES, name) and name.rpartition(".")[2] in adapted for name, _ in model.named_modules())
    return TOWER_MODULES if collide else None


def lora_layers(model: nn.Module) -> dict[str, "LoraLayer"]:
    """Return PEFT's LoRA layers, by the names of the linear layers that they wrap."""
    return {name: cast("LoraLayer", module) for name, module in model.named_modules() if hasattr(module, "lora_A")}


def has_adapter(model: nn.Module) -> bool:
    return any(hasattr(module, "lora_A") for module in model.modules())


def scaling_of(model: nn.Module) -> float:
    """Return the factor by which a model's adapter scales B A (`AdapterConfig.scaling`). The model must have an adapter."""
    return next(iter(lora_layers(model).values())).scaling[NAME]


def set_dropout(model: nn.Module, *, on: bool) -> None:
    """Enable the dropout before A for training, or disable it for passes whose log-probabilities are compared with others."""
    for layer in lora_layers(model).values():
        layer.lora_dropout.train(on)


@contextmanager
def adapter_off(model: nn.Module) -> Iterator[None]:
    """Disable the adapter inside the block.

    PEFT's own switch, `enable_adapters`, also changes `requires_grad` of the parameters, which FSDP may have gathered.
    """
    layers, experts = lora_layers(model).values(), [adapter for _, adapter in experts_adapters(model)]

    def switch(*, on: bool) -> None:
        for layer in layers:
            layer._disable_adapters = not on
        for adapter in experts:
            adapter.is_on = on

    switch(on=False)
    try:
        yield
    finally:
        switch(on=True)


def adapter_tensors(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the adapter's parameters by their names in PEFT's files."""
    named = ((stored_name(name), parameter) for name, parameter in model.named_parameters())
    return {name: parameter for name, parameter in named if is_adapter_name(name)}


def base_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the state dict without the adapter's tensors, under the names that a model without an adapter has."""
    named = ((stored_name(name), tensor) for name, tensor in model.state_dict(keep_vars=True).items())
    return {name: tensor for name, tensor in named if not is_adapter_name(name)}


class SharedBase:
    """Frozen base weights held in memory once, for models that differ only in their adapters."""

    def __init__(self) -> None:
        self._weights: dict[str, nn.Parameter] = {}
        """Parameters of the first model, by their names without an adapter; a tied parameter under each of its names."""
        self._digest: str | None = None

    def give_to(self, model: nn.Module, *, digest: str | None = None) -> None:
        """Replace the base weights of a model by those of the first model given; the first model keeps its own.

        Pass the `digest` of the base weights for all models or for none; without it, only their names are compared. Raises CheckpointError
        if they differ.
        """
        parameters = dict(model.named_parameters(remove_duplicate=False))
        own = {stored_name(name): name for name in parameters if not is_adapter_name(stored_name(name))}
        if not self._weights:
            self._weights = {stored: parameters[name] for stored, name in own.items()}
            self._digest = digest
            return
        if digest != self._digest or own.keys() != self._weights.keys():
            raise CheckpointError(
                "cannot share base weights: this run's differ from the first run's; give all runs the same --hf-checkpoint"
            )
        for stored, name in own.items():
            module, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(module), attribute, self._weights[stored])

    def parameters(self) -> set[nn.Parameter]:
        """Return the shared parameters, each once."""
        return set(self._weights.values())


@dataclass(slots=True, frozen=True)
class LowRankUpdate:
    """Low-rank update of one matrix, or of the matrices of E experts, in the layout of PEFT's files."""

    a: Tensor
    """A: [rank, inputs], or [E * rank, inputs] for experts."""
    b: Tensor
    """B: [outputs, rank], or [outputs, rank * E] for experts, whose index varies fastest."""
    scaling: float

    def added_to(self, weight: Tensor) -> Tensor:
        """Return `weight` + scaling * B A in float32, as PEFT merges it: [outputs, inputs], or [E, outputs, inputs]."""
        a, b = self.a.float(), self.b.float()
        if weight.dim() == 3:
            a, b = stacked_factors(a, b, len(weight))
        return weight.float() + (b @ a) * self.scaling


def updates_of(model: nn.Module) -> dict[str, LowRankUpdate]:
    """Return the low-rank update of each adapted weight, by the weight's name. Its tensors are the live parameters, not copies."""
    found: dict[str, LowRankUpdate] = {}
    for name, layer in lora_layers(model).items():
        a, b = cast(nn.Linear, layer.lora_A[NAME]), cast(nn.Linear, layer.lora_B[NAME])
        found[f"{name}.weight"] = LowRankUpdate(a.weight, b.weight, layer.scaling[NAME])
    for name, experts in experts_adapters(model):
        for matrix in ("gate_up", "down"):
            a, b = (experts.get_parameter(f"{matrix}_{factor}") for factor in "AB")
            found[f"{name}.{matrix}_proj"] = LowRankUpdate(a, b, experts.scaling)
    return found


def write_adapter_config(config: "LoraConfig", directory: Path) -> None:
    """Write `adapter_config.json`: a model's `peft_config[NAME]` or a `stored_config`. Raises CheckpointError if that fails."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        config.save_pretrained(str(directory))
    except OSError as error:
        raise CheckpointError(f"cannot write {directory / ADAPTER_CONFIG}: {error}") from error


def stored_config(config: AdapterConfig, targets: PeftTargets, excluded: str | None = None) -> "LoraConfig":
    """Return the configuration with which PEFT loads the saved adapter. `excluded`: result of `_excluded_modules`."""
    stored = _peft_config(config, targets.modules, excluded)
    stored.target_parameters = [*targets.parameters, *(EXPERT_PARAMETERS if config.adapts_experts else ())] or None
    return stored


def _peft_config(config: AdapterConfig, layers: list[str], excluded: str | None) -> "LoraConfig":
    from peft import LoraConfig

    return LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,  # pyrefly: ignore[bad-argument-type]  # PEFT divides it, a fraction works
        lora_dropout=config.dropout,
        target_modules=layers,
        exclude_modules=excluded,
        use_rslora=config.rank_stabilised,
        base_model_name_or_path=config.base or None,
        task_type="CAUSAL_LM",
    )


def write_adapter_weights(tensors: Mapping[str, Tensor], directory: Path) -> None:
    """Write `adapter_model.safetensors` in the dtype of the tensors. Raises CheckpointError if it cannot be written."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
        file = directory / ADAPTER_WEIGHTS
        with default_mode(file):
            save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, file, metadata={"format": "pt"})
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot write {directory / ADAPTER_WEIGHTS}: {error}") from error


def read_adapter_weights(directory: Path) -> dict[str, Tensor]:
    """Read the weights of an adapter directory. Raises CheckpointError if they are missing, damaged or not finite."""
    file = directory / ADAPTER_WEIGHTS
    try:
        tensors = load_file(file)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot read {file}: {error}; use a directory that PEFT or fuligo saved") from error
    if broken := [name for name, tensor in tensors.items() if not tensor.isfinite().all()]:
        raise CheckpointError(f"cannot load {file}: {broken[0]} has values that are NaN or infinite; load another adapter")
    return tensors


def empty_adapted_model(config: AdapterConfig, base: Path) -> PreTrainedModel:
    """Return the model of directory `base` with the adapter's layers, on the meta device (no weights are allocated)."""
    model = empty_model(base)
    with torch.device("meta"):
        add_adapter(model, config, seed=0)
    return model


def require_fits(tensors: Mapping[str, Tensor], config: AdapterConfig, adapter: Path, base: Path) -> None:
    """Raise CheckpointError unless an adapter's tensors have the names and shapes that `config` implies for the model in `base`."""
    try:
        model = empty_adapted_model(config, base)
    except ConfigError as error:
        raise _misfit(adapter, error) from error
    require_same_shapes(tensors, model, adapter)


def _misfit(directory: Path, error: ConfigError) -> CheckpointError:
    """Return the error about a stored adapter that does not fit the model."""
    return CheckpointError(f"cannot load {directory}: {error}; use the model that the adapter was trained on")


@torch.no_grad()
def load_adapter(model: PreTrainedModel, directory: Path) -> None:
    """Load the weights of an adapter directory into the model's adapter, whose parameters must not be sharded.

    Raises CheckpointError if the weights cannot be read, are not finite, or do not fit the adapter.
    """
    tensors = read_adapter_weights(directory)
    require_same_shapes(tensors, model, directory)
    for name, parameter in adapter_tensors(model).items():
        parameter.copy_(tensors[name])


def require_same_shapes(tensors: Mapping[str, Tensor], model: nn.Module, directory: Path) -> None:
    """Check names and shapes of an adapter's tensors. Raises CheckpointError if they differ from those of the model's adapter."""
    require_shapes(tensors, {name: list(parameter.shape) for name, parameter in adapter_tensors(model).items()}, directory)


def require_shapes(tensors: Mapping[str, Tensor], wanted: Mapping[str, list[int]], directory: Path) -> None:
    """Check names and shapes of an adapter's tensors. Raises CheckpointError if they differ from `wanted`."""
    held = {name: list(tensor.shape) for name, tensor in tensors.items()}
    for name in sorted(wanted.keys() | held.keys()):
        if wanted.get(name) != held.get(name):
            raise CheckpointError(
                f"cannot load {directory / ADAPTER_WEIGHTS}: {name} is {held.get(name, 'absent')} in the file, but should be "
                f"{wanted.get(name, 'absent')} for this model and {ADAPTER_CONFIG}; use the model that the adapter was trained on"
            )


def with_adapter_of(model: PreTrainedModel, directory: Path) -> AdapterConfig:
    """Add the adapter in `directory` to the model and return its configuration. Raises CheckpointError if it does not fit the model."""
    config = AdapterConfig.read(directory)
    try:
        add_adapter(model, config, seed=0)
    except ConfigError as error:
        raise _misfit(directory, error) from error
    load_adapter(model, directory)
    return config
