"""HTTP API on a real engine in this process; requests are passed directly to the application."""

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from fuligo.engines.answers import parse_scores, scoring_body
from fuligo.engines.embedded.engine import EmbeddedEngine
from fuligo.engines.embedded.http_api import Api, wake
from fuligo.engines.embedded.model import EngineModel
from fuligo.formats.payload import shared_payload
from fuligo.formats.weight_manifest import weights_checksum
from tests import tiny


@pytest.fixture
def engine(checkpoint: Path) -> EmbeddedEngine:
    """Return a model of its own, because tests change its weights."""
    model = EngineModel(str(checkpoint), torch.device("cpu"), torch.float32)
    return EmbeddedEngine(model, max_running_requests=4, max_total_tokens=4096, on_ended=wake, on_failure=lambda: None)


@pytest.fixture
async def http(engine: EmbeddedEngine, tmp_path: Path) -> AsyncIterator[httpx.AsyncClient]:
    engine.thread.start()
    transport = httpx.ASGITransport(Api(engine, [tmp_path]).app())
    async with httpx.AsyncClient(transport=transport, base_url="http://engine", timeout=60) as client:
        yield client
    engine.thread.stop()


def body(input_ids: Any = (5, 6, 7), **params: Any) -> dict[str, Any]:
    return {"input_ids": list(input_ids), "sampling_params": {"max_new_tokens": 6, "ignore_eos": True, "sampling_seed": 1} | params}


async def post(http: httpx.AsyncClient, path: str, content: Any = None) -> Any:
    response = await http.post(path, json={} if content is None else content)
    assert response.status_code == 200, response.text
    return response.json()


async def refused(http: httpx.AsyncClient, path: str, content: Any, status: int = 400) -> str:
    response = await http.post(path, json=content)
    assert response.status_code == status, response.text
    return response.json()["error"]["message"]


async def load(http: httpx.AsyncClient) -> dict[str, int]:
    return (await http.get("/v1/loads")).json()["loads"][0]


async def until(http: httpx.AsyncClient, **wanted: int) -> None:
    """Wait until the engine's load is as given."""
    async with asyncio.timeout(120):
        while not wanted.items() <= (await load(http)).items():  # noqa: ASYNC110  # the engine is asked as a client would
            await asyncio.sleep(0.005)


async def test_an_answer_has_the_fields_of_sglang(http: httpx.AsyncClient) -> None:
    answer = await post(http, "/generate", body() | {"rid": "mine", "return_logprob": True})
    meta = answer["meta_info"]
    assert meta["id"] == "mine"
    assert meta["finish_reason"] == {"type": "length", "length": 6}
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["cached_tokens"], meta["weight_version"]) == (3, 6, 0, "0")
    assert [token for _, token, _ in meta["output_token_logprobs"]] == answer["output_ids"]
    assert answer["text"] == tiny.tokenizer().decode(answer["output_ids"], skip_special_tokens=True)


async def test_what_the_router_adds_changes_nothing(http: httpx.AsyncClient) -> None:
    """sglang-router 0.3.2 forwards a request with these headers."""
    switches = ("stream", "return_text_in_logprobs", "return_hidden_states", "background", "no_logs", "return_bytes", "return_entropy")
    added = {"model": None, "log_metrics": True, **dict.fromkeys(switches, False)}
    assert (await post(http, "/generate", body() | added))["output_ids"] == (await post(http, "/generate", body()))["output_ids"]


async def test_the_batch_form_answers_in_order(http: httpx.AsyncClient) -> None:
    prompts = [[5], [6, 7], [8, 9, 10]]
    params = [{"max_new_tokens": number, "ignore_eos": True, "sampling_seed": 1} for number in (9, 2, 5)]
    answers = await post(http, "/generate", {"input_ids": prompts, "sampling_params": params, "rid": ["a", "b", "c"]})
    assert [answer["meta_info"]["id"] for answer in answers] == ["a", "b", "c"]
    assert [len(answer["output_ids"]) for answer in answers] == [9, 2, 5]
    alone = [await post(http, "/generate", {"input_ids": p, "sampling_params": s}) for p, s in zip(prompts, params)]
    assert [answer["output_ids"] for answer in alone] == [answer["output_ids"] for answer in answers]


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ({"text": "hello"}, "text"),
        ({}, "input_ids"),
        ({"input_ids": []}, "input_ids"),
        ({"input_ids": ["a"]}, "integers"),
        ({"input_ids": [400]}, "vocabulary has ids 0 to 399"),
        ({"input_ids": [-1]}, "vocabulary"),
        ({"input_ids": [5], "stream": True}, "stream"),
        ({"input_ids": [5], "return_routed_experts": True}, "return_routed_experts"),
        ({"input_ids": [5], "background": True}, "background=True"),
        ({"input_ids": [5], "model": "another"}, "model='another'"),
        ({"input_ids": [5], "sampling_parms": {}}, "unknown field sampling_parms"),
        ({"input_ids": [5], "sampling_params": {"max_new_tokens": 1024}}, "context of 1024"),
        ({"input_ids": [5] * 200, "sampling_params": {"top_p": 2}}, "top_p"),
        ({"input_ids": [[5], [6]], "rid": ["a"]}, "lengths must agree"),
        ({"input_ids": [5], "rid": 7}, "rid"),
        ([5], "object"),
    ],
)
async def test_what_cannot_be_served_is_refused_with_the_reason(http: httpx.AsyncClient, content: Any, named: str) -> None:
    assert named in await refused(http, "/generate", content)


