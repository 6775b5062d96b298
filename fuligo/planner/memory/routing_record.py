"""What an SGLang server keeps to tell which experts each token went to (--use-rollout-routing-replay).

Sizes of SGLang 0.5.15.post1 (`srt/state_capturer`: `RoutedExpertsCapturer`, `BaseHostCache`, `BaseDeviceCache`).
"""

from __future__ import annotations

from dataclasses import dataclass

from fuligo.config import Config
from fuligo.config.topology import EngineGroupSpec, policy_model
from fuligo.models.architecture import Architecture
from fuligo.planner.server_settings import ServerSettings

CHOICE_BYTES = 4
"""Of one expert of one token (int32)."""
FEWEST_REQUESTS, MOST_REQUESTS = 2048, 4096
REQUESTS_A_CONTEXT = 512
"""Of one attention replica where --sglang-max-running-requests is not given: so many for each sequence of the model's context that its
cache holds, between those bounds (`_resolve_max_num_reqs`)."""


@dataclass(frozen=True, slots=True)
class RoutingRecord:
    """Of the process of one GPU; every rank of a server has the whole record of its attention replica, all layers of the model in it."""

    gpu_bytes: int = 0
    """What a batch's forward pass writes into."""
    host_bytes: int = 0
    """Pinned: a place for every token of the KV cache."""


def records_routing(spec: EngineGroupSpec, config: Config) -> bool:
    """Its servers are started with --enable-return-routed-experts."""
    asked = config.replays_engine_routing and spec.model == policy_model(config)
    return asked or bool(spec.arguments.get("enable_return_routed_experts"))


def routing_record(spec: EngineGroupSpec, architecture: Architecture, settings: ServerSettings, kv_tokens: int) -> RoutingRecord:
    """Of a server that records.

    Args:
        kv_tokens: of the cache of one attention replica.
    """
    experts = architecture.experts
    if experts is None:
        return RoutingRecord()
    choices = architecture.num_layers * experts.num_experts_per_token
    held = (kv_tokens + (spec.arguments.get("page_size") or 1)) * choices * CHOICE_BYTES
    columns = experts.num_experts_per_token + (experts.num_shared_experts if _fuses_shared_experts(spec) else 0)
    rows = _rows(spec, architecture, settings, kv_tokens)
    gathered = rows * (spec.tp_size // spec.dp_size) if settings.uses_deepep else 0
    return RoutingRecord(
        gpu_bytes=(rows * architecture.num_layers + gathered) * columns * CHOICE_BYTES,
        host_bytes=1 << (held - 1).bit_length(),  # PyTorch rounds what it pins up to a power of two
    )


def _rows(spec: EngineGroupSpec, architecture: Architecture, settings: ServerSettings, kv_tokens: int) -> int:
    """Tokens of the largest batch of all attention replicas."""
    if settings.max_running_requests is not None:
        requests = settings.max_running_requests // spec.dp_size
    else:
        context = spec.arguments.get("context_length") or architecture.max_position_embeddings
        requests = max(FEWEST_REQUESTS, min(kv_tokens * REQUESTS_A_CONTEXT // context, MOST_REQUESTS))
    return max(settings.chunked_prefill_tokens, min(requests, kv_tokens // 2)) * spec.dp_size


def _fuses_shared_experts(spec: EngineGroupSpec) -> bool:
    """They are one more column of the choices (`determine_num_fused_shared_experts`: not together with expert parallelism)."""
    return spec.ep_size == 1 and not spec.arguments.get("disable_shared_experts_fusion")
