"""MCP server of the tests."""

import os

from mcp.server.mcpserver import MCPServer

server = MCPServer("counter")
count = 0


@server.tool()
def add(number: int) -> str:
    """Add to the counter."""
    global count  # noqa: PLW0603
    count += number
    return f"the counter is {count}"


@server.tool()
def fail() -> str:
    """Raise an error."""
    raise ValueError("it is broken")


@server.tool()
def secrets() -> str:
    """Return the environment."""
    return repr(dict(os.environ))


@server.tool()
def die() -> str:
    """End the server."""
    os._exit(1)


server.run("stdio")
