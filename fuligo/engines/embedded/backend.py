"""Backend `embedded`: one engine in its own process on the driver's node."""

import asyncio
from collections.abc import Sequence
from contextlib import AsyncExitStack
from dataclasses import replace
from pathlib import Path

from fuligo.config import Config
from fuligo.engines.backend import EngineHosts, LaunchedEngines, LentEngine, LentEngines, SharedEngines, connect_to, stopped_at_exit
from fuligo.engines.embedded.launch import EmbeddedEngineSettings, launch_embedded, run_path
from fuligo.errors import ConfigError, FuligoError
from fuligo.formats.adapter_config import adapter_directory
from fuligo.formats.checkpoint_files import prediction_prefixes
from fuligo.formats.hugging_face import MTP_PREFIX, read_config_json
from fuligo.formats.weight_manifest import EngineFormat
from fuligo.limits import half_the_cores
from fuligo.models.adapter_names import adapter_of
from fuligo.models.device import Device, Precision, resolve_device, resolve_precision
from fuligo.models.registry import REFUSED, has_mtp_module, stored_experts


class EmbeddedBackend:
    """Implementation of `engines.backend.EngineBackend`."""

    async def launch(
        self, config: Config, directory: Path, stack: AsyncExitStack, hosts: EngineHosts | None, turn: asyncio.Event
    ) -> LaunchedEngines:
        await turn.wait()
        given = config.lora.lora_adapter
        adapter = None if given is None or config.trains else adapter_directory(Path(given))
        if config.trains and config.syncs_adapter:
            adapter = adapter_of(config)
        settings = _settings(config, directory / "engine.txt")
        engine = await launch_embedded(replace(settings, adapter=adapter, is_batch_invariant=config.train.exact_on_policy))
        await stack.enter_async_context(stopped_at_exit(engine))
        launched = self.connect(config, LentEngines("", (LentEngine(engine.url, engine.keys),)), stack)
        return replace(launched, process=engine)

    async def launch_shared(self, configs: Sequence[Config], directory: Path, stack: AsyncExitStack) -> SharedEngines:
        """Start one process with an engine for each run, over one copy of the base weights."""
        shapes = {str(number): shape for number, config in enumerate(configs) if (shape := adapter_of(config)) is not None}
        settings = replace(_settings(configs[0], directory / "engine.txt"), shapes_of_runs=shapes)
        if settings.num_threads is None and resolve_device(configs[0]) == "cpu":
            settings = replace(settings, num_threads=half_the_cores())  # the trainer computes at the same time
        engine = await launch_embedded(settings)
        await stack.enter_async_context(stopped_at_exit(engine))
        return SharedEngines(tuple(LentEngines(run, (LentEngine(engine.url + run_path(run), engine.keys),)) for run in shapes))

    def connect(self, config: Config, lent: LentEngines, stack: AsyncExitStack) -> LaunchedEngines:
        [engine] = lent.engines
        return LaunchedEngines(connect_to(config, [engine.url], engine.keys, stack))

    def engine_format(self, config: Config) -> EngineFormat:
        """Return a format without MTP layers, which transformers' models lack, and without quantization."""
        from fuligo.engines.embedded.attention import SGLANG_INSTEAD
        from fuligo.engines.embedded.model import servable_config

        directory = config.hf_checkpoint_path
        config_json = read_config_json(directory)  # a missing file is not the engine's fault
        try:
            served = servable_config(str(directory))
        except FuligoError as error:
            if config_json.get("model_type") in REFUSED:
                raise ConfigError(f"cannot use --hf-checkpoint: {error}") from error
            fix = "--rollout-backend sglang" + ("" if config.trainer_capabilities.splits_model else " --train-backend megatron")
            # The engine's own advice names only the other engine.
            reason, advice, _ = str(error).partition(f"; {SGLANG_INSTEAD}")
            raise ConfigError(
                f"cannot use --hf-checkpoint with the embedded engine: {reason}{'; ' if advice else ', or '}use {fix}"
            ) from error
        left_out = prediction_prefixes(served.to_dict()) + ((MTP_PREFIX,) if has_mtp_module(config_json) else ())
        return EngineFormat(left_out=left_out, experts=stored_experts(config_json))

    def weight_dtype(self, config: Config, device: Device) -> Precision | None:
        return resolve_precision(config.engine.embedded_dtype, device)

    def claimed_ports(self, config: Config) -> list[int]:
        """Return no sizes: the engine listens on any free port."""
        return []


BACKEND = EmbeddedBackend()


def _settings(config: Config, log_file: Path) -> EmbeddedEngineSettings:
    """Return the settings of the engine's process, without an adapter."""
    assert config.model.hf_checkpoint is not None, "validated"
    flags = config.engine
    return EmbeddedEngineSettings(
        model_path=config.model.hf_checkpoint,
        log_file=log_file,
        device=config.cluster.device,
        dtype=flags.embedded_dtype,
        max_running_requests=flags.embedded_max_running_requests,
        max_total_tokens=flags.embedded_max_total_tokens,
        num_threads=flags.embedded_num_threads,
        trust_remote_code=config.model.trust_remote_code,
        start_timeout_s=flags.engine_start_timeout_s,
    )
