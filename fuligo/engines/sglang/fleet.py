"""Fleet of SGLang engines behind a router: started together, supervised, restarted, and stopped together."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace

from fuligo.engines.backend import Server, SharedDevices, SyncRestarted
from fuligo.engines.client import EngineClient
from fuligo.engines.connection import DEFAULT, ControlDeadlines
from fuligo.engines.engine import InferenceEngine
from fuligo.engines.group import EngineGroup
from fuligo.engines.sglang.router import Router, RouterSettings, launch_router
from fuligo.engines.sglang.server import ServerSettings, SGLangServer
from fuligo.errors import EngineError

logger = logging.getLogger(__name__)

WATCH_S = 0.5
"""Seconds between checks of the processes; their health is checked less often."""
MAX_RESTARTS = 3
"""Largest number of restarts of one engine, or of the router, in one run."""
ENDING_S = 15.0
"""Seconds that a crashed SGLang may take to end: it closes its port first, then logs the error."""
ENDING_POLL_S = 0.5
"""Seconds between checks of whether a server that does not answer has ended."""
Start = Callable[[ServerSettings], Server[ServerSettings]]
"""Function that starts an engine, on this machine or on its node, and does not wait until it is ready."""


@dataclass(slots=True, frozen=True)
class FleetSettings:
    """Settings of a fleet's processes and their supervision."""

    servers: tuple[ServerSettings, ...]
    router: RouterSettings
    restart: bool
    """True to restart dead engines and routers (--use-fault-tolerance); False: the run ends if one dies."""
    health_interval_s: float
    health_timeout_s: float
    request_retries: int
    request_timeout_s: float
    deadlines: ControlDeadlines = DEFAULT
    adapter: str | None = None
    """Name of the LoRA adapter that requests use; None without one."""


@dataclass(slots=True)
class FleetEngine:
    """Engine of a fleet. A restart replaces the server and the client."""

    server: Server[ServerSettings]
    client: InferenceEngine
    health_timeout_s: float
    num_restarts: int = 0
    restart: asyncio.Task[None] | None = None
    is_moving: bool = False
    """True while the engine's processes are being started or stopped: the device memory that they hold is then unknown."""

    @property
    def is_restarting(self) -> bool:
        """True while a restart is in progress. Raises EngineError if the restart failed."""
        if self.restart is not None and self.restart.done() and not self.restart.cancelled():
            self.restart.result()
        return self.restart is not None

    async def is_dead(self, *, ask_health: bool) -> bool:
        """Return whether the engine's process has ended or, with `ask_health`, its health check fails."""
        if not self.server.alive:
            return True
        return ask_health and not await self.server.answers(self.health_timeout_s)

    async def serves(self) -> bool:
        """Return whether the server and its scheduler answer; a scheduler can hang forever in a broken process group.

        Return False once a control call was overdue: whether the engine is paused, and which memory it holds, is then unknown.
        """
        if self.client.is_overdue:
            return False
        return not await self.is_dead(ask_health=True) and await self.client.scheduler_answers(self.health_timeout_s)

    async def answers_or_ends(self) -> bool:
        """Return whether the server answers within `ENDING_S`. If it does not, it gets this time to write the reason to its log and end."""
        with suppress(TimeoutError):
            async with asyncio.timeout(ENDING_S):
                while self.server.alive:
                    if await self.server.answers(ENDING_S):
                        return True
                    await asyncio.sleep(ENDING_POLL_S)
        return False

    def does_not_answer(self) -> EngineError:
        return EngineError(
            f"{self.server.settings.name} ({self.server.url}) does not answer; its log is {self.server.settings.log_file}. "
            "Resume from the last checkpoint; with --use-fault-tolerance it would have been restarted."
        )


