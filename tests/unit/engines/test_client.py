"""Client against a server that misbehaves in every way that a test asks for."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from aiohttp import web

from fuligo.engines.client import EngineClient
from fuligo.engines.connection import ControlDeadlines, Deadline
from fuligo.engines.engine import MemoryTag
from fuligo.engines.generation import SamplingParams
from fuligo.engines.group import EngineGroup
from fuligo.errors import EngineError
from fuligo.types import PromptImage

PARAMS = SamplingParams(4)
Behavior = Callable[[web.Request], Awaitable[web.StreamResponse]]


def good_answer(rid: str = "") -> dict[str, Any]:
    return {
        "text": "x",
        "output_ids": [5],
        "meta_info": {
            "id": rid,
            "finish_reason": {"type": "stop", "matched": 5},
            "prompt_tokens": 2,
            "cached_tokens": 0,
            "weight_version": "3",
            "output_token_logprobs": [[-0.25, 5, None]],
        },
    }


async def good(request: web.Request) -> web.StreamResponse:
    return web.json_response(good_answer((await request.json())["rid"]))


async def server_error(request: web.Request) -> web.StreamResponse:
    return web.json_response({"error": {"message": "out of memory"}}, status=500)


async def refusal(request: web.Request) -> web.StreamResponse:
    return web.json_response({"error": {"message": "too long"}}, status=400)


async def garbage(request: web.Request) -> web.StreamResponse:
    return web.Response(body=b"<html>gateway</html>")


async def wrong_lengths(request: web.Request) -> web.StreamResponse:
    return web.json_response(good_answer() | {"output_ids": [5, 6]})


async def hang(request: web.Request) -> web.StreamResponse:
    await asyncio.sleep(60)
    return web.Response()


async def disconnect(request: web.Request) -> web.StreamResponse:
    assert request.transport is not None
    request.transport.close()
    return web.Response()


async def torn_body(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"Content-Length": "1000"})
    await response.prepare(request)
    await response.write(b'{"text":')
    assert request.transport is not None
    request.transport.close()
    return response


@dataclass
class Misbehaving:
    """Server that answers the n-th request with `script[n]`, and later ones with `good`."""

    url: str = ""
    script: list[Behavior] = field(default_factory=list)
    rids: list[str] = field(default_factory=list)

    async def handle(self, request: web.Request) -> web.StreamResponse:
        self.rids.append((await request.json())["rid"])
        behavior = self.script.pop(0) if self.script else good
        return await behavior(request)


@pytest.fixture
async def server() -> AsyncIterator[Misbehaving]:
    state = Misbehaving()
    app = web.Application()
    app.router.add_post("/generate", state.handle)
    app.router.add_route("*", "/{path:.*}", hang)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    state.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    yield state
    await runner.cleanup()


@pytest.fixture
async def client(server: Misbehaving) -> AsyncIterator[EngineClient]:
    client = EngineClient(server.url, retries=2, timeout_s=60)
    yield client
    await client.close()


@pytest.mark.parametrize("failure", [server_error, garbage, wrong_lengths, disconnect, torn_body])
async def test_a_passing_failure_is_retried_under_another_rid(server: Misbehaving, client: EngineClient, failure: Behavior) -> None:
    server.script = [failure]
    generation = await client.generate([1, 2], PARAMS, rid="s7")
    assert (generation.output_ids.tolist(), generation.weight_version) == ([5], 3)
    assert server.rids == ["s7", "s7.retry1"]


@pytest.mark.parametrize(("failure", "cause"), [(server_error, "out of memory"), (garbage, "not JSON"), (wrong_lengths, "2 output_ids")])
async def test_a_lasting_failure_names_engine_request_and_cause(
    server: Misbehaving, client: EngineClient, failure: Behavior, cause: str
) -> None:
    server.script = [failure] * 3
    with pytest.raises(EngineError) as caught:
        await client.generate([1, 2], PARAMS, rid="s7")
    for part in (server.url, "s7", "3 times", cause):
        assert part in str(caught.value)


async def test_a_refusal_is_not_retried(server: Misbehaving, client: EngineClient) -> None:
    server.script = [refusal]
    with pytest.raises(EngineError, match=r"refused.*too long"):
        await client.generate([1, 2], PARAMS, rid="s7")
    assert server.rids == ["s7"]


async def test_a_hanging_engine_ends_at_the_deadline(server: Misbehaving, client: EngineClient) -> None:
    server.script = [hang]
    with pytest.raises(EngineError, match=r"request s7: no answer within 0\.2 s"):
        await client.generate([1, 2], PARAMS, rid="s7", timeout_s=0.2)


async def test_a_refusal_for_length_names_the_flags_that_bound_it(server: Misbehaving, client: EngineClient) -> None:
    text = "The input (40000 tokens) is longer than the model's context length (32768 tokens)."  # SGLang's

    async def too_long(request: web.Request) -> web.StreamResponse:
        return web.json_response({"error": {"message": text}}, status=400)

    server.script = [too_long]
    with pytest.raises(EngineError, match=r"context length \(32768 tokens\); drop long prompts with --rollout-max-prompt-len"):
        await client.generate([1, 2], PARAMS, rid="s7")


async def test_images_go_along_and_an_engine_that_counts_other_tokens_is_refused(server: Misbehaving, client: EngineClient) -> None:
    """The engine repeats the one token of each image; with another number the trainer's ids would stand for other tokens."""
    sent: list[Any] = []

    async def recorded(request: web.Request) -> web.StreamResponse:
        body = await request.json()
        sent.append((body["input_ids"], body.get("image_data")))
        return await good(request)

    server.script = [recorded] * 3
    one, two = (PromptImage("a.png", b"png", "digest", 0, 1, 1),), (PromptImage("a.png", b"png", "digest", 1, 1, 2),)
    await client.generate([1, 2], PARAMS, rid="s7")
    await client.generate([1, 2], PARAMS, rid="s8", images=one)
    with pytest.raises(EngineError, match="request s9 has 4 tokens with its images, but the engine counts 2"):
        await client.generate([1, 9, 9, 2], PARAMS, rid="s9", images=two)
    encoded = ["data:image;base64,cG5n"]
    assert sent == [([1, 2], None), ([1, 2], encoded), ([1, 9, 2], encoded)]


