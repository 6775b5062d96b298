"""Memory of an SGLang server for the record of each token's experts (--use-rollout-routing-replay).

Sizes of SGLang 0.5.15.post1 (`srt/state_capturer`: `RoutedExpertsCapturer`, `BaseHostCache`, `BaseDeviceCache`).
"""

from __future__ import annotations

from dataclasses import dataclass

from fuligo.config import Config
from fuligo.config.topology import EngineGroupSpec, policy_model
from fuligo.models.architecture import Architecture
from fuligo.planner.server_settings import ServerSettings

CHOICE_BYTES = 4
"""One expert of one token (int32)."""
FEWEST_REQUESTS, MOST_REQUESTS = 2048, 4096
REQUESTS_A_CONTEXT = 512
"""Requests of one attention replica without --sglang-max-running-requests, per sequence of the model's context that its cache holds, within
those bounds (`_resolve_max_num_reqs`)."""


@dataclass(frozen=True, slots=True)
class RoutingRecord:
    """Record in the process of one GPU; every rank has the whole record of its attention replica, with all layers."""

    gpu_bytes: int = 0
    """Buffer of a batch's forward pass."""
    host_bytes: int = 0
    """Pinned: one entry per token of the KV cache."""


def records_routing(spec: EngineGroupSpec, config: Config) -> bool:
    """Return whether the servers run with --enable-return-routed-experts."""
    asked = config.replays_engine_routing and spec.model == policy_model(config)
    return asked or bool(spec.arguments.get("enable_return_routed_experts"))


def routing_record(spec: EngineGroupSpec, architecture: Architecture, settings: ServerSettings, kv_tokens: int) -> RoutingRecord:
    """Return the record of a server.

    Args:
        kv_tokens: tokens in the cache of one attention replica.
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
        host_bytes=1 << (held - 1).bit_length(),  # PyTorch rounds pinned memory up to a power of two
    )


def _rows(spec: EngineGroupSpec, architecture: Architecture, settings: ServerSettings, kv_tokens: int) -> int:
    """Return the tokens of the largest batch of all attention replicas."""
    if settings.max_running_requests is not None:
        requests = settings.max_running_requests // spec.dp_size
    else:
        context = spec.arguments.get("context_length") or architecture.max_position_embeddings
        requests = max(FEWEST_REQUESTS, min(kv_tokens * REQUESTS_A_CONTEXT // context, MOST_REQUESTS))
    return max(settings.chunked_prefill_tokens, min(requests, kv_tokens // 2)) * spec.dp_size


def _fuses_shared_experts(spec: EngineGroupSpec) -> bool:
    """Return whether shared experts are another column (`determine_num_fused_shared_experts`: not with expert parallelism)."""
    return spec.ep_size == 1 and not spec.arguments.get("disable_shared_experts_fusion")
