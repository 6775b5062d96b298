"""The environments of examples/search and examples/code, played by a script."""

import importlib.util
import json
from pathlib import Path
from typing import Any

import pytest

from fuligo.environments import AssistantTurn, Environment, Row, ToolCall
from fuligo.errors import ConfigError, DataError

EXAMPLES = Path(__file__).parents[3] / "examples"


def environment(example: str, name: str, index: int) -> Environment:
    """Make an environment of an example for a row of its training data."""
    spec = importlib.util.spec_from_file_location(f"example_{example}", EXAMPLES / example / "environment.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    row = json.loads((EXAMPLES / example / "train.jsonl").read_text().splitlines()[index])
    kind: Any = getattr(module, name)
    return kind(Row(row["question"], row["answer"], {}, 0), kind.Settings())


async def call(played: Environment, tool: str, **arguments: str) -> str:
    """Call a tool of an environment and return its result."""
    step = await played.step(AssistantTurn("", tool_calls=(ToolCall(tool, arguments, "123456789"),)))
    assert not step.done
    return step.messages[0]["content"]


@pytest.mark.parametrize("index", range(0, 500, 50))
async def test_search_finds_what_the_question_asks(index: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    pytest.importorskip("bm25s")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    played = environment("search", "Search", index)
    start = await played.reset()
    assert [tool.name for tool in start.tools] == ["search"]
    assert played.row.label in await call(played, "search", query=str(played.row.prompt))
    for answer, reward in ((f"<answer>The {played.row.label}.</answer>", 1.0), (str(played.row.label), 1.0), ("Atlantis", 0.0)):
        step = await played.step(AssistantTurn(answer))
        assert (step.done, step.reward) == (True, reward)


async def test_code_keeps_variables_and_judges_the_last_number():
    try:
        played = environment("code", "Code", 0)
    except ConfigError as problem:  # no sandbox on this machine
        pytest.skip(str(problem))
    try:
        assert "1200 and 4762" in str(played.row.prompt)
        result = await call(played, "python", code="found = [n for n in range(1200, 4763) if all(n % d for d in range(2, 70))]")
        assert result == "(no output)"
        assert await call(played, "python", code="len(found)") == played.row.label
        assert "ZeroDivisionError" in await call(played, "python", code="1 / 0")
        for answer, reward in ((f"There are {played.row.label}", 1.0), ("7", 0.0), ("", 0.0)):
            assert (await played.step(AssistantTurn(answer))).reward == reward
    finally:
        await played.close()


def test_search_without_documents_is_refused_before_the_start(tmp_path: Path):
    module = type(environment("search", "Search", 0))
    with pytest.raises(DataError, match="there is no such file or folder"):
        module.Settings.model_validate({"search": {"documents": str(tmp_path / "none")}})
