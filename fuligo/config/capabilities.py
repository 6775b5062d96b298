"""Capabilities of rollout backends and trainers, known before any of them starts. Code checks these instead of backend names."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal


@dataclass(slots=True, frozen=True, kw_only=True)
class SavedBytes:
    """Bytes per parameter in a checkpoint."""

    weights: int
    """Master weight in float32 and other saved copies of the weight, without Adam's two float32 states."""
    adapter: int
    """All saved copies of a parameter of a LoRA adapter, including Adam's states."""
    reference: int
    """Reference model that is updated (--ref-update-interval)."""


@dataclass(slots=True, frozen=True, kw_only=True)
class TrainerCapabilities:
    """Properties of a trainer."""

    loads_distributed: bool = False
    """True if checkpoints are distributed, a format that the trainer also loads; otherwise it saves and loads Hugging Face directories
    only."""
    keeps_published_names: bool = False
    """True if weights are sent to engines under the names of the checkpoint; otherwise under the names of transformers' model."""
    sends_adapters: bool = False
    """True if adapters are sent separately to engines that know them by name; otherwise they are merged into the weights."""
    swaps_models: bool = False
    """True if policy, reference and teacher take turns in one model, so they must have the same architecture."""
    quantizes_base: bool = False
    """True if frozen base weights of an adapter may be held in 8 or 4 bits (--lora-base-precision)."""
    splits_model: bool = False
    """True if flags of the group `parallel` split the model over ranks; otherwise each rank computes all layers of its rows."""
    pads_rows: bool = False
    """True if rows are padded to a multiple of --data-pad-size-multiplier tokens."""
    shares_prefixes: bool = False
    """True if `--share-prefixes auto` means on: sharing was never slower where it was measured (docs/trainer.md)."""
    needs_gpus: bool = False
    """True if the trainer is made for GPUs; on a CPU it runs only for tests, with --device cpu."""
    packages: tuple[str, ...] = ()
    """Packages that the trainer imports, besides those that fuligo installs."""
    gpu_packages: tuple[str, ...] = ()
    """Further packages that it imports on GPUs."""
    memory_flags: tuple[str, ...]
    """Flags that change the GPU memory of the trainer."""
    saved_bytes: SavedBytes


TRAINER_CAPABILITIES: Mapping[str, TrainerCapabilities] = {
    "torch": TrainerCapabilities(
        sends_adapters=True,
        quantizes_base=True,
        shares_prefixes=True,
        memory_flags=("--actor-num-gpus-per-node", "--max-tokens-per-gpu"),
        saved_bytes=SavedBytes(weights=4, adapter=12, reference=4),
    ),
    "megatron": TrainerCapabilities(
        loads_distributed=True,
        keeps_published_names=True,
        swaps_models=True,
        splits_model=True,
        pads_rows=True,
        needs_gpus=True,
        packages=("megatron-core",),
        gpu_packages=("transformer-engine",),
        memory_flags=("--tensor-model-parallel-size", "--recompute-granularity", "--max-tokens-per-gpu"),
        # Checkpoints also contain the bf16 weights. An adapter is saved with the model, with the optimizer, and as a PEFT directory.
        saved_bytes=SavedBytes(weights=6, adapter=20, reference=2),
    ),
}


@dataclass(slots=True, frozen=True, kw_only=True)
class EngineCapabilities:
    """Properties of a backend's engines."""

    beside_trainer: bool = False
    """True for one engine in a process on the driver's node, on the trainer's first GPU; otherwise servers in groups, each with its own
    GPUs."""
    releases_memory: bool = False
    """True if engines with --colocate free their GPU memory while the trainer works; otherwise they are small enough to stay."""
    reports_checksum: bool = False
    """True if engines hold tensors with the names and types in which they are sent, and report a checksum of them."""
    serves_quantized: bool = False
    """True if engines on an FP8 checkpoint accept FP8 weights; otherwise they load and accept dequantized weights."""
    records_routing: bool = False
    """True if engines report the experts of every token (--use-rollout-routing-replay)."""
    is_reproducible: bool = False
    """True if tokens depend only on the requests, not on when they arrive, so that rollouts can be repeated exactly."""
    writes_profiles: bool = False
    """True if engines have their own profiler (--profile)."""
    applies_adapters: bool = False
    """True if engines accept a LoRA adapter by itself and apply it to each token; otherwise they need weights with the adapter merged
    in."""
    names_adapters: bool = False
    """True if engines know adapters by name: each request names its adapter, and engines load base weights only from --hf-checkpoint."""
    has_own_models: bool = False
    """True if engines have their own model implementations, which do not cover all families; otherwise they run transformers' models."""
    resizes_images: bool = False
    """True if engines would resize images differently than the trainer, so images are resized before they are sent."""
    takes_changes: bool = False
    """True if engines keep weights that a sync omits (--update-weight-mode delta); otherwise each sync must send all weights."""
    keeps_requests: bool = False
    """True if engines can keep requests and their KV cache over a weight sync (--update-weight-requests continue)."""
    exact_on: Literal["cpu", "cuda"]
    """Device on which the engine computes log-probabilities that equal the torch trainer's bit for bit (--exact-on-policy)."""
    weight_transports: tuple[str, ...]
    """Values of --update-weight-transport that engines accept, besides auto."""
    packages: tuple[str, ...] = ()
    """Packages that engines need in the environment of --engine-python."""
    memory_flags: tuple[str, ...]
    """Flags that change the GPU memory of an engine."""


ENGINE_CAPABILITIES: Mapping[str, EngineCapabilities] = {
    "embedded": EngineCapabilities(
        beside_trainer=True,
        reports_checksum=True,
        is_reproducible=True,
        applies_adapters=True,
        exact_on="cpu",
        weight_transports=("tensor", "disk"),
        memory_flags=("--embedded-max-total-tokens",),
    ),
    "sglang": EngineCapabilities(
        releases_memory=True,
        serves_quantized=True,
        records_routing=True,
        writes_profiles=True,
        applies_adapters=True,
        names_adapters=True,
        has_own_models=True,
        resizes_images=True,
        takes_changes=True,
        keeps_requests=True,
        exact_on="cuda",
        weight_transports=("tensor", "nccl", "gloo", "disk"),
        packages=("sglang", "sglang-router"),
        memory_flags=("--sglang-mem-fraction-static", "--rollout-num-gpus-per-engine"),
    ),
}
"""Capabilities by value of --rollout-backend; `engines/NAME/backend.py` implements each backend."""
