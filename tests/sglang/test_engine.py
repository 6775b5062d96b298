"""Answers of real SGLang engines that the client and the rollouts rely on."""

import asyncio
from pathlib import Path
from urllib.parse import urlsplit

import numpy as np
import pytest

from fuligo.engines.generation import SamplingParams
from fuligo.engines.group import EngineGroup
from fuligo.errors import EngineError
from tests.sglang import oracle

LONG = SamplingParams(max_new_tokens=600, temperature=1.0, ignore_eos=True)


@pytest.mark.parametrize("temperature", [1.0, 0.7])
async def test_log_probabilities_are_those_of_transformers(engines: EngineGroup, checkpoint: Path, temperature: float) -> None:
    model = oracle.load(checkpoint)
    for engine in engines.clients:
        await engine.update_weights_from_disk(str(checkpoint), version=0)
        generations = await oracle.sample(engine, temperature=temperature)
        assert oracle.largest_difference(model, generations, temperature=temperature) < oracle.TOLERANCE


async def test_abort_gives_back_the_tokens_so_far_and_they_can_be_continued(engines: EngineGroup, checkpoint: Path) -> None:
    model = oracle.load(checkpoint)
    await engines.update_weights_from_disk(str(checkpoint), version=0)
    prompt = oracle.PROMPTS[0]
    request = asyncio.create_task(engines.clients[0].generate(prompt, LONG, rid="to-abort"))
    await _running(engines, 1)
    await engines.abort_all()
    begun = await request
    assert begun.finish_reason == "abort"
    assert 0 < len(begun.output_ids) < LONG.max_new_tokens
    rest = SamplingParams(max_new_tokens=16, ignore_eos=True)
    tail = await engines.generate([*prompt, *begun.output_ids.tolist()], rest, rid="continued")
    response = np.concatenate([begun.output_ids, tail.output_ids])
    sampled = np.concatenate([begun.logprobs, tail.logprobs])
    assert np.abs(sampled - oracle.logprobs(model, prompt, response)).max() < oracle.TOLERANCE


async def test_connections_stay_open_while_the_trainer_works(engines: EngineGroup) -> None:
    """A connection closed just as the next rollout begins would lose a request and mark the engine as unhealthy at the router."""
    url = urlsplit(engines.clients[0].url)
    reader, writer = await asyncio.open_connection(url.hostname, url.port)
    for idle_s in (0, 6):  # SGLang's own keep-alive time is 5 s
        await asyncio.sleep(idle_s)
        writer.write(b"GET /health HTTP/1.1\r\nHost: engine\r\n\r\n")
        assert b" 200 " in await reader.readline()
        await reader.readuntil(b"\r\n\r\n")
    writer.close()


async def test_a_paused_engine_holds_new_requests_until_it_resumes(engines: EngineGroup) -> None:
    running = asyncio.create_task(engines.clients[0].generate(oracle.PROMPTS[0], LONG, rid="before-the-pause"))
    await _running(engines, 1)
    await engines.pause("abort")
    assert (await running).finish_reason == "abort"
    held = asyncio.create_task(engines.generate(oracle.PROMPTS[0], SamplingParams(max_new_tokens=4, ignore_eos=True), rid="held"))
    done, _ = await asyncio.wait([held], timeout=1.0)
    assert not done
    await engines.resume()
    assert len((await held).output_ids) == 4


async def test_stop_strings_stay_in_the_ids(engines: EngineGroup, checkpoint: Path) -> None:
    """A stop string is cut from the text, never from the token ids."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(checkpoint)
    free = (
        await engines.generate(oracle.PROMPTS[1], SamplingParams(max_new_tokens=24, temperature=0.0, ignore_eos=True), rid="free")
    ).output_ids
    stop = next(text for token in free.tolist() if (text := tokenizer.decode([token])).isalpha() and text.isascii())
    params = SamplingParams(max_new_tokens=24, temperature=0.0, ignore_eos=True, stop=(stop,))
    stopped = await engines.generate(oracle.PROMPTS[1], params, rid="stopped")
    assert stopped.finish_reason == "stop"
    assert np.array_equal(stopped.output_ids, free[: len(stopped.output_ids)])
    assert stop in tokenizer.decode(stopped.output_ids.tolist())


async def test_a_request_that_cannot_fit_is_refused_and_the_engine_continues(engines: EngineGroup) -> None:
    with pytest.raises(EngineError, match="status 400"):
        await engines.generate([5] * 4000, SamplingParams(max_new_tokens=4), rid="too-long")
    assert len((await engines.generate([5, 6], SamplingParams(max_new_tokens=4, ignore_eos=True), rid="fits")).output_ids) == 4


async def _running(engines: EngineGroup, num_requests: int) -> None:
    while (await engines.load()).num_running < num_requests:  # noqa: ASYNC110  # there is no event to wait for
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.1)  # some tokens
