"""`fuligo serve`: the embedded engine's model, compute thread, HTTP server, and access control by the run's keys."""

import asyncio
import gc
import json
import logging
import signal
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
import uvloop
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send
from transformers.utils.logging import disable_progress_bar

from fuligo.engines.embedded.engine import EmbeddedEngine, EngineThread
from fuligo.engines.embedded.http_api import Api, error_response, wake
from fuligo.engines.embedded.kv_cache import length_class
from fuligo.engines.embedded.launch import EmbeddedEngineSettings, run_path
from fuligo.engines.embedded.model import DTYPES, EngineModel
from fuligo.engines.host import endpoint
from fuligo.engines.http_access import QuietServer, Strangers, admit, is_foreign, own_names, renew
from fuligo.errors import ConfigError
from fuligo.formats.disk import replace_text
from fuligo.formats.engine_keys import EngineKeys
from fuligo.formats.private import scratch_root
from fuligo.limits import available_memory_bytes, num_cores, raise_open_files
from fuligo.models.adapter import SharedBase

logger = logging.getLogger(__name__)
GIL_SWITCH_S = 2e-4
"""Switch interval of the GIL, which the compute thread takes once per operation; at Python's 5 ms a busy event loop would stall it."""
SHUTDOWN_S = 5
MEMORY_SHARE = {"cpu": 0.5, "cuda": 0.4}
"""Fraction of the free memory that running requests may use; the rest covers unused rows of pools that requests have outgrown."""


def serve(settings: EmbeddedEngineSettings, listener: socket.socket) -> int:
    """Serve on `listener` until SIGTERM or SIGINT; return the exit code: 0, or 1 if an engine failed."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    disable_progress_bar()
    sys.setswitchinterval(GIL_SWITCH_S)
    raise_open_files()
    usable = min(torch.get_num_threads(), num_cores())
    torch.set_num_threads(settings.num_threads or max(1, usable - 1))  # the server's event loop needs a core
    # cuDNN's attention builds a plan for every new shape, and every decode step has new shapes.
    torch.backends.cuda.enable_cudnn_sdp(False)
    models = _load(settings)
    gc.freeze()  # keeps modules and models, which live as long as the process, out of full collections of 0.1 s each
    return uvloop.run(_serve(settings, models, listener))


async def _serve(settings: EmbeddedEngineSettings, models: Sequence[EngineModel], listener: socket.socket) -> int:
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    max_running, thread = settings.max_running_requests, EngineThread()
    max_total_tokens = settings.max_total_tokens or affordable_tokens(models[0], max_running, num_engines=len(models))

    def after_failure() -> None:
        """Stop serving once all engines have failed: the failure of one run's engine does not end the others."""
        if all(engine.failure is not None for engine in engines):
            stop.set()

    engines = [
        EmbeddedEngine(
            model,
            max_running_requests=max_running,
            max_total_tokens=max_total_tokens,
            on_ended=wake,
            on_failure=lambda: loop.call_soon_threadsafe(after_failure),
            thread=thread,
        )
        for model in models
    ]
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # SIGINT stays ignored in background jobs
        loop.add_signal_handler(signal.SIGINT, stop.set)
    server = await QuietServer.start(_application(settings, engines), listener, Strangers(), shutdown_s=SHUTDOWN_S)
    thread.start()
    host, port = listener.getsockname()[:2]
    if settings.ready_file is not None:
        replace_text(settings.ready_file, json.dumps({"port": port}))
    logger.info("serving %s on http://%s", settings.model_path, endpoint(host, port))
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait((server.serving, stopping), return_when=asyncio.FIRST_COMPLETED)
    for engine in engines:
        if engine.failure is None:
            await asyncio.wrap_future(engine.pause("abort"))  # requests in flight are answered with their tokens so far
    await server.stop()
    thread.stop()
    return 1 if any(engine.failure is not None for engine in engines) else 0


def _application(settings: EmbeddedEngineSettings, engines: Sequence[EmbeddedEngine]) -> ASGIApp:
    """Return the application of one engine at the root, or of the engines of several runs, each below its path."""
    allowed = (Path(settings.model_path), scratch_root(), *settings.weight_directories)
    applications = [protected(Api(engine, allowed).app(), settings.keys, settings.host) for engine in engines]
    if not settings.shapes_of_runs:
        return applications[0]
    paths = dict(zip(map(run_path, settings.shapes_of_runs), applications, strict=True))

    async def route(scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        for prefix, application in paths.items():
            if scope["path"].startswith(f"{prefix}/"):
                await application({**scope, "path": scope["path"].removeprefix(prefix), "raw_path": None}, receive, send)
                return
        await error_response(404, "no run is served at this path; use the path of a run, such as /runs/0")(scope, receive, send)

    return route


def _load(settings: EmbeddedEngineSettings) -> list[EngineModel]:
    """Load the model, or one model per run with shared base weights if several runs share the process."""
    if settings.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch finds no CUDA device; use --device cpu")
    device = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if settings.device == "auto" else settings.device)
    dtype = ("bf16" if device.type == "cuda" else "fp32") if settings.dtype == "auto" else settings.dtype
    trusts = settings.trust_remote_code
    base = SharedBase() if settings.shapes_of_runs else None
    return [
        EngineModel(
            settings.model_path,
            device,
            DTYPES[dtype],
            trusts_tokenizer=trusts,
            adapter=adapter,
            is_batch_invariant=settings.is_batch_invariant,
            base=base,
        )
        for adapter in (settings.shapes_of_runs.values() or [settings.adapter])
    ]


def affordable_tokens(model: EngineModel, max_running_requests: int, *, num_engines: int = 1) -> int:
    """Return the number of KV cache tokens for `max_running_requests` of full length, limited to a fraction of the free memory.

    `num_engines`: number of engines that share the memory, each with a cache of this size. Raises ConfigError if not even the shortest
    request fits.
    """
    device = model.device.type
    free_bytes = torch.cuda.mem_get_info(model.device)[0] if device == "cuda" else available_memory_bytes()
    fitting = int(MEMORY_SHARE[device] * free_bytes) // (num_engines * model.cache_shape.bytes_per_token(model.dtype))
    if fitting < length_class(1):
        raise ConfigError(
            f"cannot allocate a KV cache: {free_bytes / 2**20:.0f} MiB of free memory is not enough; free more, or set --max-total-tokens "
            "(in fuligo train: --embedded-max-total-tokens)"
        )
    return min(fitting, max_running_requests * length_class(model.context_length))


def protected(app: ASGIApp, keys: EngineKeys, host: str) -> ASGIApp:
    """Return the application, which listens on `host`, with access control; requests are refused before their body is read."""
    names = own_names(host)

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        refusal = _refusal(scope, keys, names) if scope["type"] == "http" else None
        if refusal is None:
            has_key = keys.knows(Headers(scope=scope).get("authorization", ""))
            (admit if has_key else renew)(scope)
        await (refusal or app)(scope, receive, send)

    return guarded


def _refusal(scope: Scope, keys: EngineKeys, names: frozenset[str]) -> Response | None:
    headers, method, path = Headers(scope=scope), scope["method"], scope["path"]
    name = headers.get("host", "")
    if is_foreign(name, names):  # a web page's host name that resolves to this machine (DNS rebinding)
        return error_response(403, f"this engine is not reachable as {name!r}; use the machine's own name or its address")
    if not keys.admits(method, path, headers.get("authorization", "")):
        return error_response(401, "the key is missing or wrong; send it in the header Authorization: Bearer KEY")
    if method == "POST" and headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        return error_response(415, "the content type must be application/json")
    return None
