"""Remote reward models over real sockets: retries, deadline, invalid replies."""

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from fuligo.config.groups import RewardFlags
from fuligo.rollout.rewards import RewardRunner
from fuligo.types import SampleGroup, SampleStatus

MakeGroup = Callable[..., SampleGroup]
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


@pytest.fixture
async def serve() -> AsyncIterator[Callable[[Handler], Awaitable[str]]]:
    servers: list[TestServer] = []

    async def start(handler: Handler) -> str:
        app = web.Application()
        app.router.add_post("/judge", handler)
        servers.append(TestServer(app))
        await servers[-1].start_server()
        return str(servers[-1].make_url("/judge"))

    yield start
    for server in servers:
        await server.close()


async def judge(url: str, group: SampleGroup, rm_type: str = "remote_rm", **settings: Any) -> RewardRunner:
    async with RewardRunner(RewardFlags(rm_type=rm_type, rm_url=url, **settings)) as runner:
        await runner(group)
    return runner


async def test_the_model_sees_prompt_response_and_label(make_group: MakeGroup, serve: Any) -> None:
    seen: list[dict[str, Any]] = []

    async def handler(request: web.Request) -> web.Response:
        seen.append(await request.json())
        return web.json_response(0.25 if len(seen) == 1 else {"score": 2, "why": "long"})

    url = await serve(handler)
    group = make_group("a \\boxed{b}", label=["b"])
    await judge(url, group)
    assert group.samples[0].reward == 0.25
    group = make_group("a \\boxed{b}", label=["b"])
    await judge(url, group, "boxed_remote_rm", reward_key="score")
    assert group.samples[0].reward == {"score": 2.0, "why": "long"}
    assert seen == [{"prompt": "what is it?", "response": response, "label": ["b"]} for response in ("a \\boxed{b}", "b")]


async def test_a_transient_failure_is_retried(make_group: MakeGroup, serve: Any) -> None:
    tries = 0

    async def handler(request: web.Request) -> web.Response:
        nonlocal tries
        tries += 1
        if tries == 1:
            assert request.transport is not None
            request.transport.close()
        return web.json_response(1.0) if tries == 3 else web.Response(status=503)

    group = make_group("a")
    await judge(await serve(handler), group, rm_retries=2)
    assert (group.samples[0].reward, tries) == (1.0, 3)


@pytest.mark.parametrize(
    ("answer", "tries", "text"),
    [
        (lambda: web.Response(status=500), 2, "500"),
        (lambda: web.Response(status=404), 1, "404"),
        (lambda: web.Response(text="very good"), 1, "invalid JSON"),
        (lambda: web.Response(text="NaN"), 1, "must be a finite number"),
        (lambda: web.json_response("1.0"), 1, "must be a finite number"),
    ],
)
async def test_a_model_that_does_not_answer_with_a_number_fails_the_sample(
    *, make_group: MakeGroup, serve: Any, answer: Callable[[], web.Response], tries: int, text: str
) -> None:
    count = 0

    async def handler(request: web.Request) -> web.Response:
        nonlocal count
        count += 1
        return answer()

    group = make_group("a")
    await judge(await serve(handler), group, rm_retries=1)
    assert group.samples[0].status is SampleStatus.FAILED
    assert text in str(group.samples[0].error)
    assert count == tries


async def test_a_model_that_never_answers_fails_the_sample_in_time(make_group: MakeGroup, serve: Any) -> None:
    import asyncio

    async def handler(request: web.Request) -> web.Response:
        await asyncio.sleep(5)
        return web.json_response(1.0)

    group = make_group("a", "b")
    await judge(await serve(handler), group, rm_timeout_s=0.3)
    for sample in group.samples:
        assert sample.status is SampleStatus.FAILED and "gave no reward within 0.3 s" in str(sample.error)


async def test_a_refused_connection_is_reported(make_group: MakeGroup, unused_tcp_port: int) -> None:
    group = make_group("a")
    await judge(f"http://127.0.0.1:{unused_tcp_port}/judge", group, rm_retries=1)
    assert group.samples[0].status is SampleStatus.FAILED and "ClientConnectorError" in str(group.samples[0].error)
