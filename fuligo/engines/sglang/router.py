"""sglang-router, which gives several engines one address: its process, and the calls that add and remove engines.

Behavior of 0.3.2: adding and removing a worker is asynchronous (202), an unanswered request is retried on another worker, control calls
are not forwarded to the engines, and fields of `/generate` that are not in the router's schema are dropped.
"""

import secrets
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import aiohttp

from fuligo.config.passthrough import command_line
from fuligo.config.secret import Environment
from fuligo.engines.host import bracketed, endpoint
from fuligo.engines.server_process import ServerProcess, secrets_of
from fuligo.errors import EngineError
from fuligo.formats.engine_keys import EngineKeys

KEY_VARIABLE = "FULIGO_ROUTER_KEY"
LAUNCH = f"""
import os, sys
sys.modules["sglang"] = None
sys.argv += ["--api-key", os.environ.pop("{KEY_VARIABLE}")]
from sglang_router.launch_router import main
main()
"""
"""Program that starts the router with its key from the environment, since other users could read it on the command line.

It blocks the import of SGLang. The router would import SGLang and torch for tracing that is not used, which takes seconds of CPU time and
hundreds of megabytes while the engines start on the same cores."""
WorkerType = Literal["regular", "prefill", "decode"]
REQUEST_TIMEOUT_S = 10.0


@dataclass(slots=True, frozen=True)
class RouterSettings:
    """Settings of a router."""

    log_file: Path
    host: str
    """Address at which the driver and the engines' hosts reach the router."""
    port: int
    prometheus_port: int
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """The router's arguments (`--router-*`), with underscores in the names."""
    name: str = "router"
    prefill_decode: bool = False
    """True if every request passes through a prefill and a decode engine."""
    python: str = sys.executable
    """Python interpreter in whose environment sglang-router is installed."""
    environment: Environment = field(default_factory=Environment)
    start_timeout_s: float = 60.0
    key: str = field(default_factory=lambda: secrets.token_hex(32), repr=False)
    """Secret that every caller of the router must send."""

    def command(self) -> list[str]:
        own: dict[str, Any] = {
            "host": bracketed(self.host),
            "port": self.port,
            "prometheus_host": bracketed(self.host),
            "prometheus_port": self.prometheus_port,
            "worker_startup_check_interval": 1,
            "log_level": "warn",
            "cb_timeout_duration_secs": 5,  # an engine that failed ten times in a row gets no requests for 5 s instead of a minute
        }
        if self.prefill_decode:
            # Requests that are handed over during an abort are answered with errors. The router must neither retry them on paused engines
            # nor count them as failures, after which the engine would get no requests for a minute.
            own |= {"pd_disaggregation": True, "disable_retries": True, "disable_circuit_breaker": True}
        return [self.python, "-c", LAUNCH, *command_line("router", {**own, **self.arguments})]


@dataclass(slots=True, frozen=True)
class Worker:
    """Engine in the router's list."""

    id: str
    url: str
    is_healthy: bool


class Router(ServerProcess):
    """Running router."""

    def __init__(self, settings: RouterSettings) -> None:
        super().__init__(
            settings.name,
            settings.command(),
            log_file=settings.log_file,
            environment={**settings.environment.reveal(), KEY_VARIABLE: settings.key},
            secrets=[settings.key, *secrets_of(settings.arguments, settings.environment)],
        )
        self.url = f"http://{endpoint(settings.host, settings.port)}"
        self.keys = EngineKeys(settings.key, settings.key)

    async def add(
        self, url: str, key: str, *, worker_type: WorkerType = "regular", bootstrap_port: int | None = None, timeout_s: float = 60.0
    ) -> None:
        """Add the engine at `url`; return when the router sends requests to it. Raises EngineError if that does not happen in time.

        `key`: key that the router's requests to the engine carry. `bootstrap_port`: port of a prefill engine for its decode engines.
        """
        body: dict[str, Any] = {"url": url, "api_key": key, "worker_type": worker_type}
        if bootstrap_port is not None:
            body["bootstrap_port"] = bootstrap_port
        await self._request("POST", "/workers", body)

        async def serving() -> bool:
            return any(worker.url == url and worker.is_healthy for worker in await self.workers())

        await self.wait_until(serving, timeout_s, what=f"the router did not add engine {url}")

    async def remove(self, url: str, *, timeout_s: float = 60.0) -> None:
        """Remove the engine at `url`, if the router has it; return when no more requests are sent to it.

        Raises EngineError if the router refuses, or does not remove the engine in time.
        """
        for worker in await self.workers():
            if worker.url == url:
                await self._request("DELETE", f"/workers/{worker.id}")

        async def gone() -> bool:
            return all(worker.url != url for worker in await self.workers())

        await self.wait_until(gone, timeout_s, what=f"the router did not remove engine {url}")

    async def workers(self) -> list[Worker]:
        """Return the engines that are added to the router. Raises EngineError if the router does not answer."""
        answer = await self._request("GET", "/workers")
        return [Worker(worker["id"], worker["url"], worker["is_healthy"]) for worker in answer["workers"]]

    async def answers(self) -> bool:
        """Return whether the router answers; it may have no engines yet."""
        try:
            await self._request("GET", "/workers")
        except EngineError:
            return False
        return True

    async def _request(self, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
        """Call the router's API. Raises EngineError if the router did not answer, or answered with an error."""
        timeout = aiohttp.ClientTimeout(total=REQUEST_TIMEOUT_S)
        headers = self.keys.headers(method, path)
        try:
            async with (
                aiohttp.ClientSession(timeout=timeout, headers=headers) as session,
                session.request(method, self.url + path, json=body) as response,
            ):
                if response.status >= 300:
                    raise EngineError(
                        f"router {self.url} answered {method} {path} with status {response.status}: {(await response.text())[:500]}"
                    )
                return await response.json()
        except (aiohttp.ClientError, TimeoutError) as error:
            raise EngineError(f"cannot reach router {self.url} ({method} {path}): {type(error).__name__}: {error}") from error


async def launch_router(settings: RouterSettings) -> Router:
    """Start a router without engines; return when it answers. Raises EngineError with the last lines of its log if it does not."""
    router = Router(settings)
    try:
        await router.wait_until(router.answers, settings.start_timeout_s)
    except BaseException:
        await router.stop()
        raise
    return router
