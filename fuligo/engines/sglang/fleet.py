"""SGLang engines behind a router, as one: started together, watched, restarted, ended together."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from fuligo.engines.client import EngineClient
from fuligo.engines.deadlines import DEFAULT, ControlDeadlines
from fuligo.engines.group import EngineGroup
from fuligo.engines.router import Router, RouterSettings, launch_router
from fuligo.engines.sglang.engine import FleetEngine
from fuligo.engines.sglang.server import Server, ServerSettings, SGLangServer
from fuligo.engines.shared_devices import SharedDevices
from fuligo.errors import EngineError

logger = logging.getLogger(__name__)

WATCH_S = 0.5
"""Between looks at the processes; their health is asked for less often."""
MAX_RESTARTS = 3
"""Of one engine or of the router in one run: what dies more often is broken, not unlucky."""
Renew = Callable[[EngineClient], Awaitable[bool]]
"""Give a restarted engine the current weights; False where that must wait for the next weight sync."""
Start = Callable[[ServerSettings], Server]
"""Begins to start an engine; on this machine, or wherever it has its place."""


@dataclass(slots=True, frozen=True)
class FleetSettings:
    """What to start, and how to watch it."""

    servers: tuple[ServerSettings, ...]
    router: RouterSettings
    restart: bool
    """A dead engine or router is started again (--use-fault-tolerance); else it ends the run."""
    health_interval_s: float
    health_timeout_s: float
    request_retries: int
    request_timeout_s: float
    deadlines: ControlDeadlines = DEFAULT
    """Of calls that are no requests."""


class Fleet:
    """Running engines and their router. Requests go through `group`."""

    def __init__(self, settings: FleetSettings, servers: Sequence[Server], router: Router, start: Start = SGLangServer) -> None:
        self._settings = settings
        self._start = start
        self.router = router
        self._engines = [FleetEngine(server, _client(settings, server.settings, start=0), settings.health_timeout_s) for server in servers]
        self._router_restarts = 0
        self._router_waits_in_vain = False
        """Requests are open in it that a lost machine will not answer."""
        # Requests outlive a restart of the router: it takes seconds, they are tried for a minute.
        patient = EngineClient(router.url, retries=max(settings.request_retries, 40), timeout_s=settings.request_timeout_s)
        split = settings.router.prefill_decode
        self.group = EngineGroup([engine.client for engine in self._engines], patient, membership=self, split=split)
        self.renew: Renew = _with_next_sync
        self.devices: SharedDevices | None = None
        """None if the engines have devices of their own."""

    @property
    def is_settled(self) -> bool:
        """No engine is being started, and nothing is left of one that died."""
        return not any(engine.is_moving for engine in self._engines)

    @property
    def servers(self) -> list[Server]:
        return [engine.server for engine in self._engines]

    @classmethod
    async def launch(cls, settings: FleetSettings, start: Start = SGLangServer) -> Fleet:
        """Start everything; returns when the router sends requests to every engine.

        Raises:
            EngineError: one did not start; carries the last lines of its log, and nothing is left running
        """
        servers: list[Server] = []
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
                await _enlist(router, server.settings)
        except BaseException as error:
            await _stop_all(*servers, *routers)
            if isinstance(error, ExceptionGroup):
                raise error.exceptions[0] from None  # the others were cancelled because of it
            raise
        return cls(settings, servers, router, start)

    async def watch(self) -> None:
        """Look after the processes until cancelled.

        Raises:
            EngineError: one died and is not to be restarted, or died too often
        """
        next_health = 0.0
        clock = asyncio.get_running_loop().time
        while True:
            await asyncio.sleep(WATCH_S)
            if not self.router.process.alive or self._router_waits_in_vain:
                await self._restart_router()
            ask_health = clock() >= next_health
            if ask_health:
                next_health = clock() + self._settings.health_interval_s
            asked = [(engine, engine.server) for engine in self._engines if not engine.is_restarting]
            dead = await asyncio.gather(*(engine.is_dead(ask_health=ask_health) for engine, _ in asked))
            for (engine, server), is_dead in zip(asked, dead):
                if is_dead and not engine.is_restarting and engine.server is server:  # it may have been restarted meanwhile
                    await self._lose(engine)

    async def is_lost(self, client: EngineClient) -> bool:
        """A call to this engine failed: whether it is because the engine is dead or hangs, and will be seen to."""
        if not self._settings.restart:
            return False
        engine = self._engine_of(client)
        if engine is not None and await engine.serves():
            return False
        if engine is not None and engine is self._engine_of(client):  # nobody else saw it meanwhile
            await self._lose(engine)
        return True

    def _engine_of(self, client: EngineClient) -> FleetEngine | None:
        """None of one that is being restarted, until it waits for weights."""
        engine = next((engine for engine in self._engines if engine.client is client), None)
        return None if engine is None or (engine.is_restarting and client not in self.group.joining) else engine

    async def check_alive(self) -> None:
        """After a call failed: who does not answer gets the time to end, and to say why. Nothing where the dead are restarted.

        Raises:
            EngineError: an engine does not answer, or it or the router has ended: then with the last lines of its log
        """
        if self._settings.restart:
            return
        answering = await asyncio.gather(*(engine.answers_or_ends() for engine in self._engines))
        for engine, answers in zip(self._engines, answering, strict=True):
            engine.server.check_alive()
            if not answers or engine.client.is_overdue:
                raise engine.does_not_answer()
        self.router.process.check_alive()

    async def admit(self, clients: Sequence[EngineClient]) -> None:
        """See `engines.group.Membership`."""
        for engine in self._engines:
            if engine.client in clients and await self._takes_up(engine):
                logger.info("%s (%s) is in service", engine.server.settings.name, engine.server.url)

    async def _takes_up(self, engine: FleetEngine) -> bool:
        """Whether the router has taken up the engine; else one of them is lost, and is seen to.

        Raises:
            EngineError: the router refuses an engine that lives
        """
        try:
            await _enlist(self.router, engine.server.settings)
        except EngineError:
            if not self.router.process.alive:
                return False  # the next one is told of all that serve
            restarts_itself = engine.restart is asyncio.current_task()
            if restarts_itself or not self._settings.restart or await engine.serves():
                raise
            await self._lose(engine)
            return False
        return True

    async def serve_as_loaded(self, client: EngineClient) -> bool:
        """The `Renew` of engines whose weights are never synced: the weights that they start with are right."""
        await self.group.admit([client])
        return True

    async def stop(self) -> None:
        """Returns when nothing of the fleet is left."""
        for engine in self._engines:
            if engine.restart is not None:
                engine.restart.cancel()
        await asyncio.gather(*(engine.restart for engine in self._engines if engine.restart is not None), return_exceptions=True)
        await asyncio.gather(*(engine.client.close() for engine in self._engines))  # also of those that wait for weights
        await self.group.close()
        await _stop_all(*self.servers, self.router)

    async def _lose(self, engine: FleetEngine) -> None:
        """Take a dead engine out of service, and start it again in the background; again from the beginning, if it was being restarted.

        Raises:
            EngineError: it is not to be restarted, or was lost too often
        """
        if not self._settings.restart:
            await engine.answers_or_ends()
            engine.server.check_alive()
            raise engine.does_not_answer()
        engine.num_restarts += 1
        if engine.num_restarts > MAX_RESTARTS:
            engine.server.check_alive()
            raise EngineError(
                f"{engine.server.settings.name} was lost {engine.num_restarts} times; its log is {engine.server.settings.log_file}"
            )
        logger.warning("%s (%s) is gone; its requests go elsewhere, it is restarted", engine.server.settings.name, engine.server.url)
        self.group.remove(engine.client)
        engine.is_moving = True
        if engine.restart is not None and engine.restart is not asyncio.current_task():
            engine.restart.cancel()
        engine.restart = asyncio.create_task(self._restart(engine))
        for other in self._engines:
            if other.restart is None and other.client in self.group.joining:
                other.restart = asyncio.create_task(self._renew_now(other))

    async def _restart(self, engine: FleetEngine) -> None:
        """
        Raises:
            EngineError: it died too often
        """
        await engine.client.give_up()
        try:
            await self.router.remove(engine.server.url)
        except EngineError as error:  # the next router is told of those alone that serve; this one asks for their health
            logger.warning("the router was not told that %s is gone: %s", engine.server.settings.name, error)
        while True:
            engine.is_moving = True
            await engine.server.stop()
            engine.is_moving = False
            if engine.server.is_lost:
                self._go_on_without(engine)
                return
            try:
                await self._start_again(engine)
                served = await self.renew(engine.client)
            except EngineError as error:
                self.group.remove(engine.client)
                await engine.client.give_up()
                engine.num_restarts += 1
                if engine.num_restarts > MAX_RESTARTS:
                    raise
                logger.warning("%s did not come back, it is tried again: %s", engine.server.settings.name, error)
            else:
                logger.info("%s is running again%s", engine.server.settings.name, "" if served else "; the next weight sync takes it along")
                engine.restart = None
                return

    async def _start_again(self, engine: FleetEngine) -> None:
        """
        Raises:
            EngineError: it did not start
        """
        if self.devices is not None:
            await self.devices.wait_for_room()
        engine.is_moving = True
        engine.server = self._start(engine.server.settings)
        await engine.server.wait_ready()
        engine.client = _client(self._settings, engine.server.settings, start=engine.num_restarts)
        if self.devices is not None:
            await self.devices.align(engine.client, self.group)
        self.group.joining.append(engine.client)
        engine.is_moving = False

    async def _renew_now(self, engine: FleetEngine) -> None:
        """It could wait for the next weight sync while another served.

        Raises:
            EngineError: it was lost too often
        """
        try:
            await self.renew(engine.client)
        except EngineError as error:
            logger.warning("%s did not take the weights: %s", engine.server.settings.name, error)
            await self._lose(engine)
        else:
            engine.restart = None

    def _go_on_without(self, engine: FleetEngine) -> None:
        """
        Raises:
            EngineError: none is left that does its work
        """
        server = engine.server.settings
        others = [other for other in self._engines if other is not engine]
        if not any(other.server.settings.worker_type == server.worker_type for other in others):
            raise EngineError(f"{server.name} is gone with its machine {server.host}, and no other is left: resume on other machines")
        self._engines = others
        logger.warning("%s is gone with its machine %s; the run goes on without it", server.name, server.host)
        self._router_waits_in_vain = True

    async def _restart_router(self) -> None:
        """
        Raises:
            EngineError: it is not to be restarted, or did not start
        """
        if self._router_waits_in_vain:
            self._router_waits_in_vain = False
            logger.warning("the router is restarted: what it waits for is asked of other engines")
            await self.router.stop()
        else:
            if not self._settings.restart or self._router_restarts == MAX_RESTARTS:
                self.router.process.check_alive()
            self._router_restarts += 1
            logger.warning("the router is gone; it is restarted")
        self.router = await launch_router(self._settings.router)
        for engine in self._engines:
            if engine.client in self.group.clients:
                await self._takes_up(engine)


def _client(settings: FleetSettings, server: ServerSettings, *, start: int) -> EngineClient:
    return EngineClient(
        server.url,
        retries=settings.request_retries,
        timeout_s=settings.request_timeout_s,
        deadlines=settings.deadlines,
        num_ranks=server.tp_size,
        start=start,
        number=server.number,
    )


async def _enlist(router: Router, server: ServerSettings) -> None:
    """Return when the router sends requests to the engine."""
    bootstrap_port = server.ports.bootstrap if server.worker_type == "prefill" else None
    await router.add(server.url, worker_type=server.worker_type, bootstrap_port=bootstrap_port)


async def _with_next_sync(_: EngineClient) -> bool:
    return False


async def _stop_all(*processes: Server | Router) -> None:
    await asyncio.gather(*(process.stop() for process in processes))
