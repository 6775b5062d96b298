"""Capabilities of the trainers: facts that are needed before one runs. Code asks for these, not for names."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(slots=True, frozen=True)
class SavedBytes:
    """Bytes that a checkpoint takes for one parameter, besides the two float32 states of Adam."""

    weights: int
    """Master weight in float32, and whatever else of it is saved."""
    adapter: int
    """All copies of a parameter of a LoRA adapter, Adam's states included."""
    reference: int
    """Reference model that is updated (--ref-update-interval)."""


@dataclass(slots=True, frozen=True)
class TrainerCapabilities:
    """Properties of a trainer."""

    loads_distributed: bool
    """Checkpoints are distributed ones; otherwise they hold Hugging Face directories, the only format that the trainer reads."""
    keeps_published_names: bool
    """Weights are sent to engines under the names of the checkpoint; otherwise under those of transformers' model."""
    sends_adapters: bool
    """Engines that know adapters by name get them by themselves; otherwise they are merged into the weights."""
    swaps_models: bool
    """Policy, reference and teacher take turns in one model, so they have one architecture."""
    quantises_base: bool
    """Frozen base weights of an adapter may be held in 8 or 4 bits (--lora-base-precision)."""
    splits_model: bool
    """Flags of the group `parallel` split the model over ranks; otherwise each rank computes all layers of its rows."""
    pads_rows: bool
    """Rows are padded to a multiple of tokens (--data-pad-size-multiplier)."""
    shares_prefixes: bool
    """`--share-prefixes auto` means on: sharing was never slower where it was measured (docs/trainer.md)."""
    needs_gpus: bool
    """Made for GPUs; on a CPU it runs for tests only, if --device cpu asks for it."""
    packages: tuple[str, ...]
    """Packages besides fuligo's own."""
    gpu_packages: tuple[str, ...]
    """Additional packages if it runs on GPUs."""
    memory_flags: tuple[str, ...]
    """Flags that change the GPU memory of the trainer."""
    saved_bytes: SavedBytes


TRAINER_CAPABILITIES: Mapping[str, TrainerCapabilities] = {
    "torch": TrainerCapabilities(
        loads_distributed=False,
        keeps_published_names=False,
        sends_adapters=True,
        swaps_models=False,
        quantises_base=True,
        splits_model=False,
        pads_rows=False,
        shares_prefixes=True,
        needs_gpus=False,
        packages=(),
        gpu_packages=(),
        memory_flags=("--actor-num-gpus-per-node", "--max-tokens-per-gpu", "--gpu"),
        saved_bytes=SavedBytes(weights=4, adapter=12, reference=4),
    ),
    "megatron": TrainerCapabilities(
        loads_distributed=True,
        keeps_published_names=True,
        sends_adapters=False,
        swaps_models=True,
        quantises_base=False,
        splits_model=True,
        pads_rows=True,
        shares_prefixes=False,
        needs_gpus=True,
        packages=("megatron-core",),
        gpu_packages=("transformer-engine",),
        memory_flags=("--tensor-model-parallel-size", "--recompute-granularity", "--max-tokens-per-gpu", "--gpu"),
        # The weights that the model computes with are also saved. An adapter's are those of model and optimizer and a PEFT directory.
        saved_bytes=SavedBytes(weights=6, adapter=20, reference=2),
    ),
}