STEP, WEIGHTS, BUCKET = Deadline(0.05, "--for-a-step"), Deadline(0.06, "--for-all-weights"), Deadline(0.07)
CONTROL_CALLS: dict[str, tuple[Callable[[EngineClient], Awaitable[object]], Deadline]] = {
    "/pause_generation": (lambda client: client.pause("abort"), STEP),
    "/continue_generation": (lambda client: client.resume(), STEP),
    "/abort_request": (lambda client: client.abort_all(), STEP),
    "/flush_cache": (lambda client: client.flush_cache(), STEP),
    "/model_info": (lambda client: client.model_info(), STEP),
    "/server_info": (lambda client: client.read_num_ranks(), STEP),
    "/v1/loads": (lambda client: client.load(), STEP),
    "/destroy_weights_update_group": (lambda client: client.destroy_weights_update_group("group"), STEP),
    "/update_weights_from_disk": (lambda client: client.update_weights_from_disk("weights", 1), WEIGHTS),
    "/weights_checker": (lambda client: client.weights_checksum(), WEIGHTS),
    "/release_memory_occupation": (lambda client: client.release_memory("weights"), WEIGHTS),
    "/resume_memory_occupation": (lambda client: client.resume_memory(), WEIGHTS),
    "/update_weights_from_tensor": (lambda client: client.update_weights_from_tensor([], None), BUCKET),
    "/update_weights_from_distributed": (
        lambda client: client.update_weights_from_distributed(names=[], dtypes=[], shapes=[], group_name="group", version=None),
        BUCKET,
    ),
    "/init_weights_update_group": (
        lambda client: client.init_weights_update_group(
            host="host", port=1, rank_offset=1, world_size=2, group_name="group", backend="gloo"
        ),
        BUCKET,
    ),
}
"""By path: the call, and what it may take."""


