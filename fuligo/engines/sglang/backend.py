"""Backend `sglang`: fleets of SGLang servers behind routers, one fleet per model."""

import asyncio
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

from fuligo.config import Config
from fuligo.config.config import ServedModel
from fuligo.config.secret import Environment, reveal
from fuligo.config.topology import EngineGroupSpec, engine_groups, keeps_draft, policy_model
from fuligo.engines.backend import EngineHosts, EnginePlace, LaunchedEngines, LentEngine, LentEngines, SharedEngines, stopped_at_exit
from fuligo.engines.client import POLICY_ADAPTER
from fuligo.engines.connection import ControlDeadlines
from fuligo.engines.engine import InferenceEngine
from fuligo.engines.group import EngineGroup
from fuligo.engines.host import LOOPBACK, PortClaims
from fuligo.engines.sglang.fleet import Fleet, FleetSettings
from fuligo.engines.sglang.router import RouterSettings
from fuligo.engines.sglang.server import CPU_ARGUMENTS, PORT_SIZES, ServerPorts, ServerSettings, SGLangServer
from fuligo.engines.shared_client import RunRequests, SharedEngineClient
from fuligo.errors import ConfigError
from fuligo.formats.adapter_config import AdapterConfig
from fuligo.formats.engine_keys import EngineKeys
from fuligo.formats.private import private_directory
from fuligo.formats.quantization import EngineQuantization
from fuligo.formats.weight_manifest import EngineFormat
from fuligo.layout.adapter import AdapterShape
from fuligo.layout.slots import engine_gpus, engine_slots, trainer_slots
from fuligo.models.adapter_names import adapter_of
from fuligo.models.device import Device, Precision, resolve_device
from fuligo.models.registry import experts_in, read_architecture

_DTYPES: Mapping[str, Precision] = {"float32": "fp32", "float": "fp32", "bfloat16": "bf16"}
"""Values of `--sglang-dtype` that determine the dtype in which weights are sent."""

POLICY_ON_GPU: Mapping[str, Any] = {"dtype": "bfloat16"}
"""Arguments of the policy's engines on GPUs. By default SGLang runs float32 checkpoints, such as those that a run saved, in float16; the
trainer computes in bf16, which rounds away small updates that float16 keeps, so their weights would differ."""
UNEVEN_MEMORY: Mapping[str, str] = {"SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK": "0"}
"""Environment beside a trainer that is not offloaded. SGLang 0.5.15 otherwise ends if the GPUs of an engine differ by 10% in free memory:
pipeline stages have states of different sizes, and some of an engine's GPUs may have no trainer. The GPU with the least free memory
determines the size of the KV cache anyway."""