async def test_given_tokens_are_scored_as_transformers_does(http: httpx.AsyncClient, checkpoint: Path) -> None:
    """Score more tokens than one forward pass takes, whatever temperature was requested."""
    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    rng = np.random.default_rng(0)
    ids = [rng.integers(3, 400, size=size).astype(np.int32) for size in (2, 40, 700, 800)]
    for num_given, given in zip((1, 10, 1, 799), ids):
        content = scoring_body(given, num_given)
        content |= {"input_ids": given.tolist(), "sampling_params": {"max_new_tokens": 0, "temperature": 0.3}}
        scored = parse_scores(await post(http, "/generate", content), given[num_given:])
        with torch.no_grad():
            whole = model(torch.tensor(given[None].astype(np.int64))).logits[0].log_softmax(-1)
        expected = whole[np.arange(num_given - 1, len(given) - 1), given[num_given:]]
        np.testing.assert_allclose(scored, expected, atol=1e-4)


@pytest.mark.parametrize(
    ("content", "named"),
    [
        ({"logprob_start_len": 0}, "max_new_tokens to 0"),
        ({"logprob_start_len": 2, "sampling_params": {"max_new_tokens": 0}}, "at least one of the 3 input_ids must follow it"),
        ({"logprob_start_len": [0], "sampling_params": {"max_new_tokens": 0}}, "must be one integer"),
        ({"sampling_params": {"max_new_tokens": 0}}, "max_new_tokens"),
    ],
)
async def test_half_a_question_for_scores_is_refused(http: httpx.AsyncClient, content: dict[str, Any], named: str) -> None:
    assert named in await refused(http, "/generate", body() | content)


async def test_a_request_beyond_the_cache_is_refused(checkpoint: Path, engine_model: EngineModel) -> None:
    small = EmbeddedEngine(engine_model, max_running_requests=4, max_total_tokens=64, on_ended=wake, on_failure=lambda: None)
    small.thread.start()
    async with httpx.AsyncClient(transport=httpx.ASGITransport(Api(small, []).app()), base_url="http://engine") as http:
        assert "--max-total-tokens" in await refused(http, "/generate", body(max_new_tokens=100))
        assert len((await post(http, "/generate", body(max_new_tokens=61)))["output_ids"]) == 61
    small.thread.stop()


async def test_endpoints_that_make_no_sense_here_say_so(http: httpx.AsyncClient) -> None:
    for path in ("/init_weights_update_group", "/update_weights_from_distributed", "/destroy_weights_update_group"):
        assert "process group" in await refused(http, path, {}, status=501)
    assert "load_format" in await refused(
        http, "/update_weights_from_tensor", {"serialized_named_tensors": ["x"], "load_format": "flattened_bucket"}
    )
    assert "checksum" in await refused(http, "/weights_checker", {"action": "snapshot"})
    assert "mode" in await refused(http, "/pause_generation", {"mode": "nap"})
    assert "rid" in await refused(http, "/abort_request", {})


async def test_requests_that_arrive_in_a_pause_wait(http: httpx.AsyncClient) -> None:
    await post(http, "/pause_generation", {"mode": "in_place"})
    waiting = [asyncio.create_task(post(http, "/generate", body([5, number]))) for number in range(3)]
    await until(http, num_waiting_reqs=3, num_running_reqs=0, num_arrived_reqs=3)
    await post(http, "/continue_generation")
    assert [len(answer["output_ids"]) for answer in await asyncio.gather(*waiting)] == [6, 6, 6]


async def running(http: httpx.AsyncClient, **params: Any) -> asyncio.Task[Any]:
    """Return a long request that is already running."""
    task = asyncio.create_task(post(http, "/generate", body(max_new_tokens=600, **params) | {"rid": "long"}))
    await until(http, num_running_reqs=1)
    return task


@pytest.mark.long
async def test_a_pause_does_not_change_the_tokens(http: httpx.AsyncClient) -> None:
    undisturbed = await (await running(http))
    for mode, expected in (("retract", (0, 1)), ("in_place", (1, 0))):
        task = await running(http)
        await post(http, "/pause_generation", {"mode": mode})
        counts = await load(http)
        assert (counts["num_running_reqs"], counts["num_waiting_reqs"]) == expected
        await post(http, "/continue_generation")
        assert (await task)["output_ids"] == undisturbed["output_ids"], mode


