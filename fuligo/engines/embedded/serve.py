"""`fuligo serve`: the embedded engine's model, compute thread and HTTP server, and access to it by the run's keys."""

import asyncio
import gc
import json
import logging
import signal
import socket
import sys
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Literal

import orjson
import torch
import transformers
import uvicorn
import uvloop
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from fuligo.engines.embedded.engine import EmbeddedEngine
from fuligo.engines.embedded.http_api import Api, wake
from fuligo.engines.embedded.kv_cache import length_class
from fuligo.engines.embedded.model import DTYPES, AdapterSource, EngineModel
from fuligo.engines.host import LOOPBACK, endpoint
from fuligo.engines.http_access import QuietServer, is_foreign, own_names
from fuligo.engines.stranger_connections import Connection, Strangers, admit, renew
from fuligo.errors import ConfigError
from fuligo.formats.engine_keys import EngineKeys
from fuligo.formats.scratch import scratch_root
from fuligo.limits import available_memory_bytes, num_cores, raise_open_files

logger = logging.getLogger(__name__)
GIL_SWITCH_S = 2e-4
"""The compute thread takes the GIL once per operation; at Python's 5 ms a busy event loop would stall it for whole steps."""
KEEP_ALIVE_S = 600
SHUTDOWN_S = 5
MEMORY_SHARE = {"cpu": 0.5, "cuda": 0.4}
"""Fraction of the free memory that running requests may use; the rest covers the space that rows leave behind in shorter pools."""


@dataclass(slots=True, frozen=True)
class ServeSettings:
    """Settings of the engine's process."""

    model_path: str
    device: Literal["auto", "cpu", "cuda"] = "auto"
    dtype: Literal["auto", "fp32", "bf16"] = "auto"
    max_running_requests: int = 256
    max_total_tokens: int | None = None
    num_threads: int | None = None
    trust_remote_code: bool = False
    adapter: AdapterSource | None = None
    is_batch_invariant: bool = False
    ready_file: Path | None = None
    host: str = LOOPBACK
    """Name or address that it listens on, for its access control."""
    weight_directories: tuple[Path, ...] = ()
    """Directories, besides the model's and the machine's scratch, from which new weights may be loaded."""
    keys: EngineKeys = field(default_factory=EngineKeys.new)


def serve(settings: ServeSettings, listener: socket.socket) -> int:
    """Serve on `listener` until SIGTERM or SIGINT; return the exit code, 1 after a failure of the engine."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s", stream=sys.stderr)
    transformers.utils.logging.disable_progress_bar()
    sys.setswitchinterval(GIL_SWITCH_S)
    raise_open_files()
    usable = min(torch.get_num_threads(), num_cores())
    torch.set_num_threads(settings.num_threads or max(1, usable - 1))  # the server's event loop needs a core
    # cuDNN's attention builds a plan for every new shape, and every decoding step has new shapes.
    torch.backends.cuda.enable_cudnn_sdp(False)
    model = _load(settings)
    gc.freeze()  # keeps modules and model, which live as long as the process, out of full collections of 0.1 s each
    return uvloop.run(_serve(settings, model, listener))


async def _serve(settings: ServeSettings, model: EngineModel, listener: socket.socket) -> int:
    loop = asyncio.get_running_loop()
    stop = asyncio.Event()
    engine = EmbeddedEngine(
        model,
        max_running_requests=settings.max_running_requests,
        max_total_tokens=settings.max_total_tokens or affordable_tokens(model, settings.max_running_requests),
        on_ended=wake,
        on_failure=lambda: loop.call_soon_threadsafe(stop.set),
    )
    loop.add_signal_handler(signal.SIGTERM, stop.set)
    if signal.getsignal(signal.SIGINT) is not signal.SIG_IGN:  # a background job stays one that Ctrl-C does not end
        loop.add_signal_handler(signal.SIGINT, stop.set)
    allowed = (Path(settings.model_path), scratch_root(), *settings.weight_directories)
    config = uvicorn.Config(
        protected(Api(engine, allowed).app(), settings.keys, settings.host),
        loop="none",
        http=partial(Connection, Strangers()),  # pyright: ignore[reportArgumentType] - called like a class
        lifespan="off",
        log_level="warning",
        access_log=False,
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=SHUTDOWN_S,
    )
    server = QuietServer(config)
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    serving.add_done_callback(lambda _: server.listening.set())  # do not wait for a server that cannot start
    await server.listening.wait()
    if serving.done():
        await serving
    engine.start()
    host, port = listener.getsockname()[:2]
    if settings.ready_file is not None:
        _write_whole(settings.ready_file, json.dumps({"port": port}))
    logger.info("serving %s on http://%s", settings.model_path, endpoint(host, port))
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait((serving, stopping), return_when=asyncio.FIRST_COMPLETED)
    if engine.failure is None:
        await asyncio.wrap_future(engine.pause("abort"))  # requests in flight are answered with their tokens so far
    server.should_exit = True
    await serving
    engine.stop()
    return 0 if engine.failure is None else 1


def _load(settings: ServeSettings) -> EngineModel:
    if settings.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: torch finds no CUDA device; use --device cpu")
    device = torch.device(("cuda" if torch.cuda.is_available() else "cpu") if settings.device == "auto" else settings.device)
    dtype = ("bf16" if device.type == "cuda" else "fp32") if settings.dtype == "auto" else settings.dtype
    trusts = settings.trust_remote_code
    return EngineModel(
        settings.model_path,
        device,
        DTYPES[dtype],
        trusts_tokenizer=trusts,
        adapter=settings.adapter,
        is_batch_invariant=settings.is_batch_invariant,
    )


def affordable_tokens(model: EngineModel, max_running_requests: int) -> int:
    """Return the tokens of KV cache that the longest requests need, limited to a fraction of the free memory.

    Raises:
        ConfigError: not even the shortest request fits
    """
    device = model.device.type
    free_bytes = torch.cuda.mem_get_info(model.device)[0] if device == "cuda" else available_memory_bytes()
    fitting = int(MEMORY_SHARE[device] * free_bytes) // model.cache_shape.bytes_per_token(model.dtype)
    if fitting < length_class(1):
        raise ConfigError(
            f"{free_bytes / 2**20:.0f} MiB of free memory are not enough for a KV cache; free some, or set --max-total-tokens"
        )
    return min(fitting, max_running_requests * length_class(model.context_length))


def _write_whole(path: Path, text: str) -> None:
    """Write a file atomically."""
    unfinished = path.with_name(path.name + ".tmp")
    unfinished.write_text(text)
    unfinished.rename(path)


def protected(app: ASGIApp, keys: EngineKeys, host: str) -> ASGIApp:
    """Return the application behind its access control. Requests are refused before their body is read.

    Args:
        host: name or address that the server was told to listen on
    """
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
    if is_foreign(name, names):  # a page's own name that resolves to this machine (DNS rebinding)
        return _refused(403, f"this engine is not reachable as {name!r}; use the machine's own name or its address")
    if not keys.admits(method, path, headers.get("authorization", "")):
        return _refused(401, "the key is missing or wrong; send it in the header Authorization: Bearer KEY")
    if method == "POST" and headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        return _refused(415, "the content type must be application/json")
    return None


def _refused(status: int, message: str) -> Response:
    return Response(orjson.dumps({"success": False, "error": {"message": message}}), status, media_type="application/json")
