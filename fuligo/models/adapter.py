"""LoRA layers of PEFT in a Hugging Face model: added, switched off, loaded, saved, and merged into the weights.

PEFT itself is imported where layers are added; a model without them does not need it.
"""

import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, PreTrainedModel

from fuligo.config.flag import did_you_mean, nearest
from fuligo.errors import CheckpointError, ConfigError
from fuligo.formats.adapter_config import ADAPTER_CONFIG, ADAPTER_WEIGHTS, NAME, AdapterConfig, is_adapter_name, stored_name
from fuligo.models.adapter_names import EXPERT_MATRICES
from fuligo.models.transformers_types import read_config

if TYPE_CHECKING:
    from peft import LoraConfig
    from peft.tuners.lora import LoraLayer


def empty_model(directory: Path) -> PreTrainedModel:
    """Return the model that config.json describes, without memory for its weights."""
    config = read_config(directory)
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config, trust_remote_code=False)


def linear_layers(model: PreTrainedModel) -> list[str]:
    """Return the names of the linear layers that an adapter can have.

    Left out are the output layer, indexers of sparse attention, whose choice of tokens has no gradient, and the layers of
    `_names_of_experts`.
    """
    head, left_out = model.get_output_embeddings(), _names_of_experts(model)
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.Linear) and module is not head and ".indexer." not in name and name.rpartition(".")[2] not in left_out
    ]


def _names_of_experts(model: nn.Module) -> frozenset[str]:
    """Return the names of layers that PEFT takes for the matrices of experts in a model that stores all experts as one tensor.

    PEFT 0.21.2 (`utils/transformers_weight_conversion.py`) then adapts the experts, and leaves out dense layers and shared experts of these
    names: an adapter of those could be neither added nor loaded by it.
    """
    has_experts = any(
        name.endswith(".experts") and next(module.parameters(recurse=False), None) is not None for name, module in model.named_modules()
    )
    return EXPERT_MATRICES if has_experts else frozenset()


def require_layers(targets: Iterable[str], model: PreTrainedModel) -> None:
    """Check that the model has linear layers of these names, or with names that end so, which can have an adapter.

    Raises:
        ConfigError: it has none of one name.
    """
    layers, left_out = linear_layers(model), _names_of_experts(model)
    kinds = sorted({name.rpartition(".")[2] for name in layers})
    for target in targets:
        if target.rpartition(".")[2] in left_out:
            raise ConfigError(
                f"--lora-target-modules {target}: in a model with experts PEFT takes this name for the experts' matrices, which fuligo "
                f"does not adapt; choose among {', '.join(kinds)}"
            )
        if not any(name == target or name.endswith(f".{target}") for name in layers):
            raise ConfigError(
                f"--lora-target-modules {target}: {type(model).__name__} has no linear layer of this name below its output layer"
                f"{did_you_mean(nearest(target, kinds))}; it has {', '.join(kinds)}"
            )


def add_adapter(model: PreTrainedModel, config: AdapterConfig, *, seed: int) -> None:
    """Put PEFT's LoRA layers into the model, in place. All other parameters are frozen; B begins as zeros, so the outputs do not change.

    Args:
        seed: of A; the process's own random numbers are left alone, so that all ranks begin with the same adapter.

    Raises:
        ConfigError: the model lacks a layer that is to be adapted, or the rank is higher than any of its matrices can have.
    """
    from peft import inject_adapter_in_model

    require_layers(config.target_modules, model)
    widest = max(max(layer.in_features, layer.out_features) for layer in model.modules() if isinstance(layer, nn.Linear))
    if config.rank > widest:  # and memory for it may not exist
        raise ConfigError(
            f"--lora-rank {config.rank}: the widest matrix of {type(model).__name__} has {widest} rows or columns, and no update of a "
            "higher rank exists; choose a rank such as 16"
        )
    every = {name.rpartition(".")[2] for name in linear_layers(model)}
    peft_config = _peft_config(config, list(config.target_modules) or sorted(every))
    with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # about tied embeddings, which are not adapted
        torch.manual_seed(seed)
        inject_adapter_in_model(peft_config, model, NAME)
    set_dropout(model, on=False)