async def test_a_pause_may_abort(http: httpx.AsyncClient) -> None:
    task = await running(http)
    await post(http, "/pause_generation", {"mode": "abort"})
    answer = await task
    assert answer["meta_info"]["finish_reason"]["type"] == "abort"
    assert len(answer["output_ids"]) == len(answer["meta_info"]["output_token_logprobs"]) < 600


@pytest.mark.parametrize("which", [{"rid": "long"}, {"abort_all": True}])
async def test_an_abort_returns_what_there_is_also_in_a_pause(http: httpx.AsyncClient, which: dict[str, Any]) -> None:
    task = await running(http)
    await post(http, "/pause_generation", {"mode": "in_place"})
    if "rid" in which:
        await post(http, "/abort_request", {"rid": "lo"})
        assert not task.done(), "another request's rid"
    await post(http, "/abort_request", which)
    assert (await task)["meta_info"]["finish_reason"]["type"] == "abort"


async def test_a_client_that_hangs_up_frees_its_row(http: httpx.AsyncClient) -> None:
    task = await running(http)
    task.cancel()
    await until(http, num_running_reqs=0, num_used_tokens=0)


async def test_weights_from_tensor_in_two_buckets(http: httpx.AsyncClient) -> None:
    newer = list(tiny.model(seed=1).named_parameters())
    with shared_payload(newer[:7]) as payload:
        await post(http, "/update_weights_from_tensor", {"serialized_named_tensors": [payload]})
    assert (await http.get("/model_info")).json()["weight_version"] == "0"
    assert "unfinished" in await refused(http, "/continue_generation", {})
    early = asyncio.create_task(post(http, "/generate", body()))
    await until(http, num_waiting_reqs=1, num_running_reqs=0)
    with shared_payload(newer[7:]) as payload:
        await post(http, "/update_weights_from_tensor", {"serialized_named_tensors": [payload], "weight_version": "4"})
    assert (await early)["meta_info"]["weight_version"] == "4", "nothing is sampled from weights of two versions"
    checked = await post(http, "/weights_checker", {"action": "checksum"})
    assert (checked["num_tensors"], checked["num_bytes"], checked["checksum"]) == weights_checksum(newer)


async def test_weights_do_not_change_under_running_requests(http: httpx.AsyncClient, tmp_path: Path) -> None:
    tiny.save_checkpoint(tmp_path, seed=1)
    task = await running(http)
    assert "pause" in await refused(http, "/update_weights_from_disk", {"model_path": str(tmp_path), "weight_version": "1"})
    await post(http, "/update_weights_from_disk", {"model_path": str(tmp_path), "weight_version": "1", "abort_all_requests": True})
    assert (await task)["meta_info"]["finish_reason"]["type"] == "abort"
    assert (await http.get("/model_info")).json()["weight_version"] == "1"


async def test_bad_weights_leave_the_engine_as_it_was(http: httpx.AsyncClient, tmp_path: Path) -> None:
    before = await post(http, "/weights_checker", {"action": "checksum"})
    with shared_payload(list(tiny.model(layers=1).named_parameters())) as wrong:
        content = {"serialized_named_tensors": [wrong], "weight_version": "1"}
        assert "was not sent" in await refused(http, "/update_weights_from_tensor", content)
    nowhere = str(tmp_path / "nowhere")
    assert "not a directory" in await refused(http, "/update_weights_from_disk", {"model_path": nowhere, "weight_version": "1"})
    assert "number" in await refused(http, "/update_weights_from_disk", {"model_path": str(tmp_path), "weight_version": "new"})
    assert await post(http, "/weights_checker", {"action": "checksum"}) == before
    assert len((await post(http, "/generate", body()))["output_ids"]) == 6


async def test_released_memory_comes_back(http: httpx.AsyncClient) -> None:
    before = await post(http, "/generate", body())
    await post(http, "/release_memory_occupation")
    waiting = asyncio.create_task(post(http, "/generate", body()))
    await until(http, num_waiting_reqs=1)
    await post(http, "/resume_memory_occupation")
    assert (await waiting)["output_ids"] == before["output_ids"]


async def test_an_engine_that_breaks_says_so_to_everyone(
    http: httpx.AsyncClient, engine: EmbeddedEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert (await http.get("/health")).status_code == 200

    def broken(*_: Any) -> None:
        raise MemoryError("no more memory")

    monkeypatch.setattr(engine.model, "forward", broken)
    assert "no more memory" in await refused(http, "/generate", body(), status=500)
    assert (await http.get("/health")).status_code == 503
    assert "no more memory" in await refused(http, "/generate", body())


async def test_what_the_engine_tells_of_itself(http: httpx.AsyncClient, checkpoint: Path) -> None:
    info = (await http.get("/server_info")).json()
    assert (info["model_path"], info["tp_size"], info["max_total_num_tokens"]) == (str(checkpoint), 1, 4096)
    assert (await http.get("/get_model_info")).json()["is_generation"] is True
    assert (await http.get("/nothing")).status_code == 404
