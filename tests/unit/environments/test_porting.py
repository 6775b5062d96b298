"""Environments of the page about porting, played with an engine that writes what a model would."""

from dataclasses import replace
from typing import Any

import pytest

from fuligo.environments import Environment
from fuligo.types import Sample, SampleStatus
from tests.unit.docs.pages import REPOSITORY, code_blocks
from tests.unit.environments.conversations import text
from tests.unit.environments.tools.conftest import sandbox_problem
from tests.unit.rollout.episode_world import PARAMS, Writer, episodes, fresh

END = "<|im_end|>"
CALL = '<tool_call>\n{{"name": "{}", "arguments": {}}}\n</tool_call>' + END


def of_page(name: str) -> type[Environment]:
    """Return a class of the page."""
    (source,) = (block.text for block in code_blocks(REPOSITORY / "docs" / "porting.md") if f"class {name}(" in block.text)
    names: dict[str, Any] = {}
    exec(source, names)
    return names[name]


async def play(name: str, texts: list[str], sample: Sample, **limits: Any) -> tuple[Sample, Writer]:
    """Play an episode; check that what the engine wrote is what is trained."""
    engine = Writer(texts.copy())
    (played,) = await episodes(engine, of_page(name), **limits)(sample, PARAMS)
    assert played.status is not SampleStatus.FAILED, played.error
    assert text(played.response_ids[played.loss_mask == 1].tolist()) == "".join(texts)
    assert all(played.tokens[: len(seen)].tolist() == seen for seen in engine.seen)
    return played, engine


@pytest.mark.parametrize(("answer", "reward"), [("Paris", 1.0), ("paris", 1.0), ("Rome", 0.0)])
async def test_search_r1_reads_its_tags_also_where_a_stop_string_ended_the_turn(answer: str, reward: float) -> None:
    texts = ["I look. <search>capital of France</search>", "hm" + END, f"So <answer> {answer} </answer>"]
    sample, _ = await play("SearchR1", texts, fresh("Capital?", "Paris"))
    assert sample.reward == reward and sample.episode is not None
    assert [turn.answers[0]["content"] for turn in sample.episode.turns[:2]] == [
        "<information>Doc 1: capital of France</information>",
        "Write <search> or <answer>.",
    ]


async def test_search_r1_continues_after_an_interruption() -> None:
    texts = ["<search>a</search>", "<answer>Paris</answer>"]
    engine = Writer(texts, {1: 3})
    generate = episodes(engine, of_page("SearchR1"))
    (sample,) = await generate(fresh("Capital?", "Paris"), PARAMS)
    assert sample.status is SampleStatus.ABORTED
    (sample,) = await generate(sample, PARAMS)
    assert (sample.reward, sample.metrics["turns"], len(engine.seen)) == (1.0, 2, 3)


@pytest.fixture
def sandbox() -> None:
    if (problem := sandbox_problem()) is not None:
        pytest.skip(problem)


@pytest.mark.usefixtures("sandbox")
@pytest.mark.parametrize(("last", "reward"), [("It is 42.", 1.0), ("It is 41.", -0.8)])
async def test_retool_runs_programs_that_share_variables_and_rewards_calls(last: str, reward: float) -> None:
    texts = [CALL.format("python", '{"code": "x = 6"}'), CALL.format("python", '{"code": "x * 7"}'), last + END]
    sample, _ = await play("ReTool", texts, fresh("6 * 7?", "42"), turn_timeout_s=120.0, episode_timeout_s=600.0)
    assert sample.reward == pytest.approx(reward) and sample.episode is not None
    assert [turn.answers[0]["content"].strip() for turn in sample.episode.turns[1:2]] == ["42"]
    assert sample.metrics["calls/python"] == 2 and sample.metrics["right"] == (reward == 1.0)


@pytest.mark.parametrize(("number", "reward"), [("A7", 1.0), ("A8", 0.0)])
async def test_tau_bench_rewards_the_database_that_the_agent_leaves(number: str, reward: float) -> None:
    """Every episode has a database of its own; a booking that does not exist is told to the agent."""
    task = {"bookings": {"A7": "Ada", "A8": "Ada"}, "wish": "I am Ada, cancel A7."}
    texts = [
        "Which one?" + END,
        CALL.format("find_booking", '{"customer": "Ada"}'),
        CALL.format("cancel_booking", '{"number": "A9"}'),
        CALL.format("cancel_booking", f'{{"number": "{number}"}}'),
        "It is canceled" + END,
    ]
    sample, engine = await play("Airline", texts, replace(fresh("", {"A8": "Ada"}), metadata=task))
    assert sample.reward == reward and sample.episode is not None
    results = [turn.answers[0]["content"] for turn in sample.episode.turns[:4]]
    assert results == ["I am Ada, cancel A7.", "A7, A8", "error: 'A9'", "canceled the booking of Ada"]
    assert task["bookings"] == {"A7": "Ada", "A8": "Ada"} and "You serve customers" in text(engine.seen[0])
    assert sample.metrics["failures/cancel_booking"] == 1
