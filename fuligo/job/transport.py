"""Choice of the transport by which the trainer's weights reach the engines."""

from __future__ import annotations

from typing import TYPE_CHECKING

from fuligo.config import Config
from fuligo.config.topology import engine_groups, policy_model
from fuligo.errors import ConfigError
from fuligo.formats.weight_manifest import Transport
from fuligo.layout.slots import engine_gpus
from fuligo.models.device import resolve_device

if TYPE_CHECKING:
    from fuligo.cluster.cluster import RayCluster


def choose_transport(config: Config, cluster: RayCluster | None) -> Transport:
    """Return --update-weight-transport with auto resolved.

    `cluster`: has the places of ranks and engines; None: all are on this machine. Raises ConfigError if it does not reach the engines, or
    not all of their ranks.
    """
    transport = _reaching(config, cluster)
    stages = max((group.pp_size for group in engine_groups(config) if group.model == policy_model(config)), default=1)
    if transport == "tensor" and stages > 1:
        raise ConfigError(
            f"--sglang-pp-size {stages}: SGLang hands the memory of a tensor-parallel rank to all its pipeline stages, but memory can be "
            "handed over only once: use --update-weight-transport disk, or --sglang-pp-size 1"
        )
    return transport


def _reaching(config: Config, cluster: RayCluster | None) -> Transport:
    """Resolve auto: shared memory on one machine, broadcast between GPUs and machines, files for engines that the run did not start."""
    asked = config.weight_sync.update_weight_transport
    if config.engine.rollout_external_engine_addrs:
        return _to_engines_elsewhere("disk" if asked == "auto" else asked, cluster)
    beside = config.engine_capabilities.beside_trainer
    one_machine = cluster is None or (cluster.sender_is_here if beside else cluster.sender_shares_machine_with(_served_by_rank_0(config)))
    if config.syncs_adapter and config.engine_capabilities.names_adapters and not one_machine:
        raise ConfigError(
            "--lora-sync adapter goes through the memory of one machine, but trainer rank 0 and the engines are on several: use "
            "--lora-sync merged"
        )
    if asked != "auto":
        here = cluster is None or (one_machine and (asked != "disk" or cluster.sender_is_here))
        if asked in ("tensor", "disk") and not here:
            raise ConfigError(
                f"--update-weight-transport {asked} goes through the memory of one machine, but trainer rank 0, the driver and the engines "
                "are on several: remove the flag, or use nccl (gloo on a CPU)"
            )
        return asked
    if beside and not one_machine:
        raise ConfigError(
            "the embedded engine runs on the driver's node, but trainer rank 0 is on another node: use --rollout-backend sglang"
        )
    if not beside and resolve_device(config) == "cuda" and not config.cluster.colocate and not config.syncs_adapter:
        return "nccl"
    return "tensor" if one_machine else "gloo"


def _to_engines_elsewhere(transport: Transport, cluster: RayCluster | None) -> Transport:
    if transport == "disk" and cluster is not None and not cluster.sender_is_here:
        raise ConfigError(
            "--rollout-external-engine-addrs: the disk transport goes through a directory on the driver's machine, but rank 0 is on "
            "another: use --update-weight-transport nccl (gloo on a CPU)"
        )
    return transport


def _served_by_rank_0(config: Config) -> list[int]:
    """Return the numbers of the policy's engines that have their own GPUs."""
    policy = policy_model(config)
    models = [group.model for group in engine_groups(config) for _ in range(group.num_engines)]
    beside = ranks_beside_engines(config)
    return [number for number, model in enumerate(models) if model == policy and number not in beside]


def ranks_beside_engines(config: Config) -> dict[int, tuple[int, ...]]:
    """Return, for each engine on the trainer's GPUs (--colocate), the trainer's ranks there in the order of the engine's.

    The n-th GPU of the engines is that of rank n, as far as there are ranks.
    """
    if not config.takes_turns:
        return {}
    engines = enumerate(engine_gpus(engine_groups(config)))
    return {number: tuple(gpus) for number, gpus in engines if gpus.stop <= config.num_train_gpus}
