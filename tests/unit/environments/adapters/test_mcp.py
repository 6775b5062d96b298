import asyncio
import sys
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest
from pydantic import ValidationError

from fuligo.environments.adapters.mcp import McpServer, McpSettings
from fuligo.errors import RolloutError

pytestmark = pytest.mark.skipif(find_spec("mcp") is None, reason="`make install-dev` installs mcp")

SETTINGS = McpSettings(command=sys.executable, args=(str(Path(__file__).with_name("mcp_server.py")),), env={"GIVEN": "1"})


async def test_tools_are_listed_called_and_kept_apart(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("OPENAI_API_KEY", "sk-secret")
    one, other = await asyncio.gather(McpServer.connect(SETTINGS), McpServer.connect(SETTINGS))
    tools = {tool.name: tool for tool in one.tools}
    assert set(tools) == {"add", "fail", "secrets", "die"}
    assert tools["add"].description == "Add to the counter."
    assert tools["add"].parameters["properties"]["number"]["type"] == "integer"
    assert [await tools["add"].call({"number": 2}) for _ in range(2)] == ["the counter is 2", "the counter is 4"]
    assert await other.call("add", {"number": 1}) == "the counter is 1"
    environment = await tools["secrets"].call({})
    assert "'GIVEN': '1'" in environment
    assert "sk-secret" not in environment

    with pytest.raises(RuntimeError, match="Error executing tool fail"):
        await tools["fail"].call({})
    with pytest.raises(RuntimeError, match="number"):
        await tools["add"].call({"number": "many"})
    with pytest.raises(RuntimeError, match="nothing"):
        await one.call("nothing", {})
    with pytest.raises(RuntimeError):
        await tools["die"].call({})
    with pytest.raises(RuntimeError):
        await tools["add"].call({"number": 2})
    assert await other.call("add", {"number": 1}) == "the counter is 2"

    # A runner calls each method in a task of its own.
    await asyncio.gather(asyncio.create_task(one.close()), asyncio.create_task(other.close()))
    assert not [child for child in psutil.Process().children() if "mcp_server.py" in " ".join(child.cmdline())]


@pytest.mark.parametrize(("command", "reason"), [("no-such-program", "No such file"), ("true", "")])
async def test_server_that_does_not_start_is_refused(command: str, reason: str):
    with pytest.raises(RolloutError, match=f"cannot use the MCP server {command}: .*{reason}"):
        await McpServer.connect(McpSettings(command=command, timeout_s=20))


def test_settings_name_one_server():
    for settings in ({}, {"command": "x", "url": "http://x"}):
        with pytest.raises(ValidationError, match="either a `command` or a `url`, not both"):
            McpSettings.model_validate(settings)
