"""Checks of the LoRA adapter of a run, before any model loads: its packages, the layers that it adapts, the base that it fits."""

from collections.abc import Iterator
from pathlib import Path

from fuligo.config import Config
from fuligo.errors import CheckpointError, ConfigError
from fuligo.formats.adapter_config import AdapterConfig, adapter_directory
from fuligo.formats.hugging_face import is_quantized
from fuligo.formats.quantized_base import QuantizedBase
from fuligo.layout.adapter import AdapterShape
from fuligo.machine.packages import package_version
from fuligo.models.adapter_names import EXPERT_MATRICES, adapter_of
from fuligo.models.registry import read_architecture


def adapter_problems(config: Config) -> Iterator[str]:
    """Yield the problems of a LoRA run: PEFT is missing, or the adapter to start from, the layers to adapt or the base do not fit."""
    if not config.uses_adapter:
        return
    if package_version("peft") is None:
        yield "--lora-rank, --lora-adapter: the package peft is not installed; pip install 'fuligo[lora]'"
        return
    try:
        adapter = adapter_of(config)
    except CheckpointError as error:
        yield f"--lora-adapter: {error}"
        return
    yield from _quantized_base(config)
    directory = config.model.hf_checkpoint
    if config.syncs_quantized and directory is not None and is_quantized(Path(directory)):
        yield (
            f"--hf-checkpoint {directory} is quantized: merged into FP8 weights, most of an adapter's update would be rounded away; "
            "use the unquantized weights"
        )
    if adapter is not None and adapter.adapts_experts and config.syncs_adapter and config.engine_capabilities.names_adapters:
        yield "--lora-sync adapter: SGLang expects adapters of experts in a format other than PEFT's; use --lora-sync merged"
    if adapter is None or directory is None or not (Path(directory) / "config.json").is_file():
        return
    if config.syncs_adapter and config.engine_capabilities.names_adapters:
        yield from _named_like_experts(adapter, Path(directory))
    yield from _fit(adapter, config.lora.lora_adapter, Path(directory))


def _quantized_base(config: Config) -> Iterator[str]:
    """Yield a problem if the run, or the adapter to start from, needs a quantized base, but the base cannot be quantized."""
    flags, model = config.lora, config.model.hf_checkpoint
    try:
        trained_on = None if flags.lora_adapter is None else QuantizedBase.read(adapter_directory(Path(flags.lora_adapter)))
    except CheckpointError as error:
        yield f"--lora-adapter: {error}"
        return
    if flags.lora_base_precision != "full":
        option = f"--lora-base-precision {flags.lora_base_precision}"
    elif trained_on is not None:
        option = f"--lora-adapter {flags.lora_adapter}, trained on a base in {trained_on.precision}"
    else:
        return
    if package_version("bitsandbytes") is None:
        yield f"{option}: the package bitsandbytes is not installed; pip install 'fuligo[qlora]'"
    if model is None or not (Path(model) / "config.json").is_file():
        return
    from fuligo.models.adapter import empty_model
    from fuligo.models.quantized_linear import quantizable_weights

    try:
        quantizable_weights(empty_model(Path(model)))
    except ConfigError as error:
        yield from error.problems
    except (OSError, ValueError, KeyError):
        return  # the checks of the model report it


def _named_like_experts(adapter: AdapterConfig, model: Path) -> Iterator[str]:
    """Yield a problem if adapted layers have the names of expert matrices: SGLang might apply them to the experts (untested)."""
    try:
        architecture = read_architecture(model)
    except ConfigError:
        return  # reported elsewhere
    names = [name for name in AdapterShape(adapter, architecture).names if name in EXPERT_MATRICES]
    if architecture.experts is not None and names:
        yield (
            f"--lora-sync adapter: SGLang may take {', '.join(names)} of dense layers and shared experts for the experts' matrices; use "
            "--lora-sync merged, or choose other layers with --lora-target-modules"
        )


def _fit(adapter: AdapterConfig, given: str | None, model: Path) -> Iterator[str]:
    """Yield a problem if the model lacks the layers to adapt, or the adapter to start from has other shapes."""
    from fuligo.models.adapter import empty_adapted_model, read_adapter_weights, require_fits

    try:
        if given is None:
            empty_adapted_model(adapter, model)
        else:
            directory = adapter_directory(Path(given))
            require_fits(read_adapter_weights(directory), adapter, directory, model)
    except CheckpointError as error:
        yield f"--lora-adapter: {error}"
    except ConfigError as error:
        yield f"the --lora flags do not fit --hf-checkpoint {model}: {error}"
    except (OSError, ValueError) as error:  # raised by transformers
        yield f"--hf-checkpoint {model}: cannot read its model: {error}"
