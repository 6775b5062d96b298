"""Episodes: what is trained is what the engine saw; limits; failures of environments; interruptions."""

import asyncio
import contextlib
import dataclasses
import re
import threading
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fuligo.environments import AssistantTurn, Environment, EnvironmentSettings, Row, Start, Step, ToolEnvironment
from fuligo.observability.samples import sample_table
from fuligo.rollout.debug_data import decode_groups, encode_groups
from fuligo.rollout.group_tasks import snapshot
from fuligo.rollout.protocol import Interruptible
from fuligo.rollout.source import first_version
from fuligo.types import Branch, Episode, Sample, SampleGroup, SampleStatus, Turn
from tests.unit.environments.conversations import ids, text, tokenizer
from tests.unit.rollout.episode_world import PARAMS, Adding, Anew, Counting, Writer, episodes, fresh

END = {
    "CHATML": "<|im_end|>",
    "qwen3": "<|im_end|>",
    "llama3_1": "<|eot_id|>",
    "glm4moe": "<|user|>",
    "deepseekv3": "<｜end▁of▁sentence｜>",
}
EXAMPLES = max(10, settings().max_examples // 4)


def run(engine: Writer, kind: type[Environment] = Counting, template: str = "CHATML", **limits: Any) -> list[Sample]:
    return asyncio.run(episodes(engine, kind, template, **limits)(fresh(), PARAMS))


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


def exits(seconds: float) -> None:
    """Exit the program."""
    raise SystemExit(3)


async def exits_at_once(seconds: float) -> None:
    """Exit the program."""
    raise SystemExit(3)


def ends_early(seconds: float) -> None:
    """Raise what a future cannot hold."""
    raise StopIteration


HANGING = threading.Event()


def hangs(seconds: float) -> None:
    """Wait for ever."""
    HANGING.wait()


class Calling(ToolEnvironment):
    """Offers the tools above."""

    def __init__(self, row: Row, settings: EnvironmentSettings) -> None:
        super().__init__(row, settings, [exits, exits_at_once, ends_early, hangs])

    async def judge(self, turn: AssistantTurn) -> Step:
        return Step(reward=1.0, done=True)


def calling(name: str, num_calls: int = 1) -> Writer:
    call = f'<tool_call>\n{{"name": "{name}", "arguments": {{"seconds": 1}}}}\n</tool_call>'
    return Writer([*[f"{call}<|im_end|>"] * num_calls, "5<|im_end|>"])


@pytest.mark.parametrize(
    ("tool", "error"), [("exits", "error: 3"), ("exits_at_once", "error: 3"), ("ends_early", "error: StopIteration: ")]
)
def test_a_tool_that_exits_fails_only_its_call(tool: str, error: str) -> None:
    (sample,) = run(calling(tool), Calling)
    assert sample.episode is not None
    assert (sample.status, sample.reward) == (SampleStatus.COMPLETED, 1.0)
    assert sample.episode.turns[0].answers[0]["content"] == error


def test_tools_that_hang_hold_up_no_other_thread() -> None:
    async def run_many() -> list[Sample]:
        runner = episodes(calling("hangs", 40), Calling, turn_timeout_s=0.2)
        samples = await asyncio.gather(*(runner(fresh(), PARAMS) for _ in range(40)))
        await asyncio.wait_for(asyncio.to_thread(int), 60)
        return [sample for (sample,) in samples]

    try:
        samples = asyncio.run(run_many())  # waits for the threads of asyncio.to_thread
    finally:
        HANGING.set()
    assert all("did not return within" in str(sample.error) for sample in samples)


def test_limits_end_an_episode() -> None:
    (sample,) = run(Writer([f"{n}<|im_end|>" for n in range(5)]), max_turns=2)
    assert (sample.status, sample.reward, sample.metrics["turns"]) == (SampleStatus.TRUNCATED, 0.5, 2)
    (sample,) = asyncio.run(episodes(Writer(["a b a b a b"]))(fresh(), dataclasses.replace(PARAMS, max_new_tokens=3)))
    assert (sample.status, sample.response_length, sample.metrics["turns"]) == (SampleStatus.TRUNCATED, 3, 1)
    (sample,) = run(
        Writer(["a<|im_end|>"]), max_context_len=len(ids("<|im_start|>user\nq<|im_end|>\n<|im_start|>assistant\na<|im_end|>")) + 2
    )
    assert (sample.status, sample.metrics["turns"], sample.loss_mask.sum()) == (SampleStatus.TRUNCATED, 1, 2)


class NoText(Exception):
    """Exception whose text fails."""

    def __str__(self) -> str:
        raise RuntimeError("no text")


class Stubborn(Environment):
    """Hangs in `step` and ignores every cancellation."""

    async def reset(self) -> Start:
        return Start([{"role": "user", "content": "q"}])

    async def step(self, turn: AssistantTurn) -> Step:
        while True:
            with contextlib.suppress(asyncio.CancelledError):
                await asyncio.Event().wait()


class Broken(Environment):
    """Misbehaves as its row says."""

    def __init__(self, row: Row, settings: EnvironmentSettings) -> None:
        super().__init__(row, settings)
        if row.prompt == "exits at once":
            raise SystemExit(3)

    async def reset(self) -> Start:
        if self.row.prompt == "resets to text":
            return Start(["q"])  # type: ignore[list-item]
        tools = ("add",) if self.row.prompt == "offers text" else ()
        return Start([{"role": "user", "content": "q"}], tools)  # type: ignore[arg-type]

    async def step(self, turn: AssistantTurn) -> Step:
        match self.row.prompt:
            case "raises":
                raise RuntimeError("no such game")
            case "hangs":
                await asyncio.Event().wait()
            case "ignores its cancellation":
                while True:
                    try:
                        await asyncio.sleep(2.0)
                        return Step(done=True)
                    except asyncio.CancelledError:
                        continue
            case "exits":
                raise SystemExit(3)
            case "is interrupted":
                raise KeyboardInterrupt
            case "has no text":
                raise NoText
            case "raises a cancellation":
                raise asyncio.CancelledError
            case "cancels itself":
                task = asyncio.current_task()
                assert task is not None
                task.cancel()
                await asyncio.sleep(0)
            case "gives text as a metric":
                return Step(metrics={"speed": "fast"}, done=True)  # type: ignore[dict-item]
            case "gives no metrics":
                return Step(metrics=[1.0], done=True)  # type: ignore[arg-type]
            case "gives text as a result":
                return Step(tool_results=("4",), done=True)  # type: ignore[arg-type]
            case "gives text as a message":
                return Step(["4"])  # type: ignore[list-item]
            case "says nothing":
                return Step()
            case "gives no number":
                return Step(reward=float("nan"), done=True)
            case "gives a number of 400 digits":
                return Step(reward=10**400, done=True)
            case "gives no step":
                return None  # type: ignore[return-value]
            case "says what no template renders":
                return Step([{"role": "user"}])
        return Step(done=True, reward=1.0)


@pytest.mark.parametrize(
    ("prompt", "error"),
    [
        ("raises", "environment: step raised RuntimeError: no such game"),
        ("hangs", r"environment: step did not return within 1 s \(--turn-timeout-s\)"),
        ("ignores its cancellation", r"environment: step did not return within 1 s"),
        ("exits", "environment: step raised SystemExit: 3"),
        ("is interrupted", "environment: step raised KeyboardInterrupt"),
        ("has no text", "environment: step raised NoText$"),
        ("raises a cancellation", "environment: step canceled itself"),
        ("cancels itself", "environment: step canceled itself"),
        ("exits at once", "environment: the constructor raised SystemExit: 3"),
        ("resets to text", r"environment: the messages of reset must be a list of dicts with a role, not \['q'\]"),
        ("offers text", r"environment: the tools of reset must be a tuple of Tool, not \('add',\)"),
        ("gives text as a metric", "environment: the metrics of step must be finite numbers by name, not {'speed': 'fast'}"),
        ("gives no metrics", r"environment: the metrics of step must be finite numbers by name, not \[1.0\]"),
        ("gives text as a result", r"environment: the tool_results of step must be a tuple of ToolResult, not \('4',\)"),
        ("gives text as a message", r"environment: the messages of step must be a list of dicts with a role, not \['4'\]"),
        ("says nothing", "step returned no message"),
        ("gives no number", "the reward of turn 1 is nan"),
        ("gives a number of 400 digits", "the reward of turn 1 is 10{79}; it must be finite"),
        ("gives no step", "step must return a Step, not None"),
        ("says what no template renders", "environment: the chat template rejects the messages"),
    ],
)
async def test_an_environment_that_fails_fails_only_its_sample(prompt: str, error: str) -> None:
    template = "deepseekv3" if "template" in prompt else "CHATML"
    turn_timeout_s = 1.0 if "did not return" in error else 60.0
    runner = episodes(Writer(["a<|im_end|>", "a<|im_end|>"]), Broken, template, turn_timeout_s=turn_timeout_s)
    (bad,), (good,) = await asyncio.gather(runner(fresh(prompt), PARAMS), runner(fresh("works"), PARAMS))
    assert bad.status is SampleStatus.FAILED and bad.error is not None
    assert re.search(error, bad.error), bad.error
    assert (good.status, good.reward) == (SampleStatus.COMPLETED, 1.0)


def test_a_call_that_ignores_its_cancellation_does_not_outlive_the_run(caplog: pytest.LogCaptureFixture) -> None:
    async def run_and_close() -> Sample:
        runner = episodes(Writer(["a<|im_end|>"]), Stubborn, turn_timeout_s=0.05)
        (sample,) = await runner(fresh(), PARAMS)
        await runner.close()
        return sample

    assert "did not return within" in str(asyncio.run(run_and_close()).error)  # asyncio.run waits for every task that is registered
    assert "1 calls of environments catch asyncio.CancelledError" in caplog.text


async def test_an_episode_that_takes_too_long_fails() -> None:
    (sample,) = await episodes(Writer(["a<|im_end|>"]), Broken, episode_timeout_s=0.05)(fresh("hangs"), PARAMS)
    assert sample.error == "the episode did not end within 0.05 s (--episode-timeout-s)"


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
    """Cancelled while the environment answers, it asks the environment again, and not the engine."""
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
