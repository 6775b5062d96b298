"""From the configuration to a fleet of SGLang engines, and to their places on this machine."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence

from fuligo.config import Config
from fuligo.config.topology import EngineGroupSpec, engine_groups, policy_model
from fuligo.engines.deadlines import ControlDeadlines
from fuligo.engines.ports import PortClaims
from fuligo.engines.sglang.fleet import FleetSettings
from fuligo.engines.sglang.router import RouterSettings
from fuligo.engines.sglang.server import EnginePlace, ServerPorts, ServerSettings
from fuligo.errors import ConfigError
from fuligo.job.trainer_settings import resolve_device
from fuligo.layout.slots import engine_gpus, engine_slots, trainer_slots
from fuligo.observability.run_directory import RunDirectory

LOOPBACK = "127.0.0.1"


def fleet_settings(config: Config, directory: RunDirectory, places: Sequence[EnginePlace], claims: PortClaims) -> dict[str, FleetSettings]:
    """By name of the model: each has a router of its own.

    Args:
        places: of the engines of all models, in order
        claims: of this machine's ports, for the routers; open as long as the fleets run
    """
    servers: dict[str, list[ServerSettings]] = {}
    for group, server in _servers(config, directory, places):
        servers.setdefault(group.model, []).append(server)
    return {model: _fleet_of(config, directory, model, its_servers, claims) for model, its_servers in servers.items()}


def _fleet_of(config: Config, directory: RunDirectory, model: str, servers: Sequence[ServerSettings], claims: PortClaims) -> FleetSettings:
    name = "router" if model == policy_model(config) else f"router of {model}"
    return FleetSettings(
        servers=tuple(servers),
        router=RouterSettings(
            name=name,
            log_file=directory.path / f"{name.replace(' of ', '-')}.txt",
            host=LOOPBACK,
            port=claims.claim(),
            prometheus_port=claims.claim(),
            arguments=dict(config.router.items()),
            prefill_decode=any(server.worker_type != "regular" for server in servers),
            python=_python(config),
            environment=config.engine_environment,
            start_timeout_s=config.engine.engine_start_timeout_s,
        ),
        restart=config.engine.use_fault_tolerance,
        health_interval_s=config.engine.rollout_health_check_interval,
        health_timeout_s=config.engine.rollout_health_check_timeout,
        request_retries=config.rollout.rollout_retries,
        request_timeout_s=config.rollout.rollout_timeout_s,
        deadlines=ControlDeadlines.of_watched(
            health_timeout_s=config.engine.rollout_health_check_timeout, start_timeout_s=config.engine.engine_start_timeout_s
        ),
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
        EnginePlace(LOOPBACK, ServerPorts.claim(claims), tuple(slots[number][1] for number in numbers) if device == "cuda" else ())
        for numbers in engine_gpus(groups)
    ]


def ranks_beside_engines(config: Config) -> dict[int, tuple[int, ...]]:
    """--colocate: of each engine on the trainer's GPUs, by number, the ranks there in the order of its own.

    The n-th GPU of the engines is that of rank n, as far as there are ranks.
    """
    if not shares_devices(config):
        return {}
    engines = enumerate(engine_gpus(engine_groups(config)))
    return {number: tuple(gpus) for number, gpus in engines if gpus.stop <= config.num_train_gpus}


def shares_devices(config: Config) -> bool:
    """Trainer and SGLang engines take turns. (The embedded engine is small enough to stay.)"""
    return config.cluster.colocate and config.needs_engine and config.resolved_rollout_backend == "sglang"


def _servers(config: Config, directory: RunDirectory, places: Sequence[EnginePlace]) -> Iterator[tuple[EngineGroupSpec, ServerSettings]]:
    groups = [group for group in engine_groups(config) for _ in range(group.num_engines)]
    for number, (group, place) in enumerate(zip(groups, places, strict=True)):
        assert group.model_path is not None, "validated"
        assert group.worker_type != "placeholder", "a placeholder has no engines"
        server = ServerSettings(
            name=f"engine {number}",
            model_path=group.model_path,
            tp_size=group.tp_size,
            pp_size=group.pp_size,
            arguments={**_own_arguments(config, group), **dict(group.arguments.items())},
            worker_type=group.worker_type,
            device=resolve_device(config),
            host=place.host,
            ports=place.ports,
            log_file=directory.path / f"engine-{number}.txt",
            number=number,
            gpu_ids=place.gpu_ids,
            num_nodes=place.num_nodes,
            python=_python(config),
            environment=config.engine_environment,
            start_timeout_s=config.engine.engine_start_timeout_s,
        )
        yield group, server


def _own_arguments(config: Config, group: EngineGroupSpec) -> dict[str, bool]:
    """What the run asks of the engines of its own accord; flags of the user win.

    --colocate: without a memory saver SGLang keeps the memory that it is told to release; weights that nobody sends again must outlive
    that.
    """
    is_policy = group.model == policy_model(config)
    arguments = {"enable_return_routed_experts": True} if config.replays_engine_routing and is_policy else {}
    if config.cluster.colocate and resolve_device(config) == "cuda":
        arguments |= {"enable_memory_saver": True, "enable_weights_cpu_backup": not is_policy}
    return arguments


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
