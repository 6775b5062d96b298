"""Adapter that a run's flags describe. Imports neither torch nor PEFT."""

from dataclasses import replace
from pathlib import Path

from fuligo.config import Config
from fuligo.formats.adapter_config import AdapterConfig, adapter_directory


def adapter_of(config: Config) -> AdapterConfig | None:
    """Return the adapter that a run trains or an evaluation applies, or None if the flags name none.

    Raises CheckpointError if `--lora-adapter` cannot be read, or has a feature that fuligo does not support.
    """
    flags = config.lora
    base = config.initial_weights_path or ""
    if flags.lora_adapter is not None:
        read = AdapterConfig.read(adapter_directory(Path(flags.lora_adapter)))
        return replace(read, dropout=flags.lora_dropout, base=base)
    if flags.lora_rank is None:
        return None
    return AdapterConfig(
        flags.lora_rank,
        flags.lora_alpha,
        tuple(flags.lora_target_modules),
        flags.lora_use_rslora,
        flags.lora_dropout,
        flags.lora_experts,
        base,
    )
