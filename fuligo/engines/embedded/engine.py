"""Embedded engine: a scheduler, the thread that steps it, and the commands that other threads may send it."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import wraps
from typing import Concatenate, ParamSpec, TypeVar

import torch

from fuligo.engines.embedded.kv_cache import KVCache, length_class
from fuligo.engines.embedded.model import EngineModel
from fuligo.engines.embedded.request import Request
from fuligo.engines.embedded.scheduler import Scheduler
from fuligo.engines.engine import PauseMode
from fuligo.errors import EngineError
from fuligo.formats.receiver import NamedTensors, WeightStore
from fuligo.formats.weight_manifest import WeightsDigest, weights_checksum
from fuligo.models.registry import stored_experts


class EngineThread:
    """Thread that gives each of its engines a turn: its commands, then one step."""

    def __init__(self) -> None:
        self.wake = threading.Condition()
        """Condition that guards the engines' queues of requests and commands; notified when there is work."""
        self.engines: list[EmbeddedEngine] = []
        """Engines that the thread steps; complete before `start`."""
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self, timeout_s: float = 10.0) -> None:
        with self.wake:
            self._stopping = True
            self.wake.notify()
        self._thread.join(timeout_s)

    def _run(self) -> None:
        while self._wait_for_work():
            for engine in self.engines:
                engine.take_turn()

    def _wait_for_work(self) -> bool:
        """Sleep until there is work; return False if the thread is to stop."""
        with self.wake:
            while not (self._stopping or any(engine.has_work() for engine in self.engines)):
                self.wake.wait()
            return not self._stopping


logger = logging.getLogger(__name__)
P = ParamSpec("P")
T = TypeVar("T")


def command(method: Callable[Concatenate[EmbeddedEngine, P], T]) -> Callable[Concatenate[EmbeddedEngine, P], Future[T]]:
    """Decorate a method to run in the engine's thread, between two steps and even while paused; its caller gets a future."""

    @wraps(method)
    def asking(self: EmbeddedEngine, *args: P.args, **kwargs: P.kwargs) -> Future[T]:
        future: Future[T] = Future()

        def run() -> None:
            if not future.set_running_or_notify_cancel():
                return
            try:
                future.set_result(method(self, *args, **kwargs))
            except BaseException as error:
                future.set_exception(error)

        with self._wake:
            self._commands.append(run)
            self._wake.notify()
        return future

    return asking


