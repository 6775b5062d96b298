"""Episodes: what is trained is what the engine saw; limits; interruptions."""

import asyncio
import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fuligo.environments import AssistantTurn, Start, Step
from fuligo.observability.samples import sample_table
from fuligo.rollout.debug_data import decode_groups, encode_groups
from fuligo.rollout.group_tasks import snapshot
from fuligo.rollout.protocol import Interruptible
from fuligo.rollout.source import first_version
from fuligo.types import Branch, Episode, Sample, SampleGroup, SampleStatus, Turn
from tests.unit.environments.conversations import ids, text, tokenizer
from tests.unit.rollout.episode_world import PARAMS, Adding, Anew, Counting, Writer, episodes, fresh, run

END = {
    "CHATML": "<|im_end|>",
    "qwen3": "<|im_end|>",
    "llama3_1": "<|eot_id|>",
    "glm4moe": "<|user|>",
    "deepseekv3": "<｜end▁of▁sentence｜>",
}
EXAMPLES = max(10, settings().max_examples // 4)


def trained(samples: list[Sample]) -> list[list[int]]:
    """Return the runs of tokens that are trained on, over all samples of an episode."""
    runs: list[list[int]] = []
    for sample in samples:
        before = 0
        for token, mask in zip(sample.response_ids.tolist(), sample.loss_mask.tolist(), strict=True):
            if mask and not before:
                runs.append([])
            if mask:
                runs[-1].append(token)
            before = mask
    return runs


@pytest.mark.parametrize("template", END)
@settings(max_examples=EXAMPLES)
@given(said=st.lists(st.text(st.sampled_from('ab 7{}"\né🙂<>'), min_size=1, max_size=9), min_size=1, max_size=4), cut=st.integers(0, 5))
def test_what_is_trained_is_what_the_engine_saw_and_said(template: str, said: list[str], cut: int) -> None:
    """Over templates that keep history and that rewrite it, with thinking, unicode, and a request that is aborted and continued."""
    thinking = "t</think>" if template == "deepseekv3" else "<think>\nt\n</think>\n\n"
    texts = [f"{thinking}{each}{END[template]}" for each in said] + [f"{thinking}done{END[template]}"]
    engine = Writer(list(texts), {1: cut})
    samples = run(engine, template=template)
    if samples[-1].status is SampleStatus.ABORTED:
        (interrupted,) = samples
        samples = asyncio.run(episodes(engine, template=template)(interrupted, PARAMS))
    assert trained(samples) == [ids(each) for each in texts]
    for request in engine.seen:
        assert any(sample.tokens[: len(request)].tolist() == request for sample in samples)
    for sample in samples:
        assert np.array_equal(sample.engine_logprobs[sample.loss_mask == 1], (-(sample.response_ids % 7 + 1) / 8)[sample.loss_mask == 1])
        assert not sample.engine_logprobs[sample.loss_mask == 0].any()
    assert {sample.reward for sample in samples} == {0.25 * sum(each != "done" for each in said) + 1.0}
    assert {(sample.index, sample.group_index) for sample in samples} == {(4, 2)}
    assert len(samples) == (1 if template in ("CHATML", "llama3_1") else len(texts))


def test_rewards_turns_and_metrics_are_recorded() -> None:
    (sample,) = run(Writer(["one<|im_end|>", "two<|im_end|>", "done<|im_end|>"]))
    assert sample.status is SampleStatus.COMPLETED and sample.reward == 1.5
    assert sample.episode is not None
    assert [(turn.reward, turn.message["content"]) for turn in sample.episode.turns] == [(0.25, "one"), (0.25, "two"), (1.0, "done")]
    for turn in sample.episode.turns:
        said = sample.response_ids[turn.first_token : turn.first_token + turn.num_tokens]
        assert text(said.tolist()) == turn.message["content"] + "<|im_end|>"
    assert sample.metrics["turns"] == 3 and sample.metrics["score"] == 3 and sample.metrics["branches"] == 1
    assert sample.metrics["tokens_model"] == sample.loss_mask.sum()
    assert sample.metrics["tokens_environment"] == (sample.loss_mask == 0).sum()


def test_tools_run_and_their_failures_are_counted() -> None:
    call = '<tool_call>\n{{"name": "add", "arguments": {}}}\n</tool_call>'
    texts = [call.format('{"a": 2, "b": 3}') + call.format('{"a": -2}'), call.format('{"a": "x"}'), "<tool_call>{", "5"]
    engine = Writer([f"{each}<|im_end|>" for each in texts])
    (sample,) = asyncio.run(episodes(engine, Adding)(fresh("2 + 3?", "5"), PARAMS))
    assert sample.reward == 1.0 and sample.episode is not None
    first, second, third, _ = sample.episode.turns
    assert [message["content"] for message in first.answers] == ["5", "error: a is negative"]
    assert "error: invalid arguments: a: Input should be a valid integer" in second.answers[0]["content"]
    assert third.answers[0]["content"].startswith("error: tool call 1 is not valid")
    assert {name: sample.metrics[name] for name in ("tool_calls", "tool_failures", "tool_problems", "calls/add", "failures/add")} == {
        "tool_calls": 3,
        "tool_failures": 2,
        "tool_problems": 1,
        "calls/add": 3,
        "failures/add": 2,
    }
    assert '"parameters"' in text(engine.seen[0]), "the model sees the tool"


def test_limits_end_an_episode() -> None:
    (sample,) = run(Writer([f"{n}<|im_end|>" for n in range(5)]), max_turns=2)
    assert (sample.status, sample.reward, sample.metrics["turns"]) == (SampleStatus.TRUNCATED, 0.5, 2)
    (sample,) = asyncio.run(episodes(Writer(["a b a b a b"]))(fresh(), dataclasses.replace(PARAMS, max_new_tokens=3)))
    assert (sample.status, sample.response_length, sample.metrics["turns"]) == (SampleStatus.TRUNCATED, 3, 1)
    (sample,) = run(
        Writer(["a<|im_end|>"]), max_context_len=len(ids("<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\na<|im_end|>")) + 2
    )
    assert (sample.status, sample.metrics["turns"], sample.loss_mask.sum()) == (SampleStatus.TRUNCATED, 1, 2)


def stored(sample: Sample) -> Sample:
    """Return the sample as a checkpoint restores it."""
    (group,) = decode_groups(encode_groups([SampleGroup(2, 0, [sample])]))
    return group.samples[0]


@pytest.mark.parametrize("template", ["CHATML", "qwen3"])
@pytest.mark.parametrize("request_number", [0, 1, 2])
@pytest.mark.parametrize("num_tokens", [0, 2])
def test_an_interrupted_episode_continues_exactly(template: str, request_number: int, num_tokens: int) -> None:
    """After an abort in any turn, by way of a checkpoint, it ends as if nothing had happened; a template that rewrites history included."""
    texts = ["<think>\nt\n</think>\n\none<|im_end|>", "two é<|im_end|>", "done<|im_end|>"]
    expected = run(Writer(list(texts)), template=template)
    engine = Writer(list(texts), {request_number: num_tokens})
    (sample,) = run(engine, template=template)
    assert sample.status is SampleStatus.ABORTED
    sample = stored(snapshot(sample))
    got = asyncio.run(episodes(engine, template=template)(sample, PARAMS))
    for mine, other in zip(got, expected, strict=True):
        for name in ("prompt_ids", "response_ids", "loss_mask", "engine_logprobs", "versions"):
            assert np.array_equal(getattr(mine, name), getattr(other, name)), name
        assert (mine.reward, mine.status, mine.response) == (other.reward, other.status, other.response)
    assert got[-1].metrics["score"] == 3


@pytest.mark.parametrize("abort_at", [{}, {1: 2}, {2: 0}])
@pytest.mark.parametrize("prompt", ["q", "fails"])
def test_the_response_is_the_text_of_all_turns(abort_at: dict[int, int], prompt: str) -> None:
    class Failing(Counting):
        async def step(self, turn: AssistantTurn) -> Step:
            if self.row.prompt == "fails" and turn.content == "done":
                raise RuntimeError("no more")
            return await super().step(turn)

    engine = Writer(["one é<|im_end|>", "two<|im_end|>", "done<|im_end|>"], abort_at)
    (sample,) = asyncio.run(episodes(engine, Failing)(fresh(prompt), PARAMS))
    expected = SampleStatus.ABORTED if abort_at else SampleStatus.FAILED if prompt == "fails" else SampleStatus.COMPLETED
    assert sample.status is expected
    assert sample.response == tokenizer().decode(sample.response_ids.tolist(), skip_special_tokens=True)
    assert "one é" in sample.response


def test_a_stop_string_is_cut_off_the_last_turn_only() -> None:
    engine = Writer(["one;", "two;"])
    (sample,) = asyncio.run(episodes(engine, max_turns=2)(fresh(), dataclasses.replace(PARAMS, stop=(";",))))
    assert sample.status is SampleStatus.TRUNCATED
    assert sample.response.startswith("one;") and sample.response.endswith("two")


def test_an_episode_that_cannot_resume_starts_over() -> None:
    engine = Writer(["one<|im_end|>", "two<|im_end|>", "done<|im_end|>"], {1: 1})
    (sample,) = run(engine, Anew)
    assert sample.status is SampleStatus.ABORTED
    engine.texts, engine._rest = ["done<|im_end|>"], []
    (sample,) = asyncio.run(episodes(engine, Anew)(stored(sample), PARAMS))
    assert (sample.reward, sample.metrics["turns"], text(sample.response_ids.tolist())) == (1.0, 1, "done<|im_end|>")


async def test_a_cancelled_episode_closes_its_environment_and_can_continue() -> None:
    """Canceled while the environment answers, it asks the environment again, and not the engine."""
    engine, Hanging.asked, Hanging.closed = Writer(["a<|im_end|>"]), asyncio.Event(), 0
    Hanging.hangs, Hanging.hangs_at = True, "step"
    sample = fresh("hangs")
    task = asyncio.create_task(episodes(engine, Hanging)(sample, PARAMS))
    await Hanging.asked.wait()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    assert not sample.finished and Hanging.closed == 1
    Hanging.hangs = False
    (sample,) = await episodes(engine, Hanging)(stored(sample), PARAMS)
    assert (sample.status, sample.reward, len(engine.seen)) == (SampleStatus.COMPLETED, 1.0, 1)


@pytest.mark.parametrize("where", ["reset", "step", "restore"])
async def test_an_interruption_does_not_wait_for_the_environment(where: str) -> None:
    """The call is made again when the episode continues, and no request of the engine."""
    engine, Hanging.asked, Hanging.hangs, Hanging.closed = Writer(["a<|im_end|>"]), asyncio.Event(), True, 0
    Hanging.hangs_at = "step" if where == "restore" else where
    generate, sample = episodes(engine, Hanging, turn_timeout_s=60), fresh("hangs")
    for at in ("step", "restore") if where == "restore" else (where,):
        Hanging.hangs_at, Hanging.asked = at, asyncio.Event()
        task = asyncio.create_task(generate(sample, PARAMS))
        await Hanging.asked.wait()
        generate.interrupt()
        (sample,) = await asyncio.wait_for(task, 50)
        assert sample.status is SampleStatus.ABORTED and not sample.finished
        sample = stored(sample)
    assert len(engine.seen) == (where != "reset") and Hanging.closed == (2 if where == "restore" else 1)
    Hanging.hangs = False
    (sample,) = await generate(sample, PARAMS)
    assert (sample.status, sample.reward, len(engine.seen)) == (SampleStatus.COMPLETED, 1.0, 1)


class Hanging(Counting):
    hangs = True
    hangs_at = "step"
    asked: asyncio.Event

    async def step(self, turn: AssistantTurn) -> Step:
        await self.hang("step")
        return Step(reward=1.0, done=True)

    async def reset(self) -> Start:
        await self.hang("reset")
        return await super().reset()

    async def restore(self, state: Any) -> None:
        await self.hang("restore")

    async def hang(self, where: str) -> None:
        if self.hangs and self.hangs_at == where:
            self.asked.set()
            await asyncio.Event().wait()


def test_the_age_of_an_episode_counts_its_earlier_branches() -> None:
    """Otherwise --max-staleness would train on them however old they are."""
    engine = Writer(["<think>\nt\n</think>\n\none<|im_end|>", "two<|im_end|>"], {1: 0}, version=3)
    (sample,) = run(engine, template="qwen3")
    assert sample.status is SampleStatus.ABORTED and sample.response_length == 0
    assert first_version(SampleGroup(2, 0, [sample]), 9) == 3


@pytest.mark.parametrize("abort_at", [None, 1, 2])
def test_recorded_turns_point_at_their_tokens(abort_at: int | None) -> None:
    """An unfinished episode has a row only for its last branch; each row must show the turn that it holds."""
    texts = ["<think>\nt\n</think>\n\none", "<think>\nt\n</think>\n\ntwo", "<think>\nt\n</think>\n\ndone"]
    engine = Writer([f"{each}<|im_end|>" for each in texts], {} if abort_at is None else {abort_at: 2})
    samples = run(engine, template="qwen3")
    rows = sample_table([SampleGroup(2, 0, samples)]).to_pylist()
    answers = [entry for entry in rows[-1]["turns"] if entry["role"] == "assistant"]
    placed = [entry for entry in answers if entry["sample"] is not None]
    assert len(answers) == (3 if abort_at is None else abort_at) and len(placed) == (3 if abort_at is None else 0)
    for entry in placed:
        at = entry["first_token"]
        shown = text(rows[entry["sample"]]["response_ids"][at : at + entry["num_tokens"]])
        assert entry["content"] == shown.removesuffix("<|im_end|>").rpartition("</think>")[2].strip()


def test_turns_of_the_branch_under_way_keep_their_place() -> None:
    """The second branch holds two turns when the third is aborted: a tool's result rewrites nothing."""
    episode = Episode([{"role": "user", "content": "q"}], [], [_turn(0, 0), _turn(1, 0), _turn(1, 9)])
    empty = np.empty(0, np.int32)
    episode.branches = [Branch(empty, empty, empty.astype(np.int8), empty.astype(np.float32), empty, None)]
    sample = dataclasses.replace(fresh(), episode=episode)
    (row,) = sample_table([SampleGroup(2, 0, [sample])]).to_pylist()
    assert [(each["sample"], each["first_token"]) for each in row["turns"][1:]] == [(None, None), (0, 0), (0, 9)]


def _turn(sample: int, first_token: int) -> Turn:
    return Turn(sample, first_token, 4, {"role": "assistant", "content": "a"}, [], 0.0, [], 0.1, 0.1)


def test_episodes_can_be_interrupted() -> None:
    assert isinstance(episodes(Writer([])), Interruptible)