async def test_each_control_call_has_the_deadline_of_its_kind(server: Misbehaving) -> None:
    """The deadline of a call does not depend on the time that requests may take: the HTTP server answers, the scheduler hangs."""

    async def fails(path: str) -> None:
        call, deadline = CONTROL_CALLS[path]
        client = EngineClient(server.url, timeout_s=3600.0, deadlines=ControlDeadlines(STEP, WEIGHTS, BUCKET))
        with pytest.raises(EngineError) as caught:
            await call(client)
        longer = f"; raise {deadline.flag} to allow more" if deadline.flag else ""
        assert str(caught.value) == f"engine {server.url}: {path}: no answer within {deadline.seconds:g} s{longer}"
        assert client.is_overdue
        await client.close()

    await asyncio.gather(*map(fails, CONTROL_CALLS))


async def test_the_sender_limits_the_time_of_a_stream(server: Misbehaving) -> None:
    """A stream takes as long as its buckets, each of which has the sender's deadline."""
    client = EngineClient(server.url, deadlines=ControlDeadlines(STEP, WEIGHTS, BUCKET))
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(client.receive_weight_stream(stream=3, group_name="group", version=7), 5 * BUCKET.seconds)
    assert not client.is_overdue
    await client.close()


async def test_what_waits_for_an_engine_that_is_given_up_fails_at_once(server: Misbehaving) -> None:
    """A lost machine sends nothing; without a probe its calls would wait until their deadlines."""
    client = EngineClient(server.url)
    arrived = asyncio.Event()

    async def notes(request: web.Request) -> web.StreamResponse:
        arrived.set()
        return await hang(request)

    server.script = [notes]
    waiting = [asyncio.create_task(client.generate([1, 2], PARAMS, rid="s7")), asyncio.create_task(client.pause("abort"))]
    async with asyncio.timeout(120):
        await arrived.wait()
        await client.give_up()
        for call in (*waiting, client.resume()):
            with pytest.raises(EngineError, match="the engine is lost"):
                await call


async def test_a_request_that_takes_too_long_says_nothing_of_the_engine(server: Misbehaving, client: EngineClient) -> None:
    server.script = [hang]
    with pytest.raises(EngineError):
        await client.generate([1, 2], PARAMS, rid="s7", timeout_s=0.05)
    assert not client.is_overdue


def test_a_short_health_check_does_not_hurry_a_step() -> None:
    """Health checks reach the HTTP server, which answers during a step."""
    short, long = (ControlDeadlines.of_watched(health_timeout_s=seconds, start_timeout_s=600.0) for seconds in (5.0, 1000.0))
    assert (short.step.seconds, long.step.seconds) == (120.0, 1000.0)


def test_an_engine_that_is_not_watched_is_not_waited_for_longer_than_its_requests() -> None:
    short, long = (ControlDeadlines.of_others(request_timeout_s=seconds, start_timeout_s=600.0).step for seconds in (10.0, 3600.0))
    assert (short, long) == ((10.0, "--rollout-timeout-s"), (600.0, "--engine-start-timeout-s"))


async def test_an_engine_that_is_not_there_is_named() -> None:
    client = EngineClient("http://127.0.0.1:9", retries=0)
    with pytest.raises(EngineError, match=r"127\.0\.0\.1:9"):
        await client.generate([1], PARAMS, rid="s7")
    with pytest.raises(EngineError, match=r"not ready within 0\.2 s"):
        await client.wait_ready(0.2)
    await client.close()


async def test_a_group_sends_requests_in_turn(server: Misbehaving) -> None:
    group = EngineGroup.connect([server.url, server.url + "/"], retries=0)
    assert group.urls == (server.url, server.url)
    asked: list[int] = []

    def listen(number: int, client: EngineClient) -> None:
        generate = client.generate

        async def listening(*args: Any, **kwargs: Any) -> Any:
            asked.append(number)
            return await generate(*args, **kwargs)

        client.generate = listening

    for number, client in enumerate(group.clients):
        listen(number, client)
    answered = [(await group.generate([1], PARAMS, rid=str(number))).engine for number in range(4)]
    assert asked == answered == [0, 1, 0, 1]
    await group.close()