class SGLangBackend:
    """Implementation of `engines.backend.EngineBackend`."""

    async def launch(
        self, config: Config, directory: Path, stack: AsyncExitStack, hosts: EngineHosts | None, turn: asyncio.Event
    ) -> LaunchedEngines:
        """Start the fleets of all models concurrently; see `EngineBackend.launch`. Engines on this machine import SGLang before `turn`."""
        turn_file: Path | None = None
        if hosts is not None:
            await turn.wait()
        elif not turn.is_set():
            turn_file = stack.enter_context(private_directory("fuligo-turn-")) / "turn"
        claims = stack.enter_context(PortClaims())
        places = local_places(config, claims) if hosts is None else await hosts.engine_places(PORT_SIZES)
        start = SGLangServer if hosts is None else hosts.start_engine

        async def launch(settings: FleetSettings) -> Fleet:
            if turn_file is not None:
                settings = replace(settings, servers=tuple(replace(server, turn=turn_file) for server in settings.servers))
            fleet = await Fleet.launch(settings, start)
            await stack.enter_async_context(stopped_at_exit(fleet))
            return fleet

        try:
            async with asyncio.TaskGroup() as launching:
                settings = fleet_settings(config, directory, places, claims)
                tasks = {model: launching.create_task(launch(its_settings)) for model, its_settings in settings.items()}
                await turn.wait()
                if turn_file is not None:
                    turn_file.touch()
        except ExceptionGroup as errors:
            raise errors.exceptions[0] from None  # which canceled the other tasks
        fleets = {model: task.result() for model, task in tasks.items()}
        served = {model: ServedModel(fleet.url, fleet.router.keys.requests) for model, fleet in fleets.items()}
        policy = fleets.pop(policy_model(config))
        return LaunchedEngines(policy.group, policy, fleets, served)

    async def launch_shared(self, configs: Sequence[Config], directory: Path, stack: AsyncExitStack) -> SharedEngines:
        """Start one fleet whose servers load the adapters of all runs; a batch may contain requests of all of them."""
        claims = stack.enter_context(PortClaims())
        adapters = [adapter for config in configs if (adapter := adapter_of(config)) is not None]
        [settings] = fleet_settings(configs[0], directory, local_places(configs[0], claims), claims, adapters).values()
        fleet = await Fleet.launch(settings)
        await stack.enter_async_context(stopped_at_exit(fleet))
        engines = tuple(LentEngine(each.url, each.keys, each.number, each.tp_size) for each in settings.servers)
        router = LentEngine(fleet.router.url, fleet.router.keys)
        return SharedEngines(tuple(LentEngines(str(number), engines, router) for number in range(len(configs))), fleet)

    def connect(self, config: Config, lent: LentEngines, stack: AsyncExitStack) -> LaunchedEngines:
        requests = RunRequests(lent.run)
        given: dict[str, Any] = {"retries": config.rollout.rollout_retries, "timeout_s": config.rollout.rollout_timeout_s}
        given["deadlines"] = ControlDeadlines.of_watched(
            health_timeout_s=config.engine.rollout_health_check_timeout, start_timeout_s=config.engine.engine_start_timeout_s
        )
        clients: list[InferenceEngine] = [
            SharedEngineClient(each.url, requests, keys=each.keys, number=each.number, num_ranks=each.num_ranks, **given)
            for each in lent.engines
        ]
        assert lent.router is not None, "launch_shared lends a router"
        group = EngineGroup(clients, SharedEngineClient(lent.router.url, requests, keys=lent.router.keys, **given))
        stack.push_async_callback(group.close)
        return LaunchedEngines(group)

    def engine_format(self, config: Config) -> EngineFormat:
        """Return the checkpoint's quantization and layout of experts, in which the engines load weights."""
        directory = config.hf_checkpoint_path
        return EngineFormat(quantization=EngineQuantization.read(directory), experts=experts_in(directory))

    def weight_dtype(self, config: Config, device: Device) -> Precision | None:
        policy = next((group for group in engine_groups(config) if group.update_weights), None)
        if policy is None:
            return None
        arguments = {**(CPU_ARGUMENTS if device == "cpu" else POLICY_ON_GPU), **dict(policy.arguments.items())}
        return _DTYPES.get(arguments.get("dtype", "auto"))

    def claimed_ports(self, config: Config) -> list[int]:
        groups = engine_groups(config)
        routers = [1, 1] * len({group.model for group in groups})  # for requests and for Prometheus
        return [*routers, *PORT_SIZES * sum(group.num_engines for group in groups)]


BACKEND = SGLangBackend()


def fleet_settings(
    config: Config, directory: Path, places: Sequence[EnginePlace], claims: PortClaims, adapters: Sequence[AdapterConfig] | None = None
) -> dict[str, FleetSettings]:
    """Return the settings of each model's fleet; each has its own router.

    Args:
        places: places of the engines of all models, in order
        claims: ports of this machine, for the routers; must stay open while the fleets run
        adapters: adapters that the policy's engines load by name; None: the run's own adapter, if it has one
    """
    if adapters is None:
        own = adapter_of(config) if config.syncs_adapter else None
        adapters = [] if own is None else [own]
    servers: dict[str, list[ServerSettings]] = {}
    for group, server in _servers(config, directory, places, adapters):
        servers.setdefault(group.model, []).append(server)
    fleets: dict[str, FleetSettings] = {}
    for model, its_servers in servers.items():
        name = "router" if model == policy_model(config) else f"router of {model}"
        arguments = dict(config.router.items())
        key = arguments.pop("api_key", None)
        fleets[model] = FleetSettings(
            servers=tuple(its_servers),
            router=RouterSettings(
                name=name,
                log_file=directory / f"{name.replace(' of ', '-')}.txt",
                host=LOOPBACK,
                port=claims.claim(),
                prometheus_port=claims.claim(),
                arguments=arguments,
                key=secrets.token_hex(32) if key is None else reveal(key),
                prefill_decode=any(server.worker_type != "regular" for server in its_servers),
                python=config.engine.interpreter,
                environment=config.engine_environment,
                start_timeout_s=config.engine.engine_start_timeout_s,
            ),
            restart=config.engine.use_fault_tolerance,
            health_interval_s=config.engine.rollout_health_check_interval,
            health_timeout_s=config.engine.rollout_health_check_timeout,
            request_retries=config.rollout.rollout_retries,
            request_timeout_s=config.rollout.rollout_timeout_s,
            adapter=POLICY_ADAPTER if config.syncs_adapter and model == policy_model(config) else None,
            deadlines=ControlDeadlines.of_watched(
                health_timeout_s=config.engine.rollout_health_check_timeout, start_timeout_s=config.engine.engine_start_timeout_s
            ),
        )
    return fleets


