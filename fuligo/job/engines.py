"""Engines of a run and their weight sync, built from the configuration."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from fuligo.config import Config
from fuligo.config.topology import policy_model
from fuligo.engines.deadlines import ControlDeadlines
from fuligo.engines.embedded.launch import EmbeddedEngineProcess, EmbeddedEngineSettings, launch_embedded
from fuligo.engines.generation import RoutingQuery, SamplingParams
from fuligo.engines.group import EngineGroup
from fuligo.engines.metrics import EngineMonitor
from fuligo.engines.ports import PortClaims
from fuligo.engines.sglang.fleet import Fleet, FleetSettings
from fuligo.engines.sglang.server import SGLangServer
from fuligo.errors import EngineError, FuligoError
from fuligo.formats.hugging_face import read_model_config
from fuligo.formats.scratch import scratch_root
from fuligo.job.colocated import ColocatedDevices, ColocatedWeightSync
from fuligo.job.fleet import fleet_settings, local_places, ranks_beside_engines
from fuligo.job.trainer_settings import resolve_device, resolve_precision
from fuligo.job.transport import choose_transport
from fuligo.job.watch import while_watching
from fuligo.models.routing import RoutingShape
from fuligo.observability.run_directory import RunDirectory
from fuligo.trainer.protocol import Trainer
from fuligo.weights.proof import ChecksumProof, EqualityProof, LogprobProof
from fuligo.weights.sync import VersionCounter, WeightSync, WeightSyncSettings

if TYPE_CHECKING:
    from fuligo.cluster.cluster import RayCluster

PROBE_IDS = (1, 2, 3)
"""Token ids that every model has."""
FP32_TOLERANCE, BF16_TOLERANCE, FP8_TOLERANCE = 1e-3, 0.05, 0.2
"""Nats; of mean log-probability differences between two implementations of one model (in bf16: 0.01 to 0.03 seen), or between a model and
itself with weights and activations in FP8 (0.06 for the quickstart's)."""


@dataclass(slots=True, frozen=True)
class Engines:
    """What samples."""

    group: EngineGroup
    monitor: EngineMonitor
    fleet: Fleet | None = None
    """Who looks after SGLang engines that this run started."""
    others: Mapping[str, Fleet] = field(default_factory=dict)
    """Of further models of `--sglang-config`, by name: their weights are never synced."""
    urls: Mapping[str, str] = field(default_factory=dict)
    """Of the routers, by name of the model."""

    @classmethod
    def of(cls, group: EngineGroup) -> Engines:
        return cls(group, EngineMonitor(group))

    @classmethod
    def of_fleets(cls, fleets: Mapping[str, Fleet], policy: str) -> Engines:
        """
        Args:
            policy: name of the model that rollouts are sampled from
        """
        others = {name: fleet for name, fleet in fleets.items() if name != policy}
        urls = {name: fleet.router.url for name, fleet in fleets.items()}
        group = fleets[policy].group
        return cls(group, EngineMonitor(group), fleets[policy], others, urls)

    @asynccontextmanager
    async def watched(
        self, weights: WeightSync | ColocatedWeightSync | VersionCounter | None, devices: ColocatedDevices | None = None
    ) -> AsyncIterator[None]:
        """While the block runs, engines are polled, and dead ones of the fleet are restarted; one that cannot be ends the block.

        Args:
            weights: syncs restarted engines; without a trainer, engines keep the weights that they load
            devices: shared with the trainer; None if the engines have their own

        Raises:
            EngineError: an engine or the router is gone for good
        """
        async with AsyncExitStack() as stack:
            await stack.enter_async_context(while_watching(self.monitor.watch()))
            if self.fleet is not None:
                syncs = isinstance(weights, WeightSync | ColocatedWeightSync)
                self.fleet.sync_restarted = weights.sync_restarted if syncs else self.fleet.serve_as_loaded
                self.fleet.devices = devices
                await stack.enter_async_context(while_watching(self.fleet.watch()))
            for fleet in self.others.values():
                fleet.sync_restarted = fleet.serve_as_loaded
                fleet.devices = devices
                await stack.enter_async_context(while_watching(fleet.watch()))
            yield


async def launch_engines(config: Config, directory: RunDirectory, stack: AsyncExitStack, cluster: RayCluster | None) -> Engines | None:
    """Start the engines, or connect to those that run; returns when they answer. None where nothing is sampled.

    Args:
        cluster: has places for SGLang engines; None: they run here

    Raises:
        EngineError: an engine did not start, or does not answer.
    """
    if not config.needs_engine:
        return None
    flags = config.engine
    urls = [address if "://" in address else f"http://{address}" for address in flags.rollout_external_engine_addrs]
    if not urls and config.resolved_rollout_backend == "sglang":
        fleets = await _launch_fleets(config, directory, stack, cluster)
        engines = Engines.of_fleets(fleets, policy_model(config))
        await _require_routing(config, engines.group)
        return engines
    if not urls:
        engine = await launch_embedded(_embedded_settings(config, directory))
        await stack.enter_async_context(_stopped_at_the_end(engine))
        urls = [engine.url]
    engines = EngineGroup.connect(
        urls,
        retries=config.rollout.rollout_retries,
        timeout_s=config.rollout.rollout_timeout_s,
        deadlines=ControlDeadlines.of_others(
            request_timeout_s=config.rollout.rollout_timeout_s, start_timeout_s=flags.engine_start_timeout_s
        ),
    )
    stack.push_async_callback(engines.close)
    await engines.wait_ready(flags.engine_start_timeout_s)
    await engines.read_num_ranks()
    await _require_routing(config, engines)
    return Engines.of(engines)


async def _require_routing(config: Config, engines: EngineGroup) -> None:
    """--use-rollout-routing-replay: every engine tells where tokens go.

    Raises:
        EngineError: one does not, or tells of another model.
    """
    if config.replays_engine_routing:
        assert config.model.hf_checkpoint is not None, "validated"
        query = RoutingQuery(RoutingShape.read(Path(config.model.hf_checkpoint)), num_known=0, affinity=0)
        for number, client in enumerate(engines.clients):
            await client.generate(PROBE_IDS, SamplingParams(max_new_tokens=1), rid=f"routing-{number}", routing=query)


async def _launch_fleets(config: Config, directory: RunDirectory, stack: AsyncExitStack, cluster: RayCluster | None) -> dict[str, Fleet]:
    """One for each model, all at once; those that run are stopped when the stack closes."""
    claims = stack.enter_context(PortClaims())
    places = local_places(config, claims) if cluster is None else await cluster.engine_places()
    start = SGLangServer if cluster is None else cluster.start_engine

    async def launch(settings: FleetSettings) -> Fleet:
        fleet = await Fleet.launch(settings, start)
        await stack.enter_async_context(_stopped_at_the_end(fleet))
        return fleet

    try:
        async with asyncio.TaskGroup() as launching:
            settings = fleet_settings(config, directory, places, claims)
            tasks = {model: launching.create_task(launch(its_settings)) for model, its_settings in settings.items()}
    except ExceptionGroup as errors:
        raise errors.exceptions[0] from None  # the others were cancelled because of it
    return {model: task.result() for model, task in tasks.items()}


@asynccontextmanager
async def _stopped_at_the_end(engines: Fleet | EmbeddedEngineProcess) -> AsyncIterator[None]:
    """An engine that died comes first in the error that ends the run: most likely it is the cause."""
    try:
        yield
    except FuligoError as error:
        try:
            if isinstance(engines, Fleet):
                await engines.check_alive()
            else:
                engines.check_alive()
        except EngineError as cause:
            said = str(error) if str(error) != str(cause) else ""
            raise EngineError("\n".join(filter(None, (str(cause), said)))) from error
        raise
    finally:
        await engines.stop()


def _embedded_settings(config: Config, directory: RunDirectory) -> EmbeddedEngineSettings:
    assert config.model.hf_checkpoint is not None, "validated"
    flags = config.engine
    return EmbeddedEngineSettings(
        model_path=config.model.hf_checkpoint,
        log_file=directory.path / "engine.txt",
        device=config.cluster.device,
        dtype=flags.embedded_dtype,
        max_running_requests=flags.embedded_max_running_requests,
        max_total_tokens=flags.embedded_max_total_tokens,
        num_threads=flags.embedded_num_threads,
        start_timeout_s=flags.engine_start_timeout_s,
    )


def build_weight_sync(
    config: Config, trainer: Trainer, engines: EngineGroup, *, version: int, cluster: RayCluster | None, devices: ColocatedDevices | None
) -> WeightSync | ColocatedWeightSync:
    """
    Args:
        trainer: a `ColocatedTrainer` if `devices` are given

    Raises:
        ConfigError: the transport does not reach the engines from where rank 0 runs
    """
    assert config.model.hf_checkpoint is not None
    flags = config.weight_sync
    settings = WeightSyncSettings(
        transport=choose_transport(config, cluster),
        bucket_bytes=flags.update_weight_buffer_size,
        changes_only=flags.update_weight_mode == "delta",
        model_files=Path(config.model.hf_checkpoint),
        scratch=scratch_root(),
        trainer_ranks=ranks_beside_engines(config),
    )
    proof = _proof(config, trainer) if flags.check_weight_update_equal else None
    weights = WeightSync(trainer, engines, settings, version=version, proof=proof, devices=devices)
    return weights if devices is None else ColocatedWeightSync(weights, engines, devices)


def share_devices(config: Config, trainer: Trainer, engines: Engines) -> ColocatedDevices:
    others = [fleet.group for fleet in engines.others.values()]
    return ColocatedDevices(trainer, engines.group, keep_weights=config.weight_sync.update_weight_mode == "delta", others=others)


def _proof(config: Config, trainer: Trainer) -> EqualityProof:
    if config.resolved_rollout_backend == "embedded":
        return ChecksumProof()
    assert config.model.hf_checkpoint is not None
    model = read_model_config(Path(config.model.hf_checkpoint))
    tolerance = FP32_TOLERANCE if resolve_precision(config.model.precision, resolve_device(config)) == "fp32" else BF16_TOLERANCE
    if model.get("quantization_config") is not None:
        tolerance = FP8_TOLERANCE
    return LogprobProof(
        trainer,
        temperature=config.rollout.rollout_temperature,
        vocab_size=model["vocab_size"],
        tolerance=tolerance,
        num_replicas=config.resolved_data_parallel_size,
    )
