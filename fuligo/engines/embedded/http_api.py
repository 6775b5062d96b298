"""HTTP API of the embedded engine: the subset of SGLang's API that RL needs, with the same names and schemas."""

import asyncio
import os
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from starlette.applications import Starlette
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from fuligo.engines.embedded.engine import EmbeddedEngine
from fuligo.engines.embedded.generate_body import answer, ended_while_connected, parse_requests
from fuligo.engines.embedded.openai_api import OpenAiApi
from fuligo.engines.embedded.request import Request
from fuligo.engines.openai_format import json_object, json_response
from fuligo.errors import EngineError, FuligoError
from fuligo.formats.payload import decode_named_tensors

Handler = Callable[[dict[str, Any]], Awaitable[Any]]


class Unsupported(Exception):
    """Raised for a call of an SGLang endpoint that the embedded engine does not implement; the text names the alternative."""


class Api:
    """Translation of HTTP requests into engine calls. The engine's thread calls `wake` with requests that have ended.

    Args:
        weight_directories: new weights may be loaded from these directories and those below them
    """

    def __init__(self, engine: EmbeddedEngine, weight_directories: Sequence[Path]) -> None:
        self._engine = engine
        self._weight_directories = [directory.resolve() for directory in weight_directories]

    def app(self) -> ASGIApp:
        """Return the application. `/generate` bypasses Starlette's routing and middleware, which cost more than the call itself."""
        others = self._others()

        async def route(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["type"] == "http" and scope["path"] == "/generate" and scope["method"] == "POST":
                response = await self.generate(HttpRequest(scope, receive))
                await response(scope, receive, send)
            else:
                await others(scope, receive, send)

        return route

    def _others(self) -> Starlette:
        engine = self._engine
        reads: dict[str, Handler] = {
            "/model_info": self.model_info,
            "/get_model_info": self.model_info,
            "/server_info": self.server_info,
            "/get_server_info": self.server_info,
            "/v1/loads": self.loads,
        }
        writes: dict[str, Handler] = {
            "/abort_request": self.abort,
            "/pause_generation": self.pause,
            "/continue_generation": lambda _: _done(engine.resume(), message="Generation continued successfully.", status="ok"),
            "/flush_cache": lambda _: _done(engine.flush_cache(), message="Cache flushed.", success=True),
            "/update_weights_from_disk": self.update_from_disk,
            "/update_weights_from_tensor": self.update_from_tensor,
            "/weights_checker": self.check_weights,
            "/release_memory_occupation": lambda _: _done(engine.release_memory()),
            "/resume_memory_occupation": lambda _: _done(engine.resume_memory()),
            "/init_weights_update_group": self.no_process_group,
            "/update_weights_from_distributed": self.no_process_group,
            "/destroy_weights_update_group": self.no_process_group,
        }
        openai = OpenAiApi(engine)
        return Starlette(
            routes=[
                *(Route(path, self.health, methods=["GET"]) for path in ("/health", "/health_generate")),
                Route("/v1/models", openai.models, methods=["GET"]),
                Route("/v1/chat/completions", partial(openai.complete, is_chat=True), methods=["POST"]),
                Route("/v1/completions", partial(openai.complete, is_chat=False), methods=["POST"]),
                *(Route(path, _endpoint(handler), methods=["GET"]) for path, handler in reads.items()),
                *(Route(path, _endpoint(handler), methods=["POST"]) for path, handler in writes.items()),
            ]
        )

    async def generate(self, http: HttpRequest) -> Response:
        """Answer `/generate`; abort its requests if the client disconnects."""
        loop, model = asyncio.get_running_loop(), self._engine.model
        requests: list[Request] = []
        try:
            body = await http.body()
            if b'"image_data"' in body:  # decoding images would block the event loop
                requests, is_batch = await asyncio.to_thread(parse_requests, body, model, loop.create_future)
            else:
                requests, is_batch = parse_requests(body, model, loop.create_future)
            for request in requests:
                self._engine.submit(request)
        except (ValueError, EngineError) as error:
            self._engine.abort(requests.__contains__)
            return error_response(400, str(error))
        if not await ended_while_connected(http, requests, self._engine):
            return Response(status_code=499)
        if errors := [request.error for request in requests if request.error]:
            return error_response(500, errors[0])
        answers = [answer(request, model) for request in requests]
        return json_response(answers if is_batch else answers[0])

    async def health(self, _: HttpRequest) -> Response:
        failure = self._engine.failure
        return json_response({}) if failure is None else error_response(503, f"the engine has failed: {failure!r}")

    async def model_info(self, _: dict[str, Any]) -> Any:
        path, weights = self._engine.model.path, self._engine.weights
        return {
            "model_path": path,
            "tokenizer_path": path,
            "is_generation": True,
            "weight_version": str(weights.version),
            "num_weight_loads": weights.num_loads,
            "adapter_digest": weights.adapter_digest,
        }

    async def server_info(self, body: dict[str, Any]) -> Any:
        engine = self._engine
        return {
            **await self.model_info(body),
            "served_by": "fuligo",
            "device": str(engine.model.device),
            "dtype": str(engine.model.dtype).removeprefix("torch."),
            "tp_size": 1,
            "dp_size": 1,
            "context_length": engine.model.context_length,
            "max_running_requests": engine.max_running_requests,
            "max_total_num_tokens": engine.max_total_tokens,
            "internal_states": (await self.loads(body))["loads"],
        }

    async def loads(self, _: dict[str, Any]) -> Any:
        engine = self._engine
        running, waiting = engine.num_running, engine.num_waiting
        load = {
            "dp_rank": 0,
            "num_running_reqs": running,
            "num_waiting_reqs": waiting,
            "num_total_reqs": running + waiting,
            "num_used_tokens": engine.reserved_tokens,
            "max_total_num_tokens": engine.max_total_tokens,
            "token_usage": engine.reserved_tokens / engine.max_total_tokens,
            "max_running_requests": engine.max_running_requests,
            "num_arrived_reqs": engine.num_arrived,
        }
        return {"dp_rank_count": 1, "loads": [load]}

    async def abort(self, body: dict[str, Any]) -> Any:
        """Abort the request `rid`, or all with `abort_all`."""
        rid, everything = body.get("rid"), bool(body.get("abort_all"))
        if not rid and not everything:
            raise ValueError("neither rid nor abort_all is given; use rid, or abort_all=true")
        await _done(self._engine.abort(lambda request: everything or request.rid == rid))

    async def pause(self, body: dict[str, Any]) -> Any:
        mode = body.get("mode", "abort")
        if mode not in ("abort", "retract", "in_place"):
            raise ValueError(f"mode is {mode!r}; it must be abort, retract or in_place")
        return await _done(self._engine.pause(mode), message="Generation paused successfully.", status="ok")

    async def update_from_disk(self, body: dict[str, Any]) -> Any:
        path = body.get("model_path")
        if not isinstance(path, str) or not path:
            raise ValueError("model_path must name a directory")
        directory = self._allowed(path)
        await self._update(body, lambda: str(directory))
        return {"success": True, "message": "Succeeded to update model weights.", "num_paused_requests": 0}

    def _allowed(self, path: str) -> Path:
        """Return the directory of new weights, with links resolved. Raises EngineError if weights may not be loaded from it."""
        directory = Path(path).resolve()
        if not any(directory.is_relative_to(allowed) for allowed in self._weight_directories):
            allowed = ", ".join(map(str, self._weight_directories))
            raise EngineError(f"cannot load weights from {path}: it is not below {allowed}; start the engine with --weights-from DIR")
        if not directory.is_dir():
            raise EngineError(f"cannot load weights from {path}: it is not a directory on the engine's machine; copy the weights there")
        if directory.stat().st_uid not in (os.getuid(), 0):
            raise EngineError(f"cannot load weights from {path}: it belongs to another user; copy it to a directory of your own")
        return directory

    async def update_from_tensor(self, body: dict[str, Any]) -> Any:
        payloads = body.get("serialized_named_tensors")
        if not isinstance(payloads, list) or len(payloads) != 1 or not isinstance(payloads[0], str):
            raise ValueError("serialized_named_tensors must hold one base64 string: the embedded engine is one rank")
        await self._update(body, lambda: decode_named_tensors(payloads[0]))
        return {"success": True, "message": "Success"}

    async def _update(self, body: dict[str, Any], load: Callable[[], Any]) -> None:
        if body.get("load_format") not in (None, "auto"):
            raise ValueError(f"load_format {body['load_format']!r} is not supported; omit it")
        version = body.get("weight_version")
        if version is not None and not str(version).isdecimal():
            raise ValueError(f"weight_version is {version!r}; it must be a number")
        await _done(
            self._engine.update_weights(
                None if version is None else int(version),
                load,
                flush=bool(body.get("flush_cache", True)),
                abort_all=bool(body.get("abort_all_requests", False)),
            )
        )

    async def check_weights(self, body: dict[str, Any]) -> Any:
        if body.get("action") != "checksum":
            raise ValueError(f"action is {body.get('action')!r}; the embedded engine supports checksum only")
        digest = await asyncio.wrap_future(self._engine.checksum())
        return {"success": True, "message": "", **digest._asdict()}

    async def no_process_group(self, _: dict[str, Any]) -> NoReturn:
        raise Unsupported(
            "the embedded engine cannot join a process group; send weights by /update_weights_from_tensor or /update_weights_from_disk"
        )


def wake(requests: Sequence[Request]) -> None:
    """Notify the event loop, from the engine's thread, that `requests` have ended."""

    def wake_all() -> None:
        for request in requests:
            if not request.waiter.done():  # canceled if the client disconnected
                request.waiter.set_result(None)

    requests[0].waiter.get_loop().call_soon_threadsafe(wake_all)


def _endpoint(handler: Handler) -> Callable[[HttpRequest], Awaitable[Response]]:
    async def endpoint(http: HttpRequest) -> Response:
        try:
            raw = await http.body()
            return json_response(await handler(json_object(raw) if raw else {}))
        except Unsupported as error:
            return error_response(501, str(error))
        except (ValueError, FuligoError) as error:
            return error_response(400, str(error))

    return endpoint


async def _done(command: Future[Any], **answer: Any) -> dict[str, Any] | None:
    """Return the answer once the engine has run the command."""
    await asyncio.wrap_future(command)
    return answer or None


def error_response(status: int, message: str) -> Response:
    """Return an error in the format of SGLang's API."""
    return json_response({"success": False, "error": {"message": message}}, status)
