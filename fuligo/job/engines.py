"""Engines of a run, including a served teacher, and the weight sync to them, built from the configuration."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Coroutine, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fuligo.config import Config
from fuligo.config.secret import reveal
from fuligo.config.server_groups import TEACHER
from fuligo.config.topology import engine_groups, policy_model
from fuligo.engines.backend import LaunchedEngines, connect_to, engine_backend
from fuligo.engines.client import EngineClient
from fuligo.engines.engine import InferenceEngine
from fuligo.engines.generation import RoutingQuery, SamplingParams
from fuligo.engines.group import EngineGroup
from fuligo.engines.metrics import EngineMonitor
from fuligo.errors import ConfigError, EngineError, FuligoError
from fuligo.formats.engine_keys import EngineKeys
from fuligo.formats.hugging_face import read_model_config
from fuligo.formats.private import scratch_root
from fuligo.formats.weight_manifest import Transport
from fuligo.job.colocated import ColocatedDevices, ColocatedWeightSync
from fuligo.job.lent import LentParts
from fuligo.job.watch import while_watching
from fuligo.layout.slots import engine_gpus
from fuligo.models.device import resolve_device, resolve_precision
from fuligo.models.registry import architecture_of
from fuligo.models.routing import RoutingShape
from fuligo.observability.run_directory import RunDirectory
from fuligo.rollout.teacher import ServedTeacher
from fuligo.trainer.protocol import Trainer
from fuligo.weights.adapter import AdapterRecord
from fuligo.weights.proof import ChecksumProof, EqualityProof, LogprobProof
from fuligo.weights.sync import WeightSync, WeightSyncSettings

if TYPE_CHECKING:
    from fuligo.cluster.cluster import RayCluster


def choose_transport(config: Config, cluster: RayCluster | None) -> Transport:
    """Return --update-weight-transport with auto resolved.

    `cluster` knows the nodes of ranks and engines; None: all are on this machine. Raises ConfigError if the transport cannot reach all
    engines and their ranks.
    """
    transport = _resolve_transport(config, cluster)
    stages = max((group.pp_size for group in engine_groups(config) if group.model == policy_model(config)), default=1)
    if transport == "tensor" and stages > 1:
        raise ConfigError(
            f"--sglang-pp-size {stages}: SGLang hands the memory of a tensor-parallel rank to all its pipeline stages, but memory can be "
            "handed over only once; use --update-weight-transport disk, or --sglang-pp-size 1"
        )
    return transport


def _resolve_transport(config: Config, cluster: RayCluster | None) -> Transport:
    """Resolve auto: shared memory on one machine, broadcast between GPUs and machines, files for engines that the run did not start.

    Raises ConfigError if the given transport does not reach the engines.
    """
    asked = config.weight_sync.update_weight_transport
    if config.engine.rollout_external_engine_addrs:
        transport = "disk" if asked == "auto" else asked
        if transport == "disk" and cluster is not None and not cluster.sender_is_here:
            raise ConfigError(
                "--rollout-external-engine-addrs: the disk transport goes through a directory on the driver's machine, but rank 0 is on "
                "another; use --update-weight-transport nccl (gloo on a CPU)"
            )
        return transport
    beside = config.engine_capabilities.beside_trainer
    one_machine = cluster is None or (cluster.sender_is_here if beside else cluster.sender_shares_machine_with(_served_by_rank_0(config)))
    if config.syncs_adapter and config.engine_capabilities.names_adapters and not one_machine:
        raise ConfigError(
            "--lora-sync adapter goes through the memory of one machine, but trainer rank 0 and the engines are on several; use "
            "--lora-sync merged"
        )
    if asked != "auto":
        here = cluster is None or (one_machine and (asked != "disk" or cluster.sender_is_here))
        if asked in ("tensor", "disk") and not here:
            raise ConfigError(
                f"--update-weight-transport {asked} works on one machine only, but trainer rank 0, the driver and the engines are on "
                "several; remove the flag, or use nccl (gloo on a CPU)"
            )
        return asked
    if beside and not one_machine:
        raise ConfigError(
            "the embedded engine runs on the driver's node, but trainer rank 0 is on another node; use --rollout-backend sglang"
        )
    if not beside and resolve_device(config) == "cuda" and not config.cluster.colocate and not config.syncs_adapter:
        return "nccl"
    return "tensor" if one_machine else "gloo"


def _served_by_rank_0(config: Config) -> list[int]:
    """Return the numbers of the engines to which rank 0 sends the weights: those of the policy on GPUs that the trainer does not use."""
    policy = policy_model(config)
    models = [group.model for group in engine_groups(config) for _ in range(group.num_engines)]
    beside = ranks_beside_engines(config)
    return [number for number, model in enumerate(models) if model == policy and number not in beside]


def ranks_beside_engines(config: Config) -> dict[int, tuple[int, ...]]:
    """Return the trainer's ranks on the GPUs of each engine (--colocate), by the engine's number and in the order of its ranks.

    The n-th GPU of the engines is the GPU of trainer rank n. Engines with other GPUs are left out.
    """
    if not config.takes_turns:
        return {}
    engines = enumerate(engine_gpus(engine_groups(config)))
    return {number: tuple(gpus) for number, gpus in engines if gpus.stop <= config.num_train_gpus}


PROBE_IDS = (1, 2, 3)
"""Token ids that exist in every vocabulary."""
FP32_TOLERANCE, BF16_TOLERANCE, COARSE_TOLERANCE = 1e-3, 0.1, 0.2
"""Tolerances, in nats, of the mean difference of log-probabilities between two implementations of a model (bf16: 0.01 to 0.03 measured with
random weights, 0.05 to 0.06 with SmolLM2-135M's).
COARSE_TOLERANCE is for FP8 (quickstart model: 0.06) and, in bf16, for mixtures of experts, where rounding changes the routing, and for
linear attention (0.08 to 0.14 with random weights, docs/benchmarks-gpu.md)."""


@dataclass(slots=True)
class Engines:
    """Engines of a run, with their monitor and their supervision. They outlive a trainer that is restarted."""

    launched: LaunchedEngines
    monitor: EngineMonitor
    devices: ColocatedDevices | None = None
    """Devices shared with the trainer; None if the engines have their own."""
    are_watched: bool = False
    failure: FuligoError | None = None
    """Error that ended the supervision of the engines, and with it the run; None while they can serve."""

    @property
    def group(self) -> EngineGroup:
        """Engines that rollouts are sampled from."""
        return self.launched.group

    @asynccontextmanager
    async def watched(self, *, are_synced: bool) -> AsyncIterator[None]:
        """Poll the engines and restart dead ones during the block; an engine that cannot be restarted ends the block.

        Without `are_synced`, there is no trainer, and restarted engines keep the weights that they load. Raises EngineError if an engine or
        the router is lost for good.
        """
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(while_watching(self.monitor.watch()))
            policy = self.launched.policy
            for fleet in (*self.launched.others.values(), *(() if policy is None else (policy,))):
                if fleet is not policy or not are_synced:
                    fleet.sync_restarted = fleet.serve_as_loaded
                fleet.devices = self.devices
                await stack.enter_async_context(while_watching(self._keep_failure(fleet.watch())))
            if self.launched.process is not None:
                await stack.enter_async_context(while_watching(self._keep_failure(self.launched.process.watch())))
            self.are_watched = True
            yield

    async def _keep_failure(self, watch: Coroutine[Any, Any, None]) -> None:
        """Await a watch, and keep the error with which it ends."""
        try:
            await watch
        except FuligoError as error:
            self.failure = error
            raise

    @contextmanager
    def synced_by(self, weights: WeightSync | ColocatedWeightSync) -> Iterator[None]:
        """Have `weights` sync restarted engines during the block; before and after it, they wait for the next sync."""
        policy = self.launched.policy
        if policy is None:
            yield
            return
        before, policy.sync_restarted = policy.sync_restarted, weights.sync_restarted
        try:
            yield
        finally:
            policy.sync_restarted = before


async def launch_engines(
    config: Config,
    directory: RunDirectory,
    stack: AsyncExitStack,
    cluster: RayCluster | None,
    turn: asyncio.Event,
    lent: LentParts | None = None,
) -> Engines | None:
    """Start the engines, or connect to external or lent ones, and wait until they answer. Return None if the run samples nothing.

    Args:
        cluster: nodes for the engines; None: this machine
        turn: set once no trainer holds memory of the engines' devices
        lent: trainer and engines that several runs share; None: this run starts its own
    """
    if not config.needs_engine:
        return None
    if config.engine.rollout_external_engine_addrs:
        launched = LaunchedEngines(await _connect_external(config, stack))
    elif lent is not None:
        launched = engine_backend(config).connect(config, await lent.engines(), stack)
    else:
        launched = await engine_backend(config).launch(config, directory.path, stack, cluster, turn)
    if config.replays_engine_routing:
        query = RoutingQuery(RoutingShape.read(config.hf_checkpoint_path), num_known=0, affinity=0)
        for number, client in enumerate(launched.group.clients):
            await client.generate(PROBE_IDS, SamplingParams(max_new_tokens=1), rid=f"routing-{number}", routing=query)
    devices = None
    if config.takes_turns:
        others = [fleet.group for fleet in launched.others.values()]
        devices = ColocatedDevices(launched.group, keep_weights=config.weight_sync.update_weight_mode == "delta", others=others)
    return Engines(launched, EngineMonitor(launched.group), devices)


async def _connect_external(config: Config, stack: AsyncExitStack) -> EngineGroup:
    flags = config.engine
    urls = [address if "://" in address else f"http://{address}" for address in flags.rollout_external_engine_addrs]
    group = connect_to(config, urls, EngineKeys.of_environment(), stack)
    await group.wait_ready(flags.engine_start_timeout_s)
    await group.read_num_ranks()
    if config.weight_sync.update_weight_mode == "delta" and config.trains:
        for url, info in await group.model_infos():
            if info.num_weight_loads is not None:
                raise ConfigError(
                    f"--update-weight-mode delta leaves unchanged tensors out, but {url} (fuligo serve) accepts only whole syncs; remove "
                    "the flag"
                )
    return group


def build_weight_sync(
    config: Config,
    trainer: Trainer,
    engines: EngineGroup,
    *,
    version: int,
    resumes: bool,
    cluster: RayCluster | None,
    devices: ColocatedDevices | None,
    run_directory: Path,
) -> WeightSync | ColocatedWeightSync:
    """Build the weight sync of a run. Raises ConfigError if the transport cannot reach the engines from rank 0.

    Args:
        trainer: a `ColocatedTrainer` if `devices` are given
        resumes: the trainer's weights are those of a checkpoint of `version`
    """
    flags = config.weight_sync
    settings = WeightSyncSettings(
        transport=choose_transport(config, cluster),
        bucket_bytes=flags.update_weight_buffer_size,
        changes_only=flags.update_weight_mode == "delta",
        model_files=config.hf_checkpoint_path,
        scratch=scratch_root(),
        trainer_ranks=ranks_beside_engines(config),
        pause="in_place" if flags.update_weight_requests == "continue" else "abort",
    )
    proof = _proof(config, trainer) if flags.check_weight_update_equal else None
    adapters = AdapterRecord(run_directory / "adapters.jsonl", continues=resumes) if config.uses_adapter else None
    weights = WeightSync(trainer, engines, settings, version=version, proof=proof, devices=devices, adapters=adapters)
    return weights if devices is None else ColocatedWeightSync(weights, engines, devices)


def _proof(config: Config, trainer: Trainer) -> EqualityProof:
    if config.engine_capabilities.reports_checksum:
        return ChecksumProof()
    model = read_model_config(config.hf_checkpoint_path)
    if model.get("quantization_config") is not None:
        tolerance = COARSE_TOLERANCE
    elif resolve_precision(config.model.precision, resolve_device(config)) == "fp32":
        tolerance = FP32_TOLERANCE
    else:
        tolerance = COARSE_TOLERANCE if _amplifies_rounding(model) else BF16_TOLERANCE
    return LogprobProof(
        trainer,
        temperature=config.rollout.rollout_temperature,
        vocab_size=model["vocab_size"],
        tolerance=tolerance,
        num_replicas=config.resolved_data_parallel_size,
    )


def _amplifies_rounding(model: dict[str, Any]) -> bool:
    try:
        architecture = architecture_of(model)
    except ConfigError:  # a family that cannot be planned
        return True
    return architecture.experts is not None or architecture.num_linear_layers > 0


async def find_teacher(config: Config, engines: Engines, stack: AsyncExitStack) -> ServedTeacher | None:
    """Connect to the teacher and let it score a few tokens. Return None without a teacher, or if the trainer computes its scores.

    Raises EngineError if the teacher, which the run's own engines may include, does not answer or gives no valid log-probabilities.
    """
    if config.teacher_from != "engine":
        return None
    url, timeout_s = config.algorithm.opd_teacher_url, config.rollout.rollout_timeout_s
    scorer: EngineGroup | InferenceEngine
    if url is None:
        scorer, option = engines.launched.others[TEACHER].group, f"the model {TEACHER} of --sglang-config"
    else:
        scorer = EngineClient(reveal(url), EngineKeys.of_environment(), retries=config.rollout.rollout_retries, timeout_s=timeout_s)
        option = f"--opd-teacher-url {url}"
        stack.push_async_callback(scorer.close)
    try:
        await scorer.score(np.array(PROBE_IDS, np.int32), 1, rid="teacher-probe", timeout_s=timeout_s)
    except EngineError as error:
        raise EngineError(f"{option} cannot score: {error}") from error
    return ServedTeacher(scorer, timeout_s=timeout_s)
