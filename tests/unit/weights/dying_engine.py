"""Engine process that receives weights like SGLang, and dies, hangs or refuses at a call that the test chooses."""

from __future__ import annotations

import asyncio
import importlib
import json
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from traceback import clear_frames
from typing import Any, Literal

import torch
import torch.distributed as dist
from aiohttp import ClientSession, web
from safetensors.torch import load_file
from torch.distributed import PrefixStore, TCPStore
from torch.distributed.distributed_c10d import _new_process_group_helper, _world

from fuligo.engines.sglang.server import SYNC_PLUGIN, ServerSettings
from fuligo.errors import EngineError
from fuligo.formats.payload import decode_named_tensors

sys.path.append(str(SYNC_PLUGIN))
fuligo_sync: Any = importlib.import_module("fuligo_sync")


@dataclass(slots=True, frozen=True)
class Fault:
    """Fault that happens once: a restarted engine works."""

    path: str
    """Path of the call that fails, or `STREAMED` for a tensor of a stream."""
    how: Literal["dies", "hangs", "refuses"]
    call: int = 1
    """Number of the failing call to this path, from 1."""


STREAMED = "tensor of a stream"
UNANSWERED = "stream, of which the first rank knows nothing"
"""`Fault.path` of an engine that answers that it has loaded a stream, because only another rank has not."""


class DyingServer:
    """Engine process; implements `Server`. Its fault is read from the file `<log file>.fault`, if it exists."""

    def __init__(self, settings: ServerSettings) -> None:
        self.settings = settings
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([__name__])
        self._process = context.Process(
            target=_serve, args=(settings.ports.http, fault_file(settings), streams_file(settings)), daemon=True
        )
        self._process.start()

    @property
    def url(self) -> str:
        return self.settings.url

    @property
    def alive(self) -> bool:
        return self._process.is_alive()

    @property
    def is_lost(self) -> bool:
        return False

    def check_alive(self) -> None:
        if not self.alive:
            raise EngineError(f"{self.settings.name} is gone")

    async def wait_ready(self) -> None:
        while not await self.answers(5.0):
            self.check_alive()
            await asyncio.sleep(0.02)

    async def answers(self, timeout_s: float) -> bool:
        return await self.settings.answers(timeout_s)

    def kill(self) -> None:
        self._process.kill()

    async def stop(self) -> None:
        self.kill()
        await asyncio.to_thread(self._process.join)


@dataclass(slots=True)
class Held:
    """State that an engine reports about itself."""

    version: int
    paused: bool
    served_unpaused: list[int]
    """Versions with which it resumed after a pause."""
    weights: dict[str, list[float]]
    num_taken: int
    """Total number of tensors received."""
    released: list[str]
    """Memory that it has released."""
    num_calls: int = 0
    """Number of calls that brought weights through a process group."""
    joining: str = ""
    """Process group that it is joining: it has connected to the sender, but others are missing."""

    @classmethod
    async def of(cls, url: str) -> Held:
        async with ClientSession() as session, session.get(f"{url}/held") as answer:
            return cls(**await answer.json())


def fault_file(settings: ServerSettings) -> Path:
    return settings.log_file.with_suffix(".fault")


def streams_file(settings: ServerSettings) -> Path:
    """File that exists if the engine has the plugin that receives streams."""
    return settings.log_file.with_suffix(".streams")


def plan(settings: ServerSettings, fault: Fault) -> None:
    """Write the fault of the next start."""
    fault_file(settings).write_text(json.dumps(asdict(fault)))


def _serve(port: int, fault: Path, streams: Path) -> None:
    torch.set_num_threads(1)
    planned = Fault(**json.loads(fault.read_text())) if fault.exists() else None
    fault.unlink(missing_ok=True)
    web.run_app(_Engine(planned, streams=streams.exists()).application(), host="127.0.0.1", port=port, print=None, handle_signals=False)


