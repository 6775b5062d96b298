"""One SGLang engine: placement, command, environment, and process on this machine."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

from fuligo.config.passthrough import command_line
from fuligo.config.secret import Environment
from fuligo.engines.answers import WeightLabel
from fuligo.engines.backend import PROBE_TIMEOUT_S, NodePart
from fuligo.engines.client import EngineClient
from fuligo.engines.host import PortClaims, endpoint, is_loopback, use_loopback_interface
from fuligo.engines.server_process import ServerProcess, secrets_of
from fuligo.errors import EngineError
from fuligo.formats.engine_keys import CONTROL_VARIABLE, NO_KEYS, REQUESTS_VARIABLE, EngineKeys
from fuligo.formats.private import kernel_cache

PORTS_PER_ENGINE = 64
"""Consecutive ports for torch.distributed and, under DP attention, for messages between SGLang's processes, counted up from
`dist_init_addr`."""
PORT_SIZES = (1, PORTS_PER_ENGINE, 1)
"""Sizes of the ranges of consecutive ports of one engine, in the order of the fields of `ServerPorts`."""
LAUNCH = f"""
import gc, os, runpy, sys
keys = dict(api_key=os.environ.pop("{REQUESTS_VARIABLE}"), admin_api_key=os.environ.pop("{CONTROL_VARIABLE}"))
sys.path.insert(0, {str(Path(__file__).parent / "ahead")!r})
import fuligo_ahead, fuligo_kernels
del sys.path[0]
fuligo_kernels.start()
fuligo_ahead.start()
gc.disable()
from sglang.srt.utils import auth
gc.freeze()
gc.enable()
add_api_key_middleware = auth.add_api_key_middleware
def protect(app, **_):
    for route in app.routes:
        if getattr(route, "path", "") == "/load_lora_adapter_from_tensors":
            auth.auth_level(auth.AuthLevel.ADMIN_OPTIONAL)(route.endpoint)
    add_api_key_middleware(app, **keys)
auth.add_api_key_middleware = protect
auth.app_has_admin_force_endpoints = lambda app: True
runpy.run_module("sglang.launch_server", run_name="__main__", alter_sys=True)
"""
"""Program that starts `sglang.launch_server` with keys from the environment. If they were arguments (`--api-key`), other users could read
them, SGLang 0.5.15 would write them to its log, and `/server_info` would return the control key to every holder of the request key. The
program also restricts loading adapters to the control key, which SGLang permits with either key. First it starts the processes of
`KERNELS_VARIABLE` and `AHEAD_VARIABLE`, without the keys, in this order: those of the latter must see no variable that is removed later.
Garbage collection is off during most imports, because it would take a fifth of their time."""
AHEAD_VARIABLE = "FULIGO_AHEAD"
"""Environment variable with the modules of SGLang's processes that start together with its main process (`ahead/fuligo_ahead.py`)."""
KERNELS_VARIABLE = "FULIGO_KERNELS"
"""Environment variable with the values that determine the kernels to compile during the imports (`ahead/fuligo_kernels.py`), on GPUs."""
OWN_ENVIRONMENT = {
    # With SGLang's default of 5 s, requests after a training step would hit closing connections, which the router counts as failures.
    "SGLANG_TIMEOUT_KEEP_ALIVE": "600",
    "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION": "0",  # otherwise every health check samples a token
    # SGLang 0.5.15 caches image embeddings by pixels, and would keep them when a weight sync changes the vision tower.
    "SGLANG_VLM_CACHE_SIZE_MB": "0",
    "HF_HUB_OFFLINE": "1",
}
CPU_ENVIRONMENT = {"SGLANG_USE_CPU_ENGINE": "1", "OMP_NUM_THREADS": "1"}
CPU_ARGUMENTS: dict[str, Any] = {
    "attention_backend": "torch_native",
    "sampling_backend": "pytorch",
    "disable_overlap_schedule": True,
    "disable_cuda_graph": True,
    "mem_fraction_static": 0.1,
    "max_total_tokens": 65536,
    "max_running_requests": 64,
    "dtype": "float32",
    "sleep_on_idle": True,  # otherwise the scheduler spins on a core that the trainer needs
}
"""Arguments with which SGLang 0.5.15 serves on a CPU without its kernels; the user's flags override them."""
EXACT_PLUGIN = Path(__file__).parent / "exact"
"""Directory with the plugin for --exact-on-policy, among the directories in which engines look for modules; SGLang finds it there."""
EXACT_ARGUMENTS: dict[str, Any] = {
    "attention_backend": "triton",
    "moe_runner_backend": "triton",
    "dtype": "bfloat16",
    "disable_prefill_cuda_graph": True,
    "enforce_disable_flashinfer_allreduce_fusion": True,
}
"""Arguments that the plugin needs. Compiled prefill graphs and the all-reduce fused with a norm would skip intermediate rounding."""
SYNC_PLUGIN = Path(__file__).parent / "sync"
"""Directory with the plugin that shortens weight syncs, found in the same way; for every engine."""
TURN_PLUGIN, TURN_VARIABLE = Path(__file__).parent / "turns", "FULIGO_TURN"
"""Directory with the plugin that makes engines wait for their GPUs, found in the same way, and the plugin's environment variable."""
SAMPLER_PLUGIN = Path(__file__).parent / "sampler"
"""Directory with the plugin that draws tokens in one pass over the logits, found in the same way; on GPUs."""
OWN_ARGUMENTS: dict[str, Any] = {"grammar_backend": "none", "skip_server_warmup": True, "log_level_http": "warning"}
"""Arguments of every engine: no grammars, no warm-up (the first rollout does it), and no log line per request."""


