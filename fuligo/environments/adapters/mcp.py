"""Tools of an MCP server, for environments.

    class MyEnvironment(ToolEnvironment):
        async def reset(self):
            self.server = await McpServer.connect(McpSettings(command="python", args=("server.py",)))
            ...
        async def close(self):
            await self.server.close()

A server started by a command belongs to one episode; a server at a URL is shared by all episodes.
"""

import asyncio
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field, model_validator

from fuligo.environments.environment import Tool
from fuligo.errors import ConfigError, RolloutError

if TYPE_CHECKING:
    from mcp import Client
    from mcp_types import CallToolResult


class McpSettings(BaseModel):
    """Command that starts an MCP server, or the URL of a running one."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    command: str | None = None
    """Command that starts a server on its standard input and output; None: use `url`."""
    args: tuple[str, ...] = ()
    env: dict[str, str] = Field(default_factory=dict)
    """Environment variables of the command, in addition to the few that it inherits, such as PATH and HOME."""
    url: str | None = None
    """URL of a server with the Streamable HTTP transport; None: start `command`."""
    timeout_s: float = Field(default=30.0, gt=0)
    """Timeout of connecting, and of each call."""

    @model_validator(mode="after")
    def _names_one_server(self) -> "McpSettings":
        if (self.command is None) == (self.url is None):
            raise ValueError("an MCP server needs either a `command` or a `url`, not both")
        return self


class McpTool:
    """Tool of an MCP server, for `ToolEnvironment`."""

    def __init__(self, server: "McpServer", tool: Tool) -> None:
        self._server = server
        self.name = tool.name
        self.description = tool.description
        self.parameters: Mapping[str, Any] = tool.parameters

    async def call(self, arguments: Mapping[str, Any]) -> str:
        """Return the text of the result. Raises RuntimeError if the server reports an error, does not answer in time, or has ended."""
        return await self._server.call(self.name, arguments)


class McpServer:
    """Connection to an MCP server. A dedicated task holds it, because the mcp package requires that the same task opens and closes it."""

    def __init__(self, settings: McpSettings) -> None:
        self._settings = settings
        self._closing = asyncio.Event()
        self._connected: asyncio.Future[Client] = asyncio.get_running_loop().create_future()
        self._task = asyncio.create_task(self._hold())
        self.tools: list[McpTool] = []

    @classmethod
    async def connect(cls, settings: McpSettings) -> "McpServer":
        """Connect and read the tools. Raises ConfigError if mcp is not installed, RolloutError if the server does not start or answer."""
        server = cls(settings)
        try:
            async with asyncio.timeout(settings.timeout_s):
                client = await asyncio.shield(server._connected)
                server.tools = [McpTool(server, tool) for tool in await _list(client)]
        except BaseException as error:
            await server.close()
            if isinstance(error, Exception) and not isinstance(error, ConfigError):
                is_late = isinstance(error, TimeoutError)
                text = f"it did not answer within `timeout_s` = {settings.timeout_s:g} s" if is_late else _reason(error)
                raise RolloutError(f"cannot use the MCP server {settings.command or settings.url}: {text}") from None
            raise
        return server

    async def call(self, name: str, arguments: Mapping[str, Any]) -> str:
        """Call a tool; see `McpTool.call`."""
        client = await self._connected
        if self._task.done():
            raise RuntimeError("the MCP server has ended")
        try:
            result = await client.call_tool(name, dict(arguments), read_timeout_seconds=self._settings.timeout_s)
        except Exception as error:
            raise RuntimeError(_reason(error)) from None
        text = _text(result)
        if result.is_error:
            raise RuntimeError(text)
        return text

    async def close(self) -> None:
        """Close the connection; a server that was started by a command ends."""
        self._closing.set()
        await asyncio.wait({self._task})

    async def _hold(self) -> None:
        try:
            async with _client(self._settings) as client:
                self._connected.set_result(client)
                await self._closing.wait()
        except Exception as error:
            if not self._connected.done():
                self._connected.set_exception(error)


def _client(settings: McpSettings) -> "Client":
    try:
        from mcp import Client, StdioServerParameters
    except ImportError:
        raise ConfigError("cannot use MCP tools: mcp is not installed; pip install 'fuligo[mcp]'") from None
    if settings.command is None:
        return Client(settings.url or "")
    return Client(StdioServerParameters(command=settings.command, args=list(settings.args), env=settings.env))


async def _list(client: "Client") -> list[Tool]:
    tools: list[Tool] = []
    cursor: str | None = None
    while True:
        page = await client.list_tools(cursor=cursor)
        tools += [Tool(tool.name, tool.description or "", tool.input_schema) for tool in page.tools]
        cursor = page.next_cursor
        if cursor is None:
            return tools


def _text(result: "CallToolResult") -> str:
    """Return the text of a result; content other than text becomes `[type]`, because the model reads only text."""
    return "\n".join(part.text if part.type == "text" else f"[{part.type}]" for part in result.content)


def _reason(error: BaseException) -> str:
    """Return the message of an exception or, if it is a group, of the first exception in it; if that is empty, the name of its type."""
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return str(error) or type(error).__name__
