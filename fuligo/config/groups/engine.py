"""The flags of the group `engine`."""

from __future__ import annotations

from typing import Literal

from fuligo.config.group import FlagGroup, flag
from fuligo.config.groups.cluster import EnvironmentValue
from fuligo.config.server_groups import ModelServers


class EngineFlags(FlagGroup):
    """The engines that sample."""

    rollout_external_engine_addrs: list[str] = flag([], "host:port of engines that already run", source="slime")
    sglang_config: list[ModelServers] | None = flag(
        None,
        "engines in groups, for prefill and decode or for several models: a YAML file (in a config file also its list)",
        source="slime",
    )
    use_fault_tolerance: bool = flag(
        False, "a dead engine is restarted with the current weights, its requests go elsewhere", source="slime"
    )
    rollout_health_check_interval: float = flag(30.0, "time between health checks of an engine", unit="s", source="slime", gt=0)
    rollout_health_check_timeout: float = flag(
        30.0,
        "deadline of a health check; above 120 s also of calls that are answered between two steps",
        unit="s",
        source="slime",
        gt=0,
    )
    embedded_max_running_requests: int = flag(256, "requests decoded together", unit="requests", ge=1)
    embedded_max_total_tokens: int | None = flag(
        None, "tokens of the KV cache (default: what the longest requests need)", unit="tokens", ge=1
    )
    embedded_dtype: Literal["auto", "fp32", "bf16"] = flag("auto", "compute type; auto: bf16 on CUDA, fp32 on a CPU")
    embedded_num_threads: int | None = flag(None, "CPU threads of the engine (default: one fewer than cores)", ge=1)
    engine_start_timeout_s: float = flag(
        600.0, "deadline of an engine's start, and of a call that concerns all its weights or its memory", unit="s", gt=0
    )
    engine_python: str | None = flag(
        None, "Python interpreter that has SGLang and its router (default: the one that runs fuligo)", path=True
    )
    engine_env: dict[str, EnvironmentValue] = flag({}, "environment variables of engines and router, over --env, as a JSON object")