@dataclass(slots=True, frozen=True)
class ServerPorts:
    """Ports of one engine on its first node."""

    http: int
    distributed: int
    """First of `PORTS_PER_ENGINE` consecutive ports."""
    bootstrap: int
    """Port of a prefill engine's bootstrap server, where decode engines look up the addresses for the transfer of its KV cache."""

    @classmethod
    def claim(cls, claims: PortClaims) -> ServerPorts:
        """Claim the ports of one engine on this machine."""
        return cls(*(claims.claim(size) for size in PORT_SIZES))


@dataclass(slots=True, frozen=True)
class ServerSettings:
    """Settings of an engine, or of its part on one node. Implements `engines.backend.EngineSettings`."""

    name: str
    """Name in messages and logs: `engine 3`."""
    model_path: str
    tp_size: int
    pp_size: int
    arguments: Mapping[str, Any]
    """SGLang's arguments (`--sglang-*` with the group's overrides), with underscores in the names."""
    worker_type: Literal["regular", "prefill", "decode"]
    device: Literal["cpu", "cuda"]
    host: str
    """Address of the engine's first node: HTTP server and rendezvous."""
    ports: ServerPorts
    log_file: Path
    number: int | None = None
    """Index among the engines of the run; the engine labels its answers with it. None: no label."""
    gpu_ids: tuple[int, ...] = ()
    """Consecutive indices among the visible GPUs. The run's other GPUs stay visible, since NCCL needs to see the GPUs of its peers on this
    host."""
    num_nodes: int = 1
    node_rank: int = 0
    listens_at: tuple[str, int] | None = None
    """Host and port at which a part on another node answers /health; None: `host` and `ports.http`."""
    python: str = sys.executable
    """Python interpreter in whose environment SGLang is installed."""
    environment: Environment = field(default_factory=Environment)
    is_exact: bool = False
    """True to load the plugin in `EXACT_PLUGIN`."""
    turn: Path | None = None
    """File that exists once the engine may use its GPUs; None: it need not wait."""
    start_timeout_s: float = 600.0
    keys: EngineKeys = field(default_factory=EngineKeys.new)

    @property
    def url(self) -> str:
        return f"http://{endpoint(self.host, self.ports.http)}"

    def with_absolute_paths(self) -> ServerSettings:
        model = Path(self.model_path)  # or the name of a model on the Hub
        return replace(self, log_file=self.log_file.absolute(), model_path=str(model.absolute()) if model.exists() else self.model_path)

    def start_part(self, part: NodePart, claims: PortClaims) -> SGLangServer:
        return SGLangServer(
            replace(
                self,
                node_rank=part.number,
                gpu_ids=part.gpu_ids,
                listens_at=(part.host, claims.claim()) if part.number > 0 else None,
                log_file=part.log_file,
                environment=self.environment.merged(part.environment),
            )
        )

    async def answers(self, timeout_s: float) -> bool:
        """Return whether the engine's `/health` succeeds within `timeout_s` seconds."""
        client = EngineClient(self.url, retries=0)
        try:
            return await client.is_healthy(timeout_s)
        finally:
            await client.close()

    async def require_key(self) -> None:
        for keys, ask in ((NO_KEYS, EngineClient.model_info), (replace(self.keys, control=self.keys.requests), EngineClient.resume)):
            client = EngineClient(self.url, keys, retries=0)
            try:
                await ask(client)
            except EngineError:
                continue
            finally:
                await client.close()
            raise EngineError(
                f"cannot use {self.name} ({self.url}): it accepts requests without its key, so anyone could change its weights; "
                f"install the SGLang version that fuligo supports (engine log: {self.log_file})"
            )

    def command(self) -> list[str]:
        """Return the command that starts the engine."""
        host, port = self.listens_at or (self.host, self.ports.http)
        placed: dict[str, Any] = {
            "model_path": self.model_path,
            "host": host,
            "port": port,
            "nccl_port": self.ports.distributed + PORTS_PER_ENGINE - 1,
            "dist_init_addr": endpoint(self.host, self.ports.distributed),
            "nnodes": self.num_nodes,
            "node_rank": self.node_rank,
            "tp_size": self.tp_size,
            "pp_size": self.pp_size,
            "device": self.device,
        }
        if self.number is not None:
            placed["weight_version"] = str(WeightLabel(0, self.number))
            if (seed := self.arguments.get("random_seed")) is not None:
                placed["random_seed"] = seed + self.number  # with equal seeds, engines could draw the same samples of a prompt
        if self.gpu_ids:
            placed["base_gpu_id"] = self.gpu_ids[0]
        if self.worker_type != "regular":
            placed |= {"disaggregation_mode": self.worker_type, "disaggregation_bootstrap_port": self.ports.bootstrap}
        defaults = OWN_ARGUMENTS | (CPU_ARGUMENTS if self.device == "cpu" else {}) | (EXACT_ARGUMENTS if self.is_exact else {})
        return [self.python, "-c", self._program, *command_line("sglang", {**defaults, **self.arguments, **placed})]

    def full_environment(self) -> dict[str, str]:
        """Return the variables that the engine's processes get in addition to the driver's."""
        chosen = OWN_ENVIRONMENT | (CPU_ENVIRONMENT if self.device == "cpu" else {})
        if self.device == "cpu" and self.tp_size > 1:
            chosen["SGLANG_CPU_OMP_THREADS_BIND"] = "|".join(str(rank) for rank in range(self.tp_size))
        if self.device == "cuda" and "TORCHINDUCTOR_CACHE_DIR" not in os.environ:
            chosen["TORCHINDUCTOR_CACHE_DIR"] = str(kernel_cache())
        if self.device == "cuda":
            chosen[KERNELS_VARIABLE] = json.dumps(self._kernels())
        if is_loopback(self.host) and "GLOO_SOCKET_IFNAME" not in os.environ:
            use_loopback_interface(chosen)
        chosen[AHEAD_VARIABLE] = " ".join(self._processes())
        own = {**chosen, **self.environment.reveal(), **self.keys.environment}
        if self.turn is not None:
            own[TURN_VARIABLE] = str(self.turn)
        if chosen_plugins := own.get("SGLANG_PLUGINS", os.environ.get("SGLANG_PLUGINS")):  # SGLang loads no others
            own["SGLANG_PLUGINS"] = ",".join((chosen_plugins, *self._plugins.values()))
        return own

    @property
    def _plugins(self) -> dict[Path, str]:
        """Directories and names of the plugins that the engine loads."""
        drawn = {SAMPLER_PLUGIN: "fuligo_sampler"} if self.device == "cuda" else {}
        sampling = {EXACT_PLUGIN: "fuligo_exact"} if self.is_exact else drawn
        turns = {} if self.turn is None else {TURN_PLUGIN: "fuligo_turns"}
        return {SYNC_PLUGIN: "fuligo_sync"} | sampling | turns

    @property
    def _program(self) -> str:
        """Program that starts the engine.

        It adds the plugins to `sys.path`, which the engine's child processes inherit. An --engine-python that is a script may unset
        PYTHONPATH, and SGLang would start without the plugins and without a message.
        """
        return f"import sys\nsys.path[:0] = {[str(directory) for directory in self._plugins]}\n{LAUNCH}"

    def _kernels(self) -> dict[str, Any]:
        """Return the arguments of `fuligo_kernels.kernels`, with the model's path in place of its config."""
        of_attention = self.arguments.get("dp_size") or 1 if self.arguments.get("enable_dp_attention") else 1
        dtypes = {name: self.arguments.get(name) or "auto" for name in ("dtype", "kv_cache_dtype")}
        return {"model_path": self.model_path, "tp_size": self.tp_size // of_attention, **dtypes}

    def _processes(self) -> list[str]:
        """Return the modules of the processes that SGLang starts on this node; none if a controller starts the schedulers."""
        if self.arguments.get("dp_size") not in (None, 1):
            return []
        num_schedulers = self.tp_size * self.pp_size // self.num_nodes
        detokenizer = ["sglang.srt.managers.detokenizer_manager"] if self.node_rank == 0 else []
        return ["sglang.srt.managers.scheduler"] * num_schedulers + detokenizer


class SGLangServer(ServerProcess):
    """Engine, or part of one, on this machine. Implements `engines.backend.Server`."""

    is_lost = False

    def __init__(self, settings: ServerSettings) -> None:
        super().__init__(
            settings.name,
            settings.command(),
            log_file=settings.log_file,
            environment=settings.full_environment(),
            secrets=secrets_of(settings.arguments, settings.environment),
        )
        self.settings = settings
        self.url = settings.url

    async def wait_ready(self) -> None:
        await self.wait_until(self._has_turn, math.inf)
        await self.wait_until(lambda: self.answers(PROBE_TIMEOUT_S), self.settings.start_timeout_s)
        await self.settings.require_key()

    async def answers(self, timeout_s: float) -> bool:
        return await self.settings.answers(timeout_s)

    async def _has_turn(self) -> bool:
        return self.settings.turn is None or self.settings.turn.exists()
