"""From the configuration to a fleet of SGLang engines on this machine."""

from __future__ import annotations

import sys
from collections.abc import Iterator

from fuligo.config import Config
from fuligo.config.topology import EngineGroupSpec, engine_groups
from fuligo.engines.ports import PortClaims
from fuligo.engines.router import RouterSettings
from fuligo.engines.sglang.fleet import FleetSettings
from fuligo.engines.sglang.server import PORTS_PER_ENGINE, ServerPorts, ServerSettings
from fuligo.errors import ConfigError
from fuligo.job.trainer_settings import resolve_device
from fuligo.observability.run_directory import RunDirectory

HOST = "127.0.0.1"


def fleet_settings(config: Config, directory: RunDirectory, claims: PortClaims) -> FleetSettings:
    """
    Args:
        claims: of the run's ports; open as long as the fleet runs

    Raises:
        ConfigError: the engines need more GPUs than this machine has
    """
    groups = engine_groups(config)
    return FleetSettings(
        servers=tuple(_servers(config, groups, directory, claims)),
        router=RouterSettings(
            log_file=directory.path / "router.txt",
            host=HOST,
            port=claims.claim(),
            prometheus_port=claims.claim(),
            arguments=dict(config.router.items()),
            python=_python(config),
            environment=_environment(config),
        ),
        restart=config.engine.use_fault_tolerance,
        health_interval_s=config.engine.rollout_health_check_interval,
        health_timeout_s=config.engine.rollout_health_check_timeout,
        request_retries=config.rollout.rollout_retries,
        request_timeout_s=config.rollout.rollout_timeout_s,
    )


def _servers(config: Config, groups: tuple[EngineGroupSpec, ...], directory: RunDirectory, claims: PortClaims) -> Iterator[ServerSettings]:
    """Engines take GPUs in order, after the trainer's; a placeholder leaves its GPUs free."""
    device = resolve_device(config)
    gpu_ids = iter(_gpu_ids(config) if device == "cuda" else ())
    number = 0
    for group in groups:
        if group.worker_type == "placeholder":
            for _ in range(group.num_gpus):
                next(gpu_ids, None)
            continue
        for _ in range(group.num_engines):
            assert group.model_path is not None, "validated"
            yield ServerSettings(
                name=f"engine {number}",
                model_path=group.model_path,
                tp_size=group.tp_size,
                pp_size=group.pp_size,
                arguments=dict(group.arguments.items()),
                worker_type=group.worker_type,
                device=device,
                host=HOST,
                ports=ServerPorts(claims.claim(), claims.claim(PORTS_PER_ENGINE), claims.claim()),
                log_file=directory.path / f"engine-{number}.txt",
                gpu_ids=tuple(next(gpu_ids) for _ in range(group.num_gpus_per_engine)) if device == "cuda" else (),
                python=_python(config),
                environment=_environment(config),
                start_timeout_s=config.engine.engine_start_timeout_s,
            )
            number += 1


def _gpu_ids(config: Config) -> range:
    import torch

    here, needed = torch.cuda.device_count(), config.total_num_gpus
    if needed > here:
        raise ConfigError(
            f"trainer and engines need {needed} GPUs and this machine has {here}: take fewer "
            "(--actor-num-gpus-per-node, --rollout-num-gpus), or --colocate to share them"
        )
    return range(config.num_train_gpus, needed)


def _python(config: Config) -> str:
    return config.engine.engine_python or sys.executable


def _environment(config: Config) -> dict[str, str]:
    return {**config.cluster.env, **config.engine.engine_env}
