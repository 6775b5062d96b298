"""HTTP endpoints of the server. All are read-only; runs are selected by name, never by path."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Annotated, Any

import orjson
from fastapi import FastAPI, HTTPException, Query
from fastapi.responses import FileResponse, HTMLResponse, Response
from pydantic import Field
from starlette.middleware.gzip import GZipMiddleware

from fuligo.observability.viewer import answers
from fuligo.observability.viewer.access import Access
from fuligo.observability.viewer.front import page
from fuligo.observability.viewer.run import RunReader, Watcher
from fuligo.observability.viewer.run_files import SampleSet, inside
from fuligo.observability.viewer.sample_query import Order, SampleFilter

MAX_LIMIT = 200


class SampleQuery(SampleFilter):
    """Parameters of `/api/samples`."""

    run: str
    of: SampleSet = "train"
    order: Order = "newest"
    offset: int = Field(0, ge=0)
    limit: int = Field(50, ge=0, le=MAX_LIMIT)


def make_app(runs: Sequence[RunReader], *, token: str, cookie: str = "fuligo_view", watcher: Watcher | None = None) -> FastAPI:
    """Return the application that serves the page and its data.

    Args:
        runs: runs with different names.
        token: required of every visitor.
        cookie: name of the cookie that keeps the token in the browser.
        watcher: woken by every request.
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

    @app.get("/api/history")
    def history(run: str, prompt: int, of: SampleSet = "train") -> Response:
        return _json(answers.history_answer(chosen(run), prompt, of))

    @app.get("/api/sample")
    def sample(run: str, step: int, row: int, of: SampleSet = "train") -> Response:
        where = f"of step {step}" if of == "train" else f"of the evaluation after {step} rollouts"
        return _json(answers.sample_answer(chosen(run), step, row, of), f"run {run} has no row {row} in the samples {where}")

    _add_steps(app, chosen)

    @app.get("/api/samples")
    def samples(query: Annotated[SampleQuery, Query()]) -> Response:
        return _json(answers.samples_answer(chosen(query.run), query, query.order, query.offset, query.limit, query.of))

    app.add_middleware(GZipMiddleware, minimum_size=1024, compresslevel=4)
    app.add_middleware(Access, token=token, cookie=cookie)
    return app


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
        if not inside(reader.path, file):
            raise HTTPException(404, f"run {run} has no trace.json")
        return FileResponse(file, media_type="application/json", filename=f"{Path(reader.name).name}-trace.json")


def _json(answer: dict[str, Any] | None, missing: str = "") -> Response:
    if answer is None:
        raise HTTPException(404, missing)
    return Response(orjson.dumps(answer, option=orjson.OPT_SERIALIZE_NUMPY), media_type="application/json")
