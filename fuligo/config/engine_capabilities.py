"""Capabilities of the rollout backends: facts about their engines that are needed before one runs. Code asks for these, not for names."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal


@dataclass(slots=True, frozen=True)
class EngineCapabilities:
    """Properties of a backend's engines."""

    beside_trainer: bool
    """One engine in a process on the driver's node, on the trainer's first GPU; otherwise servers in groups, each with its own GPUs."""
    releases_memory: bool
    """With --colocate, engines free their GPU memory while the trainer works; otherwise they are small enough to stay."""
    reports_checksum: bool
    """Engines hold tensors with the names and types in which they are sent, and report a checksum of them."""
    serves_quantised: bool
    """Engines on an FP8 checkpoint take FP8 weights; otherwise they load and take dequantized weights."""
    records_routing: bool
    """Engines report the experts of every token (--use-rollout-routing-replay)."""
    is_reproducible: bool
    """Tokens depend only on the requests, not on when they arrive, so that rollouts can be repeated exactly."""
    writes_profiles: bool
    """Engines have their own profiler (--profile)."""
    applies_adapters: bool
    """Engines accept a LoRA adapter by itself and apply it to each token; otherwise they need weights that it is merged into."""
    names_adapters: bool
    """Engines know adapters by name: each request names its own, and they load base weights only from --hf-checkpoint."""
    has_own_models: bool
    """Engines have their own implementation of each model, and lack some; otherwise they load what transformers loads."""
    resizes_images: bool
    """Engines resize images by a processor other than the trainer's, so that images are sent in their final size."""
    takes_changes: bool
    """Engines keep what a weight sync leaves out (--update-weight-mode delta); otherwise each sync must bring everything."""
    exact_on: Literal["cpu", "cuda"]
    """Device on which the engine computes log-probabilities that equal the torch trainer's bit for bit (--exact-on-policy)."""
    weight_transports: tuple[str, ...]
    """Values of --update-weight-transport that engines accept, besides auto."""
    memory_flags: tuple[str, ...]
    """Flags that change the GPU memory of an engine."""


ENGINE_CAPABILITIES: Mapping[str, EngineCapabilities] = {
    "embedded": EngineCapabilities(
        beside_trainer=True,
        releases_memory=False,
        reports_checksum=True,
        serves_quantised=False,
        records_routing=False,
        is_reproducible=True,
        writes_profiles=False,
        applies_adapters=True,
        names_adapters=False,
        has_own_models=False,
        resizes_images=False,
        takes_changes=False,
        exact_on="cpu",
        weight_transports=("tensor", "disk"),
        memory_flags=("--embedded-max-total-tokens",),
    ),
    "sglang": EngineCapabilities(
        beside_trainer=False,
        releases_memory=True,
        reports_checksum=False,
        serves_quantised=True,
        records_routing=True,
        is_reproducible=False,
        writes_profiles=True,
        applies_adapters=True,
        names_adapters=True,
        has_own_models=True,
        resizes_images=True,
        takes_changes=True,
        exact_on="cuda",
        weight_transports=("tensor", "nccl", "gloo", "disk"),
        memory_flags=("--sglang-mem-fraction-static", "--rollout-num-gpus-per-engine"),
    ),
}
"""Capabilities by value of --rollout-backend; `engines/NAME/backend.py` implements each backend."""
