"""Engine of a backend that is not part of fuligo: a plain web server."""

import sys
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import aiohttp

from fuligo.engines.backend import NodePart
from fuligo.engines.host import PortClaims
from fuligo.engines.server_process import ServerProcess


@dataclass(slots=True, frozen=True)
class PlainEngine:
    """Settings of the engine. Implements `engines.backend.EngineSettings`."""

    name: str
    host: str
    ports: tuple[int, ...]
    log_file: Path
    start_timeout_s: float = 60.0

    @property
    def url(self) -> str:
        return f"http://{self.host}:{self.ports[0]}"

    def with_absolute_paths(self) -> Self:
        return replace(self, log_file=self.log_file.absolute())

    def start_part(self, part: NodePart, claims: PortClaims) -> ServerProcess:
        command = [sys.executable, "-m", "http.server", str(self.ports[0]), "--bind", self.host]
        return ServerProcess(self.name, command, log_file=part.log_file, environment=part.environment.reveal())

    async def answers(self, timeout_s: float) -> bool:
        try:
            async with aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(timeout_s)) as session, session.get(self.url) as answer:
                return answer.status == 200
        except (aiohttp.ClientError, TimeoutError):
            return False

    async def require_key(self) -> None:
        """Require no key, since the engine has nothing to protect."""