def lora_layers(model: nn.Module) -> dict[str, "LoraLayer"]:
    """Return the adapted layers by the name of the layer that they replaced."""
    return {name: cast("LoraLayer", module) for name, module in model.named_modules() if hasattr(module, "lora_A")}


def has_adapter(model: nn.Module) -> bool:
    return any(hasattr(module, "lora_A") for module in model.modules())


def scaling_of(model: nn.Module) -> float:
    """Return the factor of B A of the model's adapter."""
    return next(iter(lora_layers(model).values())).scaling[NAME]


def set_dropout(model: nn.Module, *, on: bool) -> None:
    """Switch the dropout before A on for training, or off for every pass whose log-probabilities are compared with others."""
    for layer in lora_layers(model).values():
        layer.lora_dropout.train(on)


@contextmanager
def adapter_off(model: nn.Module) -> Iterator[None]:
    """Compute with the base model alone during the block.

    PEFT's own switch, `enable_adapters`, also changes `requires_grad` of the parameters, which FSDP may have gathered.
    """
    layers = lora_layers(model).values()
    for layer in layers:
        layer._disable_adapters = True
    try:
        yield
    finally:
        for layer in layers:
            layer._disable_adapters = False


def adapter_tensors(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the adapter's parameters by their names in PEFT's files."""
    named = ((stored_name(name), parameter) for name, parameter in model.named_parameters())
    return {name: parameter for name, parameter in named if is_adapter_name(name)}


def base_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors of the state dict without the adapter's, by the names that they have in a model without adapter."""
    named = ((stored_name(name), tensor) for name, tensor in model.state_dict(keep_vars=True).items())
    return {name: tensor for name, tensor in named if not is_adapter_name(name)}


@dataclass(slots=True, frozen=True)
class LowRankUpdate:
    """Update of one matrix by its adapter."""

    a: Tensor
    """[rank, inputs]"""
    b: Tensor
    """[outputs, rank]"""
    scaling: float

    def added_to(self, weight: Tensor) -> Tensor:
        """Return W + scaling B A in float32, as PEFT merges it."""
        return weight.float() + (self.b.float() @ self.a.float()) * self.scaling


def update_of(layer: "LoraLayer") -> LowRankUpdate:
    """Return a layer's update; its tensors are the live parameters."""
    a, b = cast(nn.Linear, layer.lora_A[NAME]), cast(nn.Linear, layer.lora_B[NAME])
    return LowRankUpdate(a.weight, b.weight, layer.scaling[NAME])


def write_adapter_config(model: PreTrainedModel, directory: Path) -> None:
    """Write `adapter_config.json` by PEFT."""
    directory.mkdir(parents=True, exist_ok=True)
    config: Any = model.peft_config
    config[NAME].save_pretrained(str(directory))


def write_config_of(config: AdapterConfig, layers: list[str], directory: Path) -> None:
    """Write `adapter_config.json` by PEFT for an adapter without PEFT's layers; `layers` are the names of the adapted ones."""
    directory.mkdir(parents=True, exist_ok=True)
    _peft_config(config, layers).save_pretrained(str(directory))


def _peft_config(config: AdapterConfig, layers: list[str]) -> "LoraConfig":
    from peft import LoraConfig

    return LoraConfig(
        r=config.rank,
        lora_alpha=config.alpha,  # pyright: ignore[reportArgumentType]  # PEFT divides it, a fraction works
        lora_dropout=config.dropout,
        target_modules=layers,
        use_rslora=config.rank_stabilised,
        base_model_name_or_path=config.base or None,
        task_type="CAUSAL_LM",
    )


def write_adapter_weights(tensors: Mapping[str, Tensor], directory: Path) -> None:
    """Write `adapter_model.safetensors`, float32 as trained.

    Raises:
        CheckpointError: it cannot be written.
    """
    directory.mkdir(parents=True, exist_ok=True)
    try:
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, directory / ADAPTER_WEIGHTS, metadata={"format": "pt"})
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot write {directory / ADAPTER_WEIGHTS}: {error}") from error