class _Engine:
    def __init__(self, fault: Fault | None, *, streams: bool) -> None:
        self.fault = fault
        self.streams = streams
        self.stores: dict[str, Any] = {}
        self.num_calls = 0
        self.scheduler = ThreadPoolExecutor(1)
        """Thread that executes calls one after another, and none while it waits in a process group."""
        self.hangs = False
        self.held = Held(0, False, [], {}, 0, [])
        self.groups: dict[str, dist.ProcessGroup] = {}

    def application(self) -> web.Application:
        application = web.Application()
        application.router.add_route("*", "/{path:.*}", self.answer)
        return application

    async def answer(self, request: web.Request) -> web.Response:
        path = request.path
        if path == "/held":
            return web.json_response(asdict(self.held))
        if path == "/health":
            return web.json_response({})
        if self.fault is not None and path == self.fault.path:
            self.num_calls += 1
            if self.num_calls == self.fault.call:
                if self.fault.how == "refuses":
                    return web.json_response({"success": False, "message": "no room"}, status=400)
                if self.fault.how == "dies":
                    os.kill(os.getpid(), signal.SIGKILL)
                self.hangs = True
        if self.hangs:
            await asyncio.Event().wait()
        body: dict[str, Any] = await request.json() if request.method == "POST" else {}
        try:
            found = await asyncio.get_running_loop().run_in_executor(self.scheduler, getattr(self, f"on_{path.lstrip('/')}"), body)
        except RuntimeError as error:  # a process group that broke, memory that is not there
            clear_frames(error.__traceback__)
            return web.json_response({"success": False, "message": str(error)}, status=400)
        if "weight_version" in body:
            self.held.version = int(body["weight_version"].partition("@")[0])
        return web.json_response({"success": True, **(found or {})})

    def on_server_info(self, body: dict[str, Any]) -> dict[str, Any]:
        return {"tp_size": 1}

    def on_model_info(self, body: dict[str, Any]) -> dict[str, Any]:
        return {"model_path": "model", "weight_version": f"{self.held.version}@0"}

    def on_pause_generation(self, body: dict[str, Any]) -> None:
        self.held.paused = True

    def on_continue_generation(self, body: dict[str, Any]) -> None:
        assert not self.held.released, "what would it serve from?"
        self.held.paused = False
        self.held.served_unpaused.append(self.held.version)

    def on_flush_cache(self, body: dict[str, Any]) -> None:
        assert self.held.paused, "it would wait for the end of requests in flight"

    def on_release_memory_occupation(self, body: dict[str, Any]) -> None:
        assert self.held.paused and not set(body["tags"]) & set(self.held.released)
        self.held.released += body["tags"]

    def on_resume_memory_occupation(self, body: dict[str, Any]) -> None:
        for tag in body["tags"]:
            self.held.released.remove(tag)

    def on_update_weights_from_tensor(self, body: dict[str, Any]) -> None:
        self.take(dict(decode_named_tensors(body["serialized_named_tensors"][0])))

    def on_update_weights_from_disk(self, body: dict[str, Any]) -> None:
        for shard in sorted(Path(body["model_path"]).glob("*.safetensors")):
            self.take(load_file(shard))

    def on_init_weights_update_group(self, body: dict[str, Any]) -> None:
        name, world_size = body["group_name"], body["world_size"]
        if reason := fuligo_sync.unreachable(body["master_address"], body["master_port"]):
            raise RuntimeError(reason)
        # It may be closed since. torch tries that again and again until this timeout.
        of_sender = TCPStore(body["master_address"], body["master_port"], is_master=False, timeout=timedelta(seconds=5))
        of_sender.set_timeout(timedelta(minutes=5))
        store = PrefixStore(name, of_sender)
        self.held.joining = name
        rank, backend = body["rank_offset"], dist.Backend(body["backend"])
        group: Any = _new_process_group_helper(world_size, rank, [], backend, store, group_name=name, timeout=timedelta(minutes=30))[0]
        _world.pg_group_ranks[group] = {rank: rank for rank in range(world_size)}
        self.groups[name] = group
        self.held.joining = ""
        if self.streams:
            self.stores[name] = store = fuligo_sync.connect(body["master_address"], body["master_port"], name)
            fuligo_sync.announce(store, rank)

    def on_update_weights_from_distributed(self, body: dict[str, Any]) -> None:
        self.held.num_calls += 1
        if body["load_format"] == fuligo_sync.LOAD_FORMAT:
            name = body["group_name"]
            stream = fuligo_sync.Stream(self.stores[name], body["names"][0], self.groups[name], "cpu")
            try:
                stream.load(self.take_streamed)
            except RuntimeError:
                if self.fault is None or self.fault.path != UNANSWERED:
                    raise
            return
        tensors = {
            name: torch.empty(shape, dtype=getattr(torch, dtype))
            for name, dtype, shape in zip(body["names"], body["dtypes"], body["shapes"])
        }
        row = torch.empty(sum(tensor.nbytes for tensor in tensors.values()), dtype=torch.uint8)
        dist.broadcast(row, src=0, group=self.groups[body["group_name"]])
        pieces = row.split([tensor.nbytes for tensor in tensors.values()])
        self.take({name: piece.view(tensor.dtype).view(tensor.shape) for piece, (name, tensor) in zip(pieces, tensors.items())})

    def take_streamed(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        for tensor in tensors:
            self.fail_at_tensor()
            self.take(dict([tensor]))
        if self.fault is not None and self.fault.path == UNANSWERED:
            raise RuntimeError("no room")

    def fail_at_tensor(self) -> None:
        if self.fault is None or self.fault.path != STREAMED:
            return
        self.num_calls += 1
        if self.num_calls == self.fault.call:
            if self.fault.how == "refuses":
                raise RuntimeError("no room")
            if self.fault.how == "dies":
                os.kill(os.getpid(), signal.SIGKILL)
            threading.Event().wait()

    def on_destroy_weights_update_group(self, body: dict[str, Any]) -> None:
        self.stores.pop(body["group_name"], None)
        if (group := self.groups.pop(body["group_name"], None)) is not None:
            dist.destroy_process_group(group)

    def take(self, tensors: dict[str, torch.Tensor]) -> None:
        if "weights" in self.held.released:
            raise RuntimeError("there is no memory for weights")
        self.held.weights |= {name: tensor.flatten().tolist() for name, tensor in tensors.items()}
        self.held.num_taken += len(tensors)
