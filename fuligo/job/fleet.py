"""From the configuration to a fleet of SGLang engines, and to their places on this machine."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

from fuligo.config import Config
from fuligo.config.topology import engine_groups
from fuligo.engines.ports import PortClaims
from fuligo.engines.router import RouterSettings
from fuligo.engines.sglang.fleet import FleetSettings
from fuligo.engines.sglang.place import EnginePlace, claim_ports
from fuligo.engines.sglang.server import ServerSettings
from fuligo.errors import ConfigError
from fuligo.job.trainer_settings import resolve_device
from fuligo.observability.run_directory import RunDirectory
from fuligo.planner.slots import engine_gpus, engine_slots, trainer_slots

LOOPBACK = "127.0.0.1"


def fleet_settings(config: Config, directory: RunDirectory, places: Sequence[EnginePlace], claims: PortClaims) -> FleetSettings:
    """
    Args:
        places: of the engines, in order
        claims: of this machine's ports, for the router; open as long as the fleet runs
    """
    return FleetSettings(
        servers=tuple(_servers(config, directory, places)),
        router=RouterSettings(
            log_file=directory.path / "router.txt",
            host=LOOPBACK,
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


def local_places(config: Config, claims: PortClaims) -> list[EnginePlace]:
    """On this machine, in the order of `fuligo plan`.

    Raises:
        ConfigError: the run needs more GPUs than this machine has
    """
    device = resolve_device(config)
    if device == "cuda":
        _check_gpus(config)
    trainers = trainer_slots(config.num_train_gpus, config.num_train_gpus)
    groups = engine_groups(config)
    per_node = max(config.total_num_gpus, 1)
    slots = engine_slots(trainers, sum(group.num_gpus for group in groups), per_node, shares=config.cluster.colocate)
    return [
        EnginePlace(LOOPBACK, claim_ports(claims), tuple(slots[number][1] for number in numbers) if device == "cuda" else ())
        for numbers in engine_gpus(groups)
    ]


def _servers(config: Config, directory: RunDirectory, places: Sequence[EnginePlace]) -> Iterator[ServerSettings]:
    groups = [group for group in engine_groups(config) for _ in range(group.num_engines)]
    for number, (group, place) in enumerate(zip(groups, places, strict=True)):
        assert group.model_path is not None, "validated"
        assert group.worker_type != "placeholder", "a placeholder has no engines"
        yield ServerSettings(
            name=f"engine {number}",
            model_path=group.model_path,
            tp_size=group.tp_size,
            pp_size=group.pp_size,
            arguments={**_own_arguments(config), **dict(group.arguments.items())},
            worker_type=group.worker_type,
            device=resolve_device(config),
            host=place.host,
            ports=place.ports,
            log_file=directory.path / f"engine-{number}.txt",
            number=number,
            gpu_ids=place.gpu_ids,
            num_nodes=place.num_nodes,
            python=_python(config),
            environment=_environment(config),
            start_timeout_s=config.engine.engine_start_timeout_s,
        )


def _own_arguments(config: Config) -> dict[str, bool]:
    """Without it SGLang keeps the memory that it is told to release."""
    return {"enable_memory_saver": True} if config.cluster.colocate and resolve_device(config) == "cuda" else {}


def _check_gpus(config: Config) -> None:
    import torch

    here, needed = torch.cuda.device_count(), config.total_num_gpus
    if needed > here:
        raise ConfigError(
            f"trainer and engines need {needed} GPUs and this machine has {here}: take fewer "
            "(--actor-num-gpus-per-node, --rollout-num-gpus), or --colocate to share them"
        )


def _python(config: Config) -> str:
    return config.engine.engine_python or sys.executable


def _environment(config: Config) -> dict[str, str]:
    return {**config.cluster.env, **config.engine.engine_env}
