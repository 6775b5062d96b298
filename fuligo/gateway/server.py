"""HTTP server of the gateway: one address and one key per session."""

import asyncio
import hmac
import logging
import secrets
import socket
from collections import OrderedDict
from collections.abc import Callable
from functools import partial
from hashlib import sha256
from numbers import Real
from typing import Any

import orjson
from starlette.datastructures import Headers
from starlette.requests import ClientDisconnect
from starlette.requests import Request as HttpRequest
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from fuligo.engines.generation import SamplingParams
from fuligo.engines.host import LOOPBACK, endpoint
from fuligo.engines.http_access import BACKLOG, QuietServer, Strangers, admit, is_foreign, own_names, unless_gone
from fuligo.engines.openai_format import InvalidRequest, error_content, json_response, parse_body
from fuligo.errors import EngineError
from fuligo.gateway import anthropic_messages, openai_responses
from fuligo.gateway.completion import Completion, Dialect
from fuligo.gateway.session import ContextFull, Policy, Session, SessionEnded

logger = logging.getLogger(__name__)
MAX_BODY_BYTES = 32 * 2**20
MAX_REMEMBERED = 4096
"""Number of ended sessions to remember, so that late requests to them get a specific error."""
SHUTDOWN_S = 2
_BEARER = "Bearer "
DIALECTS = {
    "v1/chat/completions": Dialect(parse_body, Completion.body, Completion.events, error_content),
    "v1/responses": openai_responses.DIALECT,
    "v1/messages": anthropic_messages.DIALECT,
}
"""APIs through which agents call the policy, by path."""
NO_RETRY = {"x-should-retry": "false"}
"""Header that tells OpenAI's clients not to retry a request."""