async def test_weights_are_labeled_with_version_and_engine() -> None:
    labels: list[str] = []

    async def update(request: web.Request) -> web.Response:
        labels.append((await request.json())["weight_version"])
        return web.json_response({"success": True})

    app = web.Application()
    app.router.add_post("/update_weights_from_disk", update)
    runner = web.AppRunner(app)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    for number in (2, None):
        client = EngineClient(f"http://127.0.0.1:{runner.addresses[0][1]}", number=number)
        await client.update_weights_from_disk("/weights", version=40)
        await client.close()
    assert labels == ["40@2", "40"]
    await runner.cleanup()


async def test_a_group_with_a_router_sends_requests_there(server: Misbehaving) -> None:
    group = EngineGroup.connect(["http://127.0.0.1:9"], router_url=server.url, retries=0)
    assert (await group.generate([1], PARAMS, rid="r")).output_ids.tolist() == [5]
    with pytest.raises(EngineError, match=r"127\.0\.0\.1:9"):
        await group.load()
    await group.close()


@pytest.mark.parametrize(
    "abort", [lambda pairs: pairs.abort_all(), lambda pairs: pairs.everyone.pause("abort")], ids=["end of a rollout", "weight sync"]
)
async def test_a_pair_that_is_aborted_answers_with_an_error_and_nothing_was_sampled(
    server: Misbehaving, abort: Callable[[EngineGroup], Awaitable[None]]
) -> None:
    """Prefill/decode pairs have no partial answer for a request in transfer; without an abort the error is retried."""
    arrived, aborted = asyncio.Event(), asyncio.Event()

    async def fails_later(request: web.Request) -> web.StreamResponse:
        arrived.set()
        await aborted.wait()
        return await server_error(request)

    server.script = [server_error, good, fails_later]
    pairs = EngineGroup([], EngineClient(server.url, retries=2), split=True)
    assert (await pairs.generate([1, 2], PARAMS, rid="a")).finish_reason == "stop"
    request = asyncio.create_task(pairs.generate([1, 2], PARAMS, rid="b"))
    await arrived.wait()
    await abort(pairs)
    aborted.set()
    cut = await request
    assert (cut.finish_reason, len(cut.output_ids), cut.prompt_tokens) == ("abort", 0, 2)
    assert server.rids == ["a", "a.retry1", "b"]
    await pairs.close()


async def test_engines_that_run_already_say_how_many_ranks_want_weights() -> None:
    """The number of ranks is the tensor-parallel size in SGLang's `/server_info`."""

    async def answer(_: web.Request) -> web.StreamResponse:
        return web.json_response(server_info)

    app = web.Application()
    app.router.add_get("/server_info", answer)
    runner = web.AppRunner(app, shutdown_timeout=0.1)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    group = EngineGroup.connect([f"http://127.0.0.1:{runner.addresses[0][1]}"], retries=0)
    server_info: dict[str, Any] = {"tp_size": 4, "dp_size": 1}
    await group.read_num_ranks()
    assert [client.num_ranks for client in group.clients] == [4]
    server_info.clear()
    with pytest.raises(EngineError, match="tp_size"):
        await group.read_num_ranks()
    await group.close()
    await runner.cleanup()


@pytest.mark.parametrize(("tag", "waits"), [(None, True), ("kv_cache", True), ("weights", False)])
async def test_an_engine_is_idle_before_it_releases_its_cache(tag: MemoryTag | None, waits: bool) -> None:
    """SGLang 0.5.15 crashes otherwise; it flushes when the step in flight has ended, within the given time."""
    asked: list[str] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        asked.append(request.path_qs)
        return web.json_response({"success": True})

    app = web.Application()
    app.router.add_post("/{path}", answer)
    runner = web.AppRunner(app)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    client = EngineClient(f"http://127.0.0.1:{runner.addresses[0][1]}")
    try:
        await client.release_memory(tag)
    finally:
        await client.close()
        await runner.cleanup()
    assert asked == [*["/flush_cache?timeout=30"] * waits, "/release_memory_occupation"]