def read_adapter_weights(directory: Path) -> dict[str, Tensor]:
    """Read the weights of an adapter directory.

    Raises:
        CheckpointError: they are missing, damaged or not finite.
    """
    file = directory / ADAPTER_WEIGHTS
    try:
        tensors = load_file(file)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"cannot read {file}: {error}; use a directory that PEFT or fuligo saved") from error
    if broken := [name for name, tensor in tensors.items() if not tensor.isfinite().all()]:
        raise CheckpointError(f"cannot load {file}: {broken[0]} has values that are NaN or infinite; load another adapter")
    return tensors


def empty_adapted_model(config: AdapterConfig, base: Path) -> PreTrainedModel:
    """Return the model of a directory with an adapter's layers, without memory for either.

    Raises:
        ConfigError: the model lacks a layer that is to be adapted, or the rank is too high.
    """
    model = empty_model(base)
    with torch.device("meta"):
        add_adapter(model, config, seed=0)
    return model


def require_fits(tensors: Mapping[str, Tensor], config: AdapterConfig, adapter: Path, base: Path) -> None:
    """Check that an adapter's tensors are those that its configuration means for the model of a directory, without memory for its weights.

    Raises:
        CheckpointError: they are not
    """
    try:
        model = empty_adapted_model(config, base)
    except ConfigError as error:
        raise CheckpointError(f"cannot load {adapter}: {'; '.join(error.problems)}") from error
    require_same_shapes(tensors, model, adapter)


@torch.no_grad()
def load_adapter(model: PreTrainedModel, directory: Path) -> None:
    """Overwrite the adapter's parameters, which are whole, with those of an adapter directory.

    Raises:
        CheckpointError: they are missing or damaged, or do not fit the model.
    """
    tensors = read_adapter_weights(directory)
    require_same_shapes(tensors, model, directory)
    for name, parameter in adapter_tensors(model).items():
        parameter.copy_(tensors[name])


def require_same_shapes(tensors: Mapping[str, Tensor], model: nn.Module, directory: Path) -> None:
    """Check names and shapes of an adapter's tensors.

    Raises:
        CheckpointError: they are not those of the model's adapter.
    """
    require_shapes(tensors, {name: list(parameter.shape) for name, parameter in adapter_tensors(model).items()}, directory)


def require_shapes(tensors: Mapping[str, Tensor], wanted: Mapping[str, list[int]], directory: Path) -> None:
    """Check names and shapes of an adapter's tensors.

    Raises:
        CheckpointError: they are not as wanted.
    """
    held = {name: list(tensor.shape) for name, tensor in tensors.items()}
    for name in sorted(wanted.keys() | held.keys()):
        if wanted.get(name) != held.get(name):
            raise CheckpointError(
                f"cannot load {directory / ADAPTER_WEIGHTS}: {name} is {held.get(name, 'absent')} there and {wanted.get(name, 'absent')} "
                f"in this model with {ADAPTER_CONFIG}; use the model that the adapter was trained on"
            )


def with_adapter_of(model: PreTrainedModel, directory: Path) -> AdapterConfig:
    """Add the adapter of a directory to the model and load its weights; return its configuration.

    Raises:
        CheckpointError: the directory is damaged, or the adapter does not fit the model.
    """
    config = AdapterConfig.read(directory)
    try:
        add_adapter(model, config, seed=0)
    except ConfigError as error:
        raise CheckpointError(f"cannot load {directory}: {'; '.join(error.problems)}") from error
    load_adapter(model, directory)
    return config
