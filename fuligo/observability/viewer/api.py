"""Server of the page: read-only endpoints and their access control. Runs are selected by name, never by path."""

import hmac
import socket
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any
from urllib.parse import urlencode

import orjson
import uvicorn
from fastapi import FastAPI, HTTPException, Query
from fastapi.responses import FileResponse, HTMLResponse, PlainTextResponse, RedirectResponse, Response
from pydantic import Field
from starlette.middleware.gzip import GZipMiddleware
from starlette.requests import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from fuligo.observability.viewer import answers
from fuligo.observability.viewer.front import page
from fuligo.observability.viewer.run import RunReader, Watcher
from fuligo.observability.viewer.run_files import SampleSet, is_readable
from fuligo.observability.viewer.sample_query import Order, SampleFilter
from fuligo.observability.viewer.sample_rows import PromptOrder
from fuligo.quantities import count

_HEADERS = ((b"x-content-type-options", b"nosniff"), (b"referrer-policy", b"no-referrer"), (b"cache-control", b"no-store"))


class Access:
    """Middleware that rejects requests without the token, which moves from the address (`?token=`) to a cookie.

    A server on loopback also needs it: other users of the machine can connect, and so can foreign web pages in a browser of this machine,
    through a host name that resolves to 127.0.0.1 (DNS rebinding). The browser does not send the cookie for such a name.
    """

    def __init__(self, app: ASGIApp, token: str, cookie: str) -> None:
        self._app = app
        self._token = token
        self._cookie = cookie

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        if (refusal := self._refusal(scope)) is not None:
            await refusal(scope, receive, send)
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *_HEADERS]
            await send(message)

        await self._app(scope, receive, with_headers)

    def _refusal(self, scope: Scope) -> Response | None:
        request = Request(scope)
        if request.method not in ("GET", "HEAD"):
            return PlainTextResponse("this server is read-only", 405)
        given = request.query_params.get("token")
        if given is not None and self._fits(given):
            rest = urlencode([(name, value) for name, value in request.query_params.multi_items() if name != "token"])
            path = "/" + scope["path"].lstrip("/")  # a browser would take `//name` for another host
            answer = RedirectResponse(path + (f"?{rest}" if rest else ""), 303)
            answer.set_cookie(self._cookie, given, httponly=True, samesite="strict")
            return answer
        header = request.headers.get("authorization", "").removeprefix("Bearer ")
        if self._fits(header) or self._fits(request.cookies.get(self._cookie, "")):
            return None
        return PlainTextResponse("token missing or wrong; open the address that fuligo view printed, which ends with the token", 401)

    def _fits(self, given: str) -> bool:
        return hmac.compare_digest(given.encode(), self._token.encode())


MAX_LIMIT = 200
"""Maximum number of rows of a list in one answer."""


class SampleQuery(SampleFilter):
    """Parameters of `/api/samples`."""

    run: str
    of: SampleSet = "train"
    order: Order = "newest"
    offset: int = Field(0, ge=0)
    limit: int = Field(50, ge=0, le=MAX_LIMIT)


def make_app(runs: Sequence[RunReader], *, token: str, cookie: str = "fuligo_view", watcher: Watcher | None = None) -> FastAPI:
    """Return the application that serves the page and the data of runs with different names; every request for data wakes the `watcher`.

    `token` is required of every visitor; `cookie` is the name of the cookie that keeps it in the browser.
    """
    app = FastAPI(title="fuligo view", docs_url=None, redoc_url=None, openapi_url=None)
    by_name = {run.name: run for run in runs}
    text = page(f"{runs[0].name if len(runs) == 1 else f'{len(runs)} runs'}: fuligo view")

    def chosen(name: str) -> RunReader:
        if watcher is not None:
            watcher.wake()
        if name not in by_name:
            raise HTTPException(404, f"there is no run {name!r} on this server")
        return by_name[name]

    @app.get("/")
    def front_page() -> HTMLResponse:
        return HTMLResponse(text)

    @app.get("/api/runs")
    def list_runs() -> Response:
        return _json({"runs": [answers.run_answer(chosen(name)) for name in by_name]})

    @app.get("/api/metrics")
    def metrics(run: str, keys: str = "", after: Annotated[int, Query(ge=0)] = 0, generation: int = -1) -> Response:
        return _json(answers.metrics_answer(chosen(run), [key for key in keys.split(",") if key], after, generation))

    @app.get("/api/differences")
    def config_differences(run: Annotated[list[str], Query()]) -> Response:
        return _json(answers.differences_answer([chosen(name) for name in run]))

    @app.get("/api/settings")
    def settings(run: str) -> Response:
        return _json(answers.settings_answer(chosen(run)))

    @app.get("/api/sample")
    def sample(run: str, step: int, row: int, of: SampleSet = "train") -> Response:
        where = f"of step {step}" if of == "train" else f"of the evaluation after {count(step, 'rollout')}"
        return _json(answers.sample_answer(chosen(run), step, row, of), f"run {run} has no row {row} in the samples {where}")

    _add_prompts(app, runs, chosen)
    _add_steps(app, chosen)

    @app.get("/api/samples")
    def samples(query: Annotated[SampleQuery, Query()]) -> Response:
        return _json(answers.samples_answer(chosen(query.run), query, query.order, query.offset, query.limit, query.of))

    app.add_middleware(GZipMiddleware, minimum_size=1024, compresslevel=4)
    app.add_middleware(Access, token=token, cookie=cookie)
    return app


