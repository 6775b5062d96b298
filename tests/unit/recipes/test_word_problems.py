"""Tests of `examples/word_problems`: what is imitated is right, and the test problems are held out."""

import json
from pathlib import Path

import pytest

from examples.calculator.environment import Calculator, Settings
from examples.warm_start import CHAT_TEMPLATE
from examples.word_problems import make_data
from fuligo.environments import AssistantTurn, Row, ToolCall
from tests import tiny
from tests.config_files import load_yaml


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("word_problems")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("sys.argv", ["make_data", str(tiny.save_checkpoint(folder / "source")), str(folder)])
        make_data.main()
    return folder


def rows(directory: Path, name: str) -> list[dict]:
    return [json.loads(line) for line in (directory / f"{name}.jsonl").read_text().splitlines()]


async def test_shown_calls_solve_their_problems(directory: Path):
    with_tool = [row for row in rows(directory, "shown") if len(row["prompt"]) > 2]
    assert len(with_tool) == pytest.approx(make_data.SHARE_WITH_TOOL * make_data.NUM_SHOWN, rel=0.2)
    for row in with_tool:
        question, asked, result, answer = row["prompt"]
        played = Calculator(Row(question["content"], answer["content"], {}, 0), Settings())
        await played.reset()
        function = asked["tool_calls"][0]["function"]
        step = await played.step(AssistantTurn("", tool_calls=(ToolCall(function["name"], function["arguments"], "123456789"),)))
        assert step.messages[0]["content"] == result["content"] == answer["content"]
        assert (await played.step(AssistantTurn(answer["content"]))).reward == 1.0


def test_names_and_things_of_the_test_problems_are_held_out(directory: Path):
    held_out = {*make_data.NAMES.split()[-make_data.NUM_TEST_WORDS :], *make_data.THINGS.split()[-make_data.NUM_TEST_WORDS :]}
    seen = {row["question"] for row in rows(directory, "train")} | {row["prompt"][0]["content"] for row in rows(directory, "shown")}
    assert not any(word in held_out for text in seen for word in text.replace(".", "").replace("?", "").split())
    assert all(any(word in row["question"] for word in held_out) for row in rows(directory, "test"))


def test_the_model_gets_a_template_that_shows_tools(directory: Path):
    from transformers import AutoTokenizer

    assert AutoTokenizer.from_pretrained(directory / "model").chat_template == CHAT_TEMPLATE


def test_grpo_starts_from_the_last_checkpoint_of_the_warm_start():
    folder = Path(make_data.__file__).parent
    warm_start, config = load_yaml(folder / "sft.yaml"), load_yaml(folder / "config.yaml")
    num_steps = warm_start.data.num_rollout or 0
    assert num_steps * warm_start.rollout.rollout_batch_size == make_data.NUM_SHOWN
    assert config.model.hf_checkpoint == f"runs/word-problems-sft/checkpoints/iter_{num_steps:07d}/hf"
    assert str(config.rollout.environment).endswith("/calculator/environment.py:Calculator")