class Fleet:
    """Running engines and their router, used through `group`."""

    def __init__(
        self, settings: FleetSettings, servers: Sequence[Server[ServerSettings]], router: Router, start: Start = SGLangServer
    ) -> None:
        self._settings = settings
        self._start = start
        self.router = router
        self._engines = [FleetEngine(server, _client(settings, server.settings, start=0), settings.health_timeout_s) for server in servers]
        self._router_restarts = 0
        self._router_is_stuck = False
        """True if the router waits for answers that a lost machine will never send."""
        # The router restarts in seconds; requests to it are retried for a minute.
        retries = max(settings.request_retries, 40)
        patient = EngineClient(router.url, router.keys, retries=retries, timeout_s=settings.request_timeout_s, adapter=settings.adapter)
        split = settings.router.prefill_decode
        self.group = EngineGroup([engine.client for engine in self._engines], patient, membership=self, split=split)
        self.sync_restarted: SyncRestarted = _with_next_sync
        self.devices: SharedDevices | None = None

    @property
    def url(self) -> str:
        """Address of the router."""
        return self.router.url

    @property
    def is_settled(self) -> bool:
        """True if no engine is being started or stopped."""
        return not any(engine.is_moving for engine in self._engines)

    @property
    def servers(self) -> list[Server[ServerSettings]]:
        return [engine.server for engine in self._engines]

    @classmethod
    async def launch(cls, settings: FleetSettings, start: Start = SGLangServer) -> Fleet:
        """Start engines and router; return when the router sends requests to every engine.

        Raises EngineError with the last lines of the log if one did not start; all others are stopped first.
        """
        servers: list[Server[ServerSettings]] = []
        routers: list[Router] = []

        async def start_router() -> None:
            routers.append(await launch_router(settings.router))

        try:
            for server_settings in settings.servers:
                servers.append(start(server_settings))
            async with asyncio.TaskGroup() as starting:
                starting.create_task(start_router())
                for server in servers:
                    starting.create_task(server.wait_ready())
            [router] = routers
            for server in servers:
                await _add(router, server.settings)
        except BaseException as error:
            await _stop_all(*servers, *routers)
            if isinstance(error, ExceptionGroup):
                raise error.exceptions[0] from None  # which canceled the other tasks
            raise
        return cls(settings, servers, router, start)

    async def watch(self) -> None:
        """Supervise the processes until canceled. Raises EngineError if a process died and must not be restarted, or died too often."""
        next_health = 0.0
        clock = asyncio.get_running_loop().time
        while True:
            await asyncio.sleep(WATCH_S)
            if not self.router.alive or self._router_is_stuck:
                await self._restart_router()
            ask_health = clock() >= next_health
            if ask_health:
                next_health = clock() + self._settings.health_interval_s
            asked = [(engine, engine.server) for engine in self._engines if not engine.is_restarting]
            dead = await asyncio.gather(*(engine.is_dead(ask_health=ask_health) for engine, _ in asked))
            for (engine, server), is_dead in zip(asked, dead):
                if is_dead and not engine.is_restarting and engine.server is server:  # not restarted since
                    await self._lose(engine)

    async def is_lost(self, client: InferenceEngine) -> bool:
        """Return whether an engine whose call failed is dead or hangs, and restart it if so. Always False if engines are not restarted."""
        if not self._settings.restart:
            return False
        engine = self._engine_of(client)
        if engine is not None and await engine.serves():
            return False
        if engine is not None and engine is self._engine_of(client):  # no other task has noticed it since
            await self._lose(engine)
        return True

    def _engine_of(self, client: InferenceEngine) -> FleetEngine | None:
        """Return the engine of a client; None if the client was replaced, or its engine is being restarted and not yet joining."""
        engine = next((engine for engine in self._engines if engine.client is client), None)
        return None if engine is None or (engine.is_restarting and client not in self.group.joining) else engine

    async def check_alive(self) -> None:
        """Check every process after a call failed; engines that do not answer get time to end. No-op if dead engines are restarted.

        Raises EngineError if an engine hangs, or an engine or the router has ended (with the last lines of its log).
        """
        if self._settings.restart:
            return
        answering = await asyncio.gather(*(engine.answers_or_ends() for engine in self._engines))
        for engine, answers in zip(self._engines, answering, strict=True):
            engine.server.check_alive()
            if not answers or engine.client.is_overdue:
                raise engine.does_not_answer()
        self.router.check_alive()

    async def admit(self, clients: Sequence[InferenceEngine]) -> None:
        """Put restarted engines, which have the current weights, back into service."""
        for engine in self._engines:
            if engine.client in clients and await self._enlist(engine):
                logger.info("%s (%s) is serving requests", engine.server.settings.name, engine.server.url)

    async def _enlist(self, engine: FleetEngine) -> bool:
        """Add the engine to the router; return False if either is lost and is being restarted.

        Raises EngineError if the router refuses an engine that is alive, that this task is restarting, or that must not be restarted.
        """
        try:
            await _add(self.router, engine.server.settings)
        except EngineError:
            if not self.router.alive:
                return False  # the next router gets all engines that serve
            restarts_itself = engine.restart is asyncio.current_task()
            if restarts_itself or not self._settings.restart or await engine.serves():
                raise
            await self._lose(engine)
            return False
        return True

    async def serve_as_loaded(self, client: InferenceEngine) -> bool:
        """Put an engine whose weights are never synced back into service with the weights that it started with; return True."""
        await self.group.admit([client])
        return True

    async def stop(self) -> None:
        """Stop engines and router; return when all their processes have ended."""
        for engine in self._engines:
            if engine.restart is not None:
                engine.restart.cancel()
        await asyncio.gather(*(engine.restart for engine in self._engines if engine.restart is not None), return_exceptions=True)
        await asyncio.gather(*(engine.client.close() for engine in self._engines))  # including those that wait for weights
        await self.group.close()
        await _stop_all(*self.servers, self.router)

    async def _lose(self, engine: FleetEngine) -> None:
        """Remove a dead engine from the group and restart it in the background; a restart in progress begins anew.

        Raises EngineError if engines are not restarted, or this one died too often.
        """
        if not self._settings.restart:
            await engine.answers_or_ends()
            engine.server.check_alive()
            raise engine.does_not_answer()
        engine.num_restarts += 1
        if engine.num_restarts > MAX_RESTARTS:
            engine.server.check_alive()
            raise EngineError(
                f"cannot restart {engine.server.settings.name}: it died {engine.num_restarts} times; see its log "
                f"{engine.server.settings.log_file}, then resume from the last checkpoint"
            )
        settings = engine.server.settings
        logger.warning("%s (%s) died; retrying its requests on other engines and restarting it", settings.name, settings.url)
        self.group.remove(engine.client)
        engine.is_moving = True
        if engine.restart is not None and engine.restart is not asyncio.current_task():
            engine.restart.cancel()
        engine.restart = asyncio.create_task(self._restart(engine))
        for other in self._engines:
            if other.restart is None and other.client in self.group.joining:
                other.restart = asyncio.create_task(self._sync_now(other))

    async def _restart(self, engine: FleetEngine) -> None:
        """Restart a dead engine, again if it fails, until it has its weights or waits for them. Raises EngineError if it died too often."""
        await engine.client.give_up()
        try:
            await self.router.remove(engine.server.url)
        except EngineError as error:  # harmless: the router checks engines' health, and a new router gets only engines that serve
            logger.warning("cannot remove %s from the router: %s", engine.server.settings.name, error)
        while True:
            engine.is_moving = True
            await engine.server.stop()
            engine.is_moving = False
            if engine.server.is_lost:
                self._continue_without(engine)
                return
            try:
                await self._start_new(engine)
                served = await self.sync_restarted(engine.client)
            except EngineError as error:
                self.group.remove(engine.client)
                await engine.client.give_up()
                engine.num_restarts += 1
                if engine.num_restarts > MAX_RESTARTS:
                    raise
                logger.warning("restart of %s failed; retrying: %s", engine.server.settings.name, error)
            else:
                later = "" if served else "; it receives its weights at the next weight sync"
                logger.info("%s restarted%s", engine.server.settings.name, later)
                engine.restart = None
                return

    async def _start_new(self, engine: FleetEngine) -> None:
        """Start a new process for an engine and add its client to `group.joining`. Raises EngineError if it did not start."""
        if self.devices is not None:
            await self.devices.wait_for_room()
        engine.is_moving = True
        engine.server = self._start(replace(engine.server.settings, turn=None))  # its first process has had it
        await engine.server.wait_ready()
        engine.client = _client(self._settings, engine.server.settings, start=engine.num_restarts)
        if self.devices is not None:
            await self.devices.align(engine.client, self.group)
        self.group.joining.append(engine.client)
        engine.is_moving = False

    async def _sync_now(self, engine: FleetEngine) -> None:
        """Sync a restarted engine without waiting for the next weight sync, because another engine died and none may be left to serve."""
        try:
            await self.sync_restarted(engine.client)
        except EngineError as error:
            logger.warning("weight sync to %s failed: %s", engine.server.settings.name, error)
            await self._lose(engine)
        else:
            engine.restart = None

    def _continue_without(self, engine: FleetEngine) -> None:
        """Remove an engine whose machine is lost. Raises EngineError if no other engine of its worker type is left."""
        server = engine.server.settings
        others = [other for other in self._engines if other is not engine]
        if not any(other.server.settings.worker_type == server.worker_type for other in others):
            raise EngineError(
                f"{server.name} was lost with its machine {server.host}, and no other engine is left for its requests; resume from the "
                "last checkpoint on other machines"
            )
        self._engines = others
        logger.warning("%s was lost with its machine %s; continuing without it", server.name, server.host)
        self._router_is_stuck = True

    async def _restart_router(self) -> None:
        """Start a new router for the engines that serve. Raises EngineError if it must not be restarted, or did not start."""
        if self._router_is_stuck:
            self._router_is_stuck = False
            logger.warning("restarting the router to retry requests of a lost machine on other engines")
        else:
            if not self._settings.restart or self._router_restarts == MAX_RESTARTS:
                self.router.check_alive()
            self._router_restarts += 1
            logger.warning("the router died; restarting it")
        await self.router.stop()
        self.router = await launch_router(self._settings.router)
        for engine in self._engines:
            if engine.client in self.group.clients:
                await self._enlist(engine)


def _client(settings: FleetSettings, server: ServerSettings, *, start: int) -> InferenceEngine:
    return EngineClient(
        server.url,
        server.keys,
        retries=settings.request_retries,
        timeout_s=settings.request_timeout_s,
        deadlines=settings.deadlines,
        num_ranks=server.tp_size,
        start=start,
        number=server.number,
        adapter=settings.adapter,
    )


async def _add(router: Router, server: ServerSettings) -> None:
    """Add an engine to a router; return when the router sends requests to it."""
    bootstrap_port = server.ports.bootstrap if server.worker_type == "prefill" else None
    await router.add(server.url, server.keys.requests, worker_type=server.worker_type, bootstrap_port=bootstrap_port)


async def _with_next_sync(_: InferenceEngine) -> bool:
    """Leave a restarted engine to the next weight sync: the default of `Fleet.sync_restarted`."""
    return False


async def _stop_all(*processes: Server[ServerSettings] | Router) -> None:
    await asyncio.gather(*(process.stop() for process in processes))
