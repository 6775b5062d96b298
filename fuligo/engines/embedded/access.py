"""Access control of the embedded engine: the run's keys, and requests that no foreign page in a browser can make."""

import ipaddress
import socket

import orjson
from starlette.datastructures import Headers
from starlette.responses import Response
from starlette.types import ASGIApp, Receive, Scope, Send

from fuligo.formats.engine_keys import EngineKeys


def protected(app: ASGIApp, keys: EngineKeys, host: str) -> ASGIApp:
    """Return the application behind its access control. Requests are refused before their body is read.

    Args:
        host: name or address that the server was told to listen on
    """
    names = {name.lower() for name in (host, "localhost", socket.gethostname(), socket.getfqdn())}

    async def guarded(scope: Scope, receive: Receive, send: Send) -> None:
        refusal = _refusal(scope, keys, names) if scope["type"] == "http" else None
        await (refusal or app)(scope, receive, send)

    return guarded


def _refusal(scope: Scope, keys: EngineKeys, names: set[str]) -> Response | None:
    headers, method, path = Headers(scope=scope), scope["method"], scope["path"]
    name = _without_port(headers.get("host", ""))
    if not (name in names or _is_address(name)):  # a page's own name that resolves to this machine (DNS rebinding)
        return _refused(403, f"this engine is not reachable as {name!r}; give the machine's own name or its address")
    if not keys.admits(method, path, headers.get("authorization", "")):
        return _refused(401, "the key is missing or wrong")
    if method == "POST" and headers.get("content-type", "").partition(";")[0].strip() != "application/json":
        return _refused(415, "the content type must be application/json")
    return None


def _refused(status: int, message: str) -> Response:
    return Response(orjson.dumps({"success": False, "error": {"message": message}}), status, media_type="application/json")


def _without_port(host: str) -> str:
    name = host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]
    return name.lower()


def _is_address(name: str) -> bool:
    try:
        ipaddress.ip_address(name)
    except ValueError:
        return False
    return True
