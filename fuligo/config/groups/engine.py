"""The flags of the group `engine`."""

from __future__ import annotations

from typing import Literal

from fuligo.config.group import FlagGroup, flag
from fuligo.config.groups.cluster import EnvironmentValue
from fuligo.config.server_groups import ModelServers


class EngineFlags(FlagGroup):
    """Inference engines that sample."""

    rollout_external_engine_addrs: list[str] = flag([], "host:port of running engines to use (external engines)", source="slime")
    sglang_config: list[ModelServers] | None = flag(
        None,
        "YAML file of engine groups, for prefill and decode or for several models (in a config file also its list)",
        source="slime",
    )
    use_fault_tolerance: bool = flag(
        False, "restart a dead engine with the current weights and retry its requests on other engines", source="slime"
    )
    rollout_health_check_interval: float = flag(30.0, "time between health checks of an engine", unit="s", source="slime", gt=0)
    rollout_health_check_timeout: float = flag(
        30.0,
        "deadline of a health check; if above 120 s, also of calls that an engine answers between two decoding steps",
        unit="s",
        source="slime",
        gt=0,
    )
    embedded_max_running_requests: int = flag(256, "requests that the engine decodes together", unit="requests", ge=1)
    embedded_max_total_tokens: int | None = flag(
        None, "capacity of the KV cache (default: enough for the longest requests)", unit="tokens", ge=1
    )
    embedded_dtype: Literal["auto", "fp32", "bf16"] = flag("auto", "compute dtype; auto: bf16 on CUDA, fp32 on a CPU")
    embedded_num_threads: int | None = flag(None, "CPU threads of the engine (default: one fewer than cores)", ge=1)
    engine_start_timeout_s: float = flag(
        600.0, "deadline for starting an engine, and for calls that move all its weights or memory", unit="s", gt=0
    )
    engine_python: str | None = flag(
        None, "Python interpreter with SGLang and its router installed (default: the one that runs fuligo)", path=True
    )
    engine_env: dict[str, EnvironmentValue] = flag({}, "environment variables of engines and router, as a JSON object; they override --env")
