"""Access control of the server: this machine only, or visitors with the token."""

from __future__ import annotations

import hmac
import ipaddress
from http.cookies import CookieError, SimpleCookie
from urllib.parse import parse_qsl, urlencode

from starlette.datastructures import Headers
from starlette.responses import PlainTextResponse, RedirectResponse, Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

_HEADERS = ((b"x-content-type-options", b"nosniff"), (b"referrer-policy", b"no-referrer"), (b"cache-control", b"no-store"))


def is_loopback(host: str) -> bool:
    """Return whether only this machine can reach the host."""
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class Access:
    """Middleware that rejects requests without access.

    Without a token, only the machine's own names are served; otherwise a foreign page could make a browser send requests under a name of
    its own that resolves to this machine (DNS rebinding). With a token, `?token=` moves from the address to a cookie.
    """

    def __init__(self, app: ASGIApp, token: str | None, cookie: str) -> None:
        self._app = app
        self._token = token
        self._cookie = cookie

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        refusal = self._refusal(scope)
        if refusal is not None:
            await refusal(scope, receive, send)
            return

        async def with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                message["headers"] = [*message["headers"], *_HEADERS]
            await send(message)

        await self._app(scope, receive, with_headers)

    def _refusal(self, scope: Scope) -> Response | None:
        headers = Headers(scope=scope)
        if scope["method"] not in ("GET", "HEAD"):
            return PlainTextResponse("this server is read-only", 405)
        if self._token is None:
            name = _without_port(headers.get("host", ""))
            return None if is_loopback(name) else PlainTextResponse(f"this server is reachable as localhost, not as {name!r}", 403)
        query = parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True)
        given = dict(query).get("token")
        if given is not None and self._fits(given):
            rest = urlencode([(name, value) for name, value in query if name != "token"])
            answer = RedirectResponse(scope["path"] + (f"?{rest}" if rest else ""), 303)
            answer.set_cookie(self._cookie, given, httponly=True, samesite="strict")
            return answer
        if self._fits(_bearer(headers)) or self._fits(_cookie(headers, self._cookie)):
            return None
        return PlainTextResponse("token missing or wrong; open the address that fuligo view printed, which ends with the token", 401)

    def _fits(self, given: str) -> bool:
        return self._token is not None and hmac.compare_digest(given.encode(), self._token.encode())


def _without_port(host: str) -> str:
    return host[1:].partition("]")[0] if host.startswith("[") else host.partition(":")[0]


def _bearer(headers: Headers) -> str:
    return headers.get("authorization", "").removeprefix("Bearer ")


def _cookie(headers: Headers, name: str) -> str:
    try:
        cookies = SimpleCookie(headers.get("cookie", ""))
    except CookieError:
        return ""
    return cookies[name].value if name in cookies else ""