class EmbeddedEngine:
    """Engine that may be called from any thread: commands run in the engine's thread, between two steps, and return futures.

    Args:
        on_ended: called in the engine's thread with requests that have ended
        on_failure: called in the engine's thread when a step raised; all requests have ended, and the engine accepts no more
        thread: thread that several engines share; None: a thread for this engine
    """

    def __init__(
        self,
        model: EngineModel,
        *,
        max_running_requests: int,
        max_total_tokens: int,
        on_ended: Callable[[Sequence[Request]], None],
        on_failure: Callable[[], object],
        thread: EngineThread | None = None,
    ) -> None:
        self.model = model
        self.max_total_tokens = max_total_tokens
        self.max_running_requests = max_running_requests
        self.weights = WeightStore(model.module, experts=stored_experts(model.module.config.to_dict()))
        self.num_arrived = 0
        self.failure: BaseException | None = None
        self._scheduler = Scheduler(model, KVCache(model.cache_shape, max_total_tokens, model.dtype, model.device), max_running_requests)
        self._on_ended = on_ended
        self._on_failure = on_failure
        self._incoming: deque[Request] = deque()
        self._commands: deque[Callable[[], None]] = deque()
        self._paused = False
        self._released = False
        self.thread = EngineThread() if thread is None else thread
        self.thread.engines.append(self)
        self._wake = self.thread.wake

    def submit(self, request: Request) -> None:
        """Queue a request. Raises EngineError if it exceeds the model's context or the KV cache, or the engine has failed."""
        limit = self.model.context_length
        if request.max_tokens > limit:
            raise EngineError(
                f"prompt ({len(request.input_ids)}) + max_new_tokens ({request.params.max_new_tokens}) = {request.max_tokens} tokens "
                f"exceed the model's context of {limit}; drop such prompts (--rollout-max-prompt-len) or lower max_new_tokens"
            )
        if request.score_start is None and length_class(request.max_tokens) > self.max_total_tokens:
            raise EngineError(
                f"the request may need {length_class(request.max_tokens)} tokens of KV cache, but there are only {self.max_total_tokens}; "
                "raise --max-total-tokens (in fuligo train: --embedded-max-total-tokens) or lower max_new_tokens"
            )
        with self._wake:
            if self.failure is not None:
                raise EngineError(f"cannot accept the request: the engine has failed: {self.failure!r}")
            request.arrival = self.num_arrived
            self.num_arrived += 1
            self._incoming.append(request)
            self._wake.notify()

    @property
    def num_running(self) -> int:
        return self._scheduler.num_running

    @property
    def num_waiting(self) -> int:
        with self._wake:
            return len(self._incoming) + len(self._scheduler.waiting)

    @property
    def reserved_tokens(self) -> int:
        return self._scheduler.cache.reserved_tokens

    @command
    def pause(self, mode: PauseMode) -> None:
        self._paused = True
        if mode == "abort":
            self._end(self._scheduler.abort(lambda _: True, "aborted by a pause of the engine"))
        elif mode == "retract":
            self._scheduler.retract()

    @command
    def resume(self) -> None:
        if self.weights.torn:
            raise EngineError("cannot continue generation: a weight sync is unfinished; send its last bucket, or all weights again")
        self._paused = False

    @command
    def abort(self, which: Callable[[Request], bool]) -> None:
        self._end(self._scheduler.abort(which, "aborted on request"))

    @command
    def flush_cache(self) -> None:
        """Drop all keys and values. Requests that were paused in place return to the queue and are prefilled again."""
        if self._scheduler.num_running and not self._paused:
            raise EngineError("cannot flush the cache while requests run; pause the engine first")
        self._scheduler.retract()

    @command
    def update_weights(self, version: int | None, load: Callable[[], NamedTensors | str], *, flush: bool, abort_all: bool) -> None:
        """Load the bucket of tensors, or the directory, that `load` returns.

        Without `flush`, requests that were paused in place keep the keys and values that the old weights computed.
        """
        if abort_all:
            self._end(self._scheduler.abort(lambda _: True, "aborted by an update of weights"))
        if self._scheduler.num_running and not self._paused:
            raise EngineError("cannot update weights while requests run; pause the engine first")
        source = load()
        if isinstance(source, str):
            self.weights.load_directory(source, self.weights.version if version is None else version)
        else:
            self.weights.load_tensors(source, version)
        self.model.weights_changed()
        self._scheduler.forget_prompts()
        if flush:
            self._scheduler.retract()

    @command
    def checksum(self) -> WeightsDigest:
        return weights_checksum(self.weights.named_weights().items())

    @command
    def release_memory(self) -> None:
        """Free the KV pools and move the weights off a GPU. Requests wait until `resume_memory`."""
        if self._scheduler.num_running:
            raise EngineError("cannot release memory while requests run; abort or retract them first")
        self._released = True
        self._scheduler.cache.release()
        if self.model.device.type == "cuda":
            self.model.module.to("cpu")
            torch.cuda.empty_cache()

    @command
    def resume_memory(self) -> None:
        self.model.module.to(self.model.device)
        self._released = False

    def has_work(self) -> bool:
        """Return whether a turn would do something; the caller holds the thread's condition."""
        return bool(self._commands or self._incoming or self._may_step())

    def take_turn(self) -> None:
        """Run the commands that have arrived, then one step; called by the engine's thread."""
        try:
            while self._commands:
                command = self._commands.popleft()
                self._take_in()  # a command applies to all requests that came before it
                command()
            self._take_in()
            if self._may_step():
                self._end(self._scheduler.step())
                # Free a GPU's KV memory when no request runs: a trainer on the same GPU needs it now.
                if self.model.device.type == "cuda" and not self._scheduler.num_running:
                    self._scheduler.cache.release()
                    torch.cuda.empty_cache()
        except BaseException as error:
            logger.exception("the engine failed")
            with self._wake:
                self.failure = error
                left = [*self._scheduler.abort(lambda _: True, ""), *self._incoming]
                self._incoming.clear()
            for request in left:
                request.error = f"the engine failed: {error!r}"
            self._end(left)
            self._on_failure()

    def _take_in(self) -> None:
        with self._wake:
            while self._incoming:
                self._scheduler.enqueue(self._incoming.popleft())

    def _may_step(self) -> bool:
        held = self.failure is not None or self._paused or self._released or self.weights.torn
        return not held and bool(self._scheduler.waiting or self._scheduler.num_running)

    def _end(self, requests: Sequence[Request]) -> None:
        if requests:
            for request in requests:
                request.weight_version = self.weights.version
            self._on_ended(requests)
