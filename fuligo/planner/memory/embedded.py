"""Memory of the embedded engine, which stays on the trainer's first GPU."""

from fuligo.models.architecture import Architecture, LatentAttention
from fuligo.planner.lengths import longest_sample
from fuligo.planner.memory.activations import BF16, FP32
from fuligo.planner.memory.constants import CUDA_CONTEXT_BYTES, billions
from fuligo.planner.plan import MemoryItem
from fuligo.planner.subject import Subject


def embedded_items(subject: Subject) -> tuple[MemoryItem, ...]:
    """Return the items of its process: weights and the full KV cache."""
    architecture = subject.rollout_architecture
    size = FP32 if subject.config.engine.embedded_dtype == "fp32" else BF16
    tokens = embedded_kv_tokens(subject)
    per_token = size * cached_elements_per_token(architecture)
    return (
        MemoryItem("engine_weights", size * architecture.num_parameters, f"{billions(architecture.num_parameters)} x {size} bytes"),
        MemoryItem("kv_cache", tokens * per_token, f"{tokens} tokens x {per_token} bytes, at most"),
        MemoryItem("engine", CUDA_CONTEXT_BYTES, "CUDA context of the engine's process"),
    )


def cached_elements_per_token(architecture: Architecture) -> int:
    """Return the elements per token of all heads and layers, also for latent attention; keys and values have the longer row."""
    attention = architecture.attention
    if isinstance(attention, LatentAttention):
        longest = max(attention.qk_nope_head_dim + attention.qk_rope_head_dim, attention.v_head_dim)
        return 2 * attention.num_heads * longest * architecture.num_layers
    return attention.kv_elements_per_token * architecture.num_layers


def embedded_kv_tokens(subject: Subject) -> int:
    """Return the tokens that running requests may grow to."""
    config = subject.config
    if config.engine.embedded_max_total_tokens is not None:
        return config.engine.embedded_max_total_tokens
    requests = min(
        config.engine.embedded_max_running_requests,
        config.rollout.rollout_concurrency,
        config.resolved_over_sampling_batch_size * config.rollout.n_samples_per_prompt,
    )
    return requests * longest_sample(config)