def local_places(config: Config, claims: PortClaims) -> list[EnginePlace]:
    """Return the places of all engines on this machine, in the order of `fuligo plan`. Raises ConfigError if it has too few GPUs."""
    device = resolve_device(config)
    if device == "cuda":
        _check_gpus(config)
    trainers = trainer_slots(config.num_train_gpus, config.num_train_gpus) if config.trains else []
    groups = engine_groups(config)
    per_node = max(config.total_num_gpus, 1)
    slots = engine_slots(trainers, sum(group.num_gpus for group in groups), per_node, shares=config.shares_gpus)
    return [
        EnginePlace(
            LOOPBACK, tuple(map(claims.claim, PORT_SIZES)), tuple(slots[number][1] for number in numbers) if device == "cuda" else ()
        )
        for numbers in engine_gpus(groups)
    ]


def _servers(
    config: Config, directory: Path, places: Sequence[EnginePlace], adapters: Sequence[AdapterConfig]
) -> Iterator[tuple[EngineGroupSpec, ServerSettings]]:
    groups = [group for group in engine_groups(config) for _ in range(group.num_engines)]
    environment = Environment(UNEVEN_MEMORY if config.trainer_stays else {}).merged(config.engine_environment)
    for number, (group, place) in enumerate(zip(groups, places, strict=True)):
        assert group.model_path is not None, "validated"
        assert group.worker_type != "placeholder", "a placeholder has no engines"
        arguments = {**_own_arguments(config, group, adapters), **dict(group.arguments.items())}
        # Keys that the user passes as arguments are removed from the command line; missing ones are random.
        new = EngineKeys.new()
        server = ServerSettings(
            keys=EngineKeys(reveal(arguments.pop("api_key", new.requests)), reveal(arguments.pop("admin_api_key", new.control))),
            name=f"engine {number}",
            model_path=group.model_path,
            tp_size=group.tp_size,
            pp_size=group.pp_size,
            arguments=arguments,
            worker_type=group.worker_type,
            device=resolve_device(config),
            host=place.host,
            ports=ServerPorts(*place.ports),
            log_file=directory / f"engine-{number}.txt",
            number=number,
            gpu_ids=place.gpu_ids,
            num_nodes=place.num_nodes,
            python=config.engine.interpreter,
            environment=environment,
            is_exact=config.train.exact_on_policy and group.model == policy_model(config),
            start_timeout_s=config.engine.engine_start_timeout_s,
        )
        yield group, server


def _own_arguments(config: Config, group: EngineGroupSpec, adapters: Sequence[AdapterConfig]) -> dict[str, Any]:
    """Return the SGLang arguments that the run needs for an engine of `group`; the user's flags override them.

    With --colocate, SGLang releases memory only with its memory saver, and weights that are never synced, including draft models', need a
    copy in host memory.
    """
    is_policy, is_on_gpu = group.model == policy_model(config), resolve_device(config) == "cuda"
    arguments: dict[str, Any] = {"enable_return_routed_experts": True} if config.replays_engine_routing and is_policy else {}
    if adapters and is_policy:
        arguments |= adapter_arguments(adapters, config.hf_checkpoint_path, device=resolve_device(config))
    if config.model.trust_remote_code:
        arguments |= {"trust_remote_code": True}
    if config.data.multimodal_keys and is_policy:
        arguments |= {"disable_fast_image_processor": True}  # the fast one uses torchvision, on the engine's GPU if it has one
    if is_policy and is_on_gpu:
        arguments |= POLICY_ON_GPU
    if config.shares_gpus and is_on_gpu:
        arguments |= {"enable_memory_saver": True, "enable_weights_cpu_backup": not is_policy}
        if keeps_draft(config, group):
            arguments |= {"enable_draft_weights_cpu_backup": True}
    return arguments


def adapter_arguments(adapters: Sequence[AdapterConfig], model: Path, *, device: Device) -> dict[str, Any]:
    """Return the SGLang arguments for loading an adapter of each of these shapes; a batch may contain requests for each and for none."""
    architecture = read_architecture(model)
    names = list(dict.fromkeys(name for adapter in adapters for name in AdapterShape(adapter, architecture).names))
    rank = max(adapter.rank for adapter in adapters)
    arguments = {"enable_lora": True, "max_lora_rank": rank, "lora_target_modules": names, "max_loras_per_batch": len(adapters) + 1}
    return {**arguments, "lora_strict_loading": True, **({"lora_backend": "torch_native"} if device == "cpu" else {})}


def _check_gpus(config: Config) -> None:
    import torch

    here, needed = torch.cuda.device_count(), config.total_num_gpus
    if needed > here:
        raise ConfigError(
            f"cannot place the run: trainer and engines need {needed} GPUs, but this machine has {here}; lower --actor-num-gpus-per-node "
            "or --rollout-num-gpus, or use --colocate to share them"
        )
