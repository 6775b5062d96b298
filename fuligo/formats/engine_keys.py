"""Keys of engines: secrets with which a process may sample from an engine, or control it.

Control includes weight updates, which SGLang unpickles: anyone who controls an engine can run code in it. Each run creates new keys. They
are passed to processes in the environment, never on command lines, which other users can read.
"""

import hmac
import os
import secrets
from collections.abc import Mapping, MutableMapping
from dataclasses import dataclass, field
from typing import Self

REQUESTS_VARIABLE, CONTROL_VARIABLE = "FULIGO_ENGINE_KEY", "FULIGO_ENGINE_ADMIN_KEY"
OPEN_PATHS = ("/health", "/health_generate")
"""Paths that an engine answers without a key."""
_HEADER = "Bearer "


@dataclass(slots=True, frozen=True)
class EngineKeys:
    """Keys of one engine, as SGLang distinguishes them. Calls with an empty key carry no header, and `admits` refuses them."""

    requests: str = field(default="", repr=False)
    """Key for sampling and read-only calls (SGLang's `--api-key`)."""
    control: str = field(default="", repr=False)
    """Key for all calls that change the engine (SGLang's `--admin-api-key`)."""

    @classmethod
    def new(cls) -> Self:
        """Return random keys."""
        return cls(secrets.token_hex(32), secrets.token_hex(32))

    @classmethod
    def of_environment(cls, environment: Mapping[str, str] = os.environ) -> Self:
        """Return the keys in `environment`, for engines that this run did not start; the control key defaults to the sampling key."""
        requests = environment.get(REQUESTS_VARIABLE, "")
        return cls(requests, environment.get(CONTROL_VARIABLE, "") or requests)

    @classmethod
    def taken_from_environment(cls, environment: MutableMapping[str, str] = os.environ) -> Self:
        """Return the keys like `of_environment`, and remove them from the environment, so that child processes do not inherit them."""
        keys = cls.of_environment(environment)
        for name in (REQUESTS_VARIABLE, CONTROL_VARIABLE):
            environment.pop(name, None)
        return keys

    @property
    def environment(self) -> dict[str, str]:
        """Environment variables that pass the keys to another process."""
        return {REQUESTS_VARIABLE: self.requests, CONTROL_VARIABLE: self.control}

    def headers(self, method: str, path: str) -> dict[str, str]:
        """Return the Authorization header of a call; empty without a key."""
        key = self._key_for(method, path)
        return {"Authorization": _HEADER + key} if key else {}

    def admits(self, method: str, path: str, authorization: str) -> bool:
        """Return whether a call with this Authorization header may be answered."""
        if path in OPEN_PATHS:
            return True
        key = self._key_for(method, path)
        return key != "" and hmac.compare_digest(authorization.encode(), (_HEADER + key).encode())

    def knows(self, authorization: str) -> bool:
        """Return whether an Authorization header contains one of the keys."""
        given = authorization.encode()
        return any(key != "" and hmac.compare_digest(given, (_HEADER + key).encode()) for key in (self.requests, self.control))

    def _key_for(self, method: str, path: str) -> str:
        return self.requests if method == "GET" or path in SAMPLING_PATHS else self.control


SAMPLING_PATHS = ("/generate", "/v1/chat/completions", "/v1/completions")
"""Paths of POST calls that the sampling key admits; all other POST calls change the engine."""
NO_KEYS = EngineKeys()