def _add_prompts(app: FastAPI, runs: Sequence[RunReader], chosen: Callable[[str], RunReader]) -> None:
    @app.get("/api/history")
    def history(run: str, prompt: int, of: SampleSet = "train", dataset: str | None = None) -> Response:
        return _json(answers.history_answer(chosen(run), prompt, of, dataset))

    @app.get("/api/prompts")
    def prompts(
        run: str,
        order: PromptOrder = "pass_rate",
        offset: Annotated[int, Query(ge=0)] = 0,
        limit: Annotated[int, Query(ge=0, le=MAX_LIMIT)] = 50,
        of: SampleSet = "train",
        dataset: str | None = None,
    ) -> Response:
        return _json(answers.prompts_answer(chosen(run), order, offset, limit, of, dataset))

    @app.get("/api/others")
    def others(run: str, prompt: int, step: int, of: SampleSet = "train", dataset: str | None = None) -> Response:
        return _json(answers.others_answer(runs, chosen(run), prompt, step, of, dataset))


def _add_steps(app: FastAPI, chosen: Callable[[str], RunReader]) -> None:
    @app.get("/api/steps")
    def steps(run: str) -> Response:
        return _json(answers.steps_answer(chosen(run)))

    @app.get("/api/step")
    def one_step(run: str, step: int) -> Response:
        return _json(answers.step_answer(chosen(run), step), f"run {run} has recorded no step {step}")

    @app.get("/api/health")
    def health(run: str) -> Response:
        return _json(answers.health_answer(chosen(run)))

    @app.get("/api/trace.json")
    def trace(run: str) -> Response:
        reader = chosen(run)
        file = reader.path / "trace.json"
        if not is_readable(reader.path, file):
            raise HTTPException(404, f"run {run} has no trace.json")
        return FileResponse(file, media_type="application/json", filename=f"{Path(reader.name).name}-trace.json")


def _json(answer: dict[str, Any] | None, missing: str = "") -> Response:
    if answer is None:
        raise HTTPException(404, missing)
    return Response(orjson.dumps(answer, option=orjson.OPT_SERIALIZE_NUMPY), media_type="application/json")


SHUTDOWN_S = 1


def address(host: str, port: int, token: str) -> str:
    """Return the address to open in a browser, which ends with the token."""
    name = {"0.0.0.0": socket.gethostname(), "::": socket.gethostname()}.get(host, host)
    shown = f"[{name}]" if ":" in name else name
    return f"http://{shown}:{port}/?{urlencode({'token': token})}"


def serve(runs: Sequence[RunReader], listener: socket.socket, token: str) -> None:
    """Serve until SIGINT or SIGTERM."""
    watcher = Watcher(runs)
    app = make_app(runs, token=token, cookie=f"fuligo_view_{listener.getsockname()[1]}", watcher=watcher)
    config = uvicorn.Config(
        app,
        log_level="warning",
        access_log=False,
        lifespan="off",
        proxy_headers=False,
        server_header=False,
        timeout_graceful_shutdown=SHUTDOWN_S,
    )
    watcher.start()
    uvicorn.Server(config).run(sockets=[listener])