class Gateway:
    """Server on `host` that gives every session a base URL and a random key, and answers only requests with both."""

    def __init__(self, policy: Policy, host: str = LOOPBACK) -> None:
        self._policy = policy
        self._host = host
        self._names = own_names(host)
        self._sessions: dict[str, Session] = {}
        self._ended: OrderedDict[str, bytes] = OrderedDict()
        """Digests of the keys of ended sessions."""
        self.strangers = Strangers()
        self._server: QuietServer | None = None
        self._address = ""
        self._starting = asyncio.Lock()

    async def open(self, params: SamplingParams, *, label: str, priority: int = 0) -> Session:
        """Open a session; the first one starts the server. Raises OSError if the gateway cannot listen on its host."""
        async with self._starting:
            if self._server is None:
                await self._start()
        name = secrets.token_hex(8)
        session = Session(
            self._policy,
            params,
            name=name,
            base_url=f"http://{self._address}/{name}/v1",
            api_key="sk-" + secrets.token_urlsafe(32),
            label=label,
            priority=priority,
        )
        self._sessions[name] = session
        return session

    def end(self, session: Session) -> None:
        """End a session: requests in flight are canceled, and later ones are rejected."""
        session.end()
        if self._sessions.pop(session.name, None) is not None:
            self._ended[session.name] = _digest(session.api_key)
            while len(self._ended) > MAX_REMEMBERED:
                self._ended.popitem(last=False)

    async def close(self) -> None:
        """End all sessions and stop the server."""
        for session in list(self._sessions.values()):
            self.end(session)
        if self._server is not None:
            await self._server.stop()

    async def _start(self) -> None:
        family = socket.AF_INET6 if ":" in self._host else socket.AF_INET
        listener = socket.create_server((self._host, 0), family=family, backlog=BACKLOG)
        host, port = listener.getsockname()[:2]
        self._address = endpoint(socket.gethostname() if host in ("0.0.0.0", "::") else self._host, port)
        self._server = await QuietServer.start(self._app, listener, self.strangers, shutdown_s=SHUTDOWN_S)
        logger.info("agent gateway listening on http://%s; each session has its own key", self._address)

    async def _app(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        try:
            response = await self._response(HttpRequest(scope, receive))
        except ClientDisconnect:
            return
        except Exception:
            logger.exception("the gateway failed to handle a request")
            response = _error(500, "the gateway failed to handle this request; its log has the reason", "server_error")
        await response(scope, receive, send)

    async def _response(self, http: HttpRequest) -> Response:
        """Answer a request. Its body is read only if it has the key of a session."""
        headers, method = http.headers, http.method
        if is_foreign(headers.get("host", ""), self._names):
            return _error(403, f"the gateway is not reachable as {headers.get('host', '')!r:.100}; use the session's base_url")
        name, _, path = http.url.path.removeprefix("/").partition("/")
        session = self._sessions.get(name)
        if session is None or not hmac.compare_digest(_digest(_key(headers)), _digest(session.api_key)):
            if (digest := self._ended.get(name)) is not None and hmac.compare_digest(digest, _digest(_key(headers))):
                return _ended()
            return _error(401, "the key is missing or does not belong to this session; use the session's api_key", code="invalid_api_key")
        admit(http.scope)
        if method == "GET" and path.startswith("v1/models"):
            return self._models(path.removeprefix("v1/models").strip("/"))
        dialect = DIALECTS.get(path)
        if method != "POST" or (dialect is None and path != "v1/reward"):
            return _error(404, f"{method} /{path} is not served; the gateway has /{', /'.join(DIALECTS)}, /v1/models and /v1/reward")
        if headers.get("content-type", "").partition(";")[0].strip() != "application/json":
            return _error(415, "the content type must be application/json")
        raw = await _body(http)
        if raw is None:
            return _error(413, f"the body has more than {MAX_BODY_BYTES // 2**20} MiB; shorten the conversation")
        return await (self._reward(session, raw) if dialect is None else self._answer(session, http, raw, dialect))

    async def _answer(self, session: Session, http: HttpRequest, raw: bytes, dialect: Dialect) -> Response:
        """Answer a request to the policy; errors have the dialect's format."""
        refuse = partial(_error, content=dialect.error)
        try:
            completion = await unless_gone(http, session.complete(raw, dialect.read))
        except ContextFull as error:
            return refuse(400, str(error), param=error.param, code="context_length_exceeded")
        except InvalidRequest as error:
            return refuse(400, str(error), param=error.param)
        except SessionEnded:
            return _ended()
        except EngineError as error:
            return refuse(500, str(error), "server_error", headers=NO_RETRY)
        if completion is None:
            return Response(status_code=499)
        tokenizer = self._policy.tokenizer
        if completion.request.stream:
            return StreamingResponse(dialect.events(completion, tokenizer), media_type="text/event-stream")
        return json_response(dialect.body(completion, tokenizer))

    async def _reward(self, session: Session, raw: bytes) -> Response:
        try:
            body = orjson.loads(raw)
        except orjson.JSONDecodeError as error:
            return _error(400, f"the body is not JSON: {error}")
        reward = body.get("reward") if isinstance(body, dict) else None
        parts = list(reward.values()) if isinstance(reward, dict) else [reward]
        if reward is None or not parts or not all(isinstance(part, Real) and not isinstance(part, bool) for part in parts):
            return _error(
                400, f'the body must be {{"reward": NUMBER}} or {{"reward": {{NAME: NUMBER}}}}, not {body!r:.100}', param="reward"
            )
        if not session.set_reward(reward):
            return _error(409, "the session already has a reward")
        return json_response({"reward": reward})

    def _models(self, name: str) -> Response:
        model = {"id": self._policy.name, "object": "model", "created": 0, "owned_by": "fuligo"}
        return json_response({**model, "id": name} if name else {"object": "list", "data": [model]})


async def _body(http: HttpRequest) -> bytes | None:
    """Return the body, or None if it is too long."""
    if int(http.headers.get("content-length", 0)) > MAX_BODY_BYTES:
        return None
    body = bytearray()
    async for part in http.stream():
        body += part
        if len(body) > MAX_BODY_BYTES:
            return None
    return bytes(body)


def _key(headers: Headers) -> str:
    """Return the key from the header of OpenAI's clients, or else from that of Anthropic's."""
    return headers.get("authorization", "").removeprefix(_BEARER) or headers.get("x-api-key", "")


def _digest(key: str) -> bytes:
    return sha256(key.encode(errors="surrogateescape")).digest()


def _ended() -> Response:
    return _error(410, "the session has ended: its agent returned, failed, or ran out of time", code="session_ended", headers=NO_RETRY)


def _error(
    status: int,
    message: str,
    kind: str = "invalid_request_error",
    *,
    headers: dict[str, str] | None = None,
    content: Callable[..., dict[str, Any]] = error_content,
    **details: str | None,
) -> Response:
    """Return an error. `details`: `param` and `code` of `error_content`."""
    return json_response(content(message, kind, **details), status, headers)
