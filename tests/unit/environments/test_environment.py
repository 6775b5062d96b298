"""Environments, their settings and tools, and the page about them."""

import re
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

import pytest

from fuligo.environments import AssistantTurn, Environment, Row, Rubric, Step, ToolCall, ToolEnvironment, ToolFunction
from fuligo.environments.load import load_environment
from fuligo.errors import ConfigError, HookError
from fuligo.job.hook_checks import check_hooks
from tests.unit.docs.pages import REPOSITORY

PAGE = (REPOSITORY / "docs" / "environments.md").read_text(encoding="utf-8")
WORLD = "tests.unit.rollout.episode_environments"


def test_a_tool_function_is_described_by_its_signature() -> None:
    def look_up(word: str, mode: Literal["exact", "near"] = "near", limit: int = 3) -> str:
        """Look up a word."""
        return f"{word} {mode} {limit + 1}"

    tool = ToolFunction(look_up)
    assert (tool.name, tool.description) == ("look_up", "Look up a word.")
    assert tool.parameters == {
        "type": "object",
        "properties": {
            "word": {"type": "string"},
            "mode": {"type": "string", "enum": ["exact", "near"], "default": "near"},
            "limit": {"type": "integer", "default": 3},
        },
        "required": ["word"],
    }


async def test_a_tool_function_checks_its_arguments() -> None:
    def double(number: int) -> int:
        return 2 * number

    tool = ToolFunction(double)
    assert await tool.call({"number": "21"}) == "42"
    with pytest.raises(ValueError, match="invalid arguments: number: Field required"):
        await tool.call({})
    with pytest.raises(ValueError, match="more: Extra inputs are not permitted"):
        await tool.call({"number": 1, "more": 2})


def test_a_tool_function_needs_types() -> None:
    with pytest.raises(TypeError, match="cannot make a tool of <lambda>: the parameter a needs a type annotation"):
        ToolFunction(lambda a: a)


def test_a_tool_function_takes_its_parameters_by_name() -> None:
    def double(number: int, /) -> int:
        return 2 * number

    with pytest.raises(TypeError, match="cannot make a tool of double: the parameter number cannot be passed by name"):
        ToolFunction(double)


class Offers(ToolEnvironment):
    async def judge(self, turn: AssistantTurn) -> Step:
        return Step(done=True)


async def test_an_unknown_tool_and_a_long_result_are_told_to_the_model() -> None:
    def long(size: int) -> str:
        return "a" * size

    environment = Offers(Row("q", None, {}, 0), None, [long])
    calls = (ToolCall("longer", {}, "a"), ToolCall("long", {"size": 9_000}, "b"))
    step = await environment.step(AssistantTurn("", tool_calls=calls))
    assert step.messages[0]["content"] == "error: there is no tool longer; the tools are long"
    assert step.messages[1]["content"].endswith("a\n[1000 more characters]")
    assert [result.failed for result in step.tool_results] == [True, False]


def test_a_rubric_weighs_its_parts() -> None:
    score = Rubric(correct=1.0, short=0.5).score(correct=1, short=0.5)
    assert (score.reward, score.metrics) == (1.25, {"reward/correct": 1.0, "reward/short": 0.5})
    with pytest.raises(ValueError, match=r"the parts are \['right'\], but the rubric has \['correct'\]"):
        Rubric(correct=1.0).score(right=1)


class NoStep(Environment):
    async def reset(self) -> Any: ...


class PlainStep(NoStep):
    def step(self, turn: AssistantTurn) -> Any: ...


class NoState(PlainStep):
    resumable = True

    async def step(self, turn: AssistantTurn) -> Any: ...


class OtherArguments(NoStep):
    def __init__(self, row: Row) -> None: ...

    async def step(self, turn: AssistantTurn) -> Any: ...


HERE = str(Path(__file__))


@pytest.mark.parametrize(
    ("path", "error"),
    [
        ("fuligo.types.Sample", r"--environment fuligo.types.Sample: the class lacks reset, step, close"),
        (f"{WORLD}.add", "it must be a class with reset, step, close"),
        (f"{WORLD}.Addin", f"{WORLD} has no Addin; did you mean Adding"),
        (f"{HERE}:NoStep", "the class lacks step"),
        (f"{HERE}:PlainStep", "step must be `async def`"),
        (f"{HERE}:NoState", "the class is resumable but lacks state, restore"),
        (f"{HERE}:OtherArguments", r"it is called as \(row, settings\), but its signature is \(row"),
    ],
)
def test_a_class_that_does_not_fit_is_refused(path: str, error: str) -> None:
    with pytest.raises(HookError, match=error):
        load_environment(path, {})


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        ({"reward": "much"}, "reward: Input should be a valid number"),
        ({"rewards": 1}, "rewards: Extra inputs are not permitted; its settings: reward"),
    ],
)
def test_settings_that_do_not_fit_are_refused(settings: dict[str, Any], error: str) -> None:
    with pytest.raises(ConfigError, match=f"--environment-settings does not fit {WORLD}.Counting: .*{error}"):
        load_environment(f"{WORLD}.Counting", settings)
    assert load_environment(f"{WORLD}.Counting", {"reward": 2}).settings == load_environment(f"{WORLD}.Counting", {"reward": 2.0}).settings


def test_the_environments_of_the_page_pass_the_check(tmp_path: Path) -> None:
    from fuligo.config import Config

    blocks = [block for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if "\nclass " in block]
    assert len(blocks) == 3
    for number, block in enumerate(blocks):
        module = ModuleType(f"page_{number}")
        exec(block, module.__dict__)
        (name,) = [
            name
            for name, value in vars(module).items()
            if isinstance(value, type) and issubclass(value, Environment) and value.__module__ == module.__name__
        ]
        file = tmp_path / f"page_{number}.py"
        file.write_text(block)
        config = Config.model_validate({"rollout": {"environment": f"{file}:{name}"}})
        assert list(check_hooks(config).values()) == [None]
