"""Part of the plugin `fuligo_sync` that keeps requests in an engine over a weight sync (--update-weight-requests continue).

SGLang's pause `in_place` keeps all requests with their KV cache, but four things are missing, because SGLang expects no update meanwhile:

- The step in flight may still read the weights. The pause here ends after it.
- SGLang labels an answer with the version at its end. Here, every token gets the version of the weights that sampled it.
- Entries of the prefix cache must not be reused after the update, nor may those that older requests add later. Flushing the cache needs
  an engine without requests; here, requests that start after the update have cache entries of their own. The old ones are evicted as usual.
- SGLang's watchdog ends an engine that has requests but begins no step within `--sglang-watchdog-timeout`. Here, it waits during a pause.
"""

import time
from collections.abc import Callable
from typing import Any
from weakref import WeakSet

SCHEDULER = "sglang.srt.managers.scheduler.Scheduler"
UPDATER = "sglang.srt.managers.scheduler_components.weight_updater.SchedulerWeightUpdaterManager"
VERSIONS = "token_versions"
"""Name in `meta_info` of the list of the tokens' versions."""


class TokenVersions:
    """Version of the weights that sampled each token of a request. SGLang takes slices of it as it sends the tokens.

    Args:
        version: version of the first token
        cache_key: the request's own `extra_key`, which separates its entries of the prefix cache
    """

    def __init__(self, version: int, cache_key: str | None) -> None:
        self.cache_key = cache_key
        self._parts = [(0, version)]
        """First token of each part, and the version of all tokens of the part."""

    def change(self, version: int, first_token: int) -> None:
        """Set the version of all tokens from `first_token` on."""
        while self._parts and self._parts[-1][0] >= first_token:
            self._parts.pop()
        self._parts.append((first_token, version))

    def __getitem__(self, tokens: slice) -> list[int]:
        start, stop = tokens.start, tokens.stop
        ends = [first for first, _ in self._parts[1:]] + [stop]
        return [version for (first, version), end in zip(self._parts, ends) for _ in range(max(first, start), min(end, stop))]


class InFlight:
    """Requests of a scheduler, and the weights that they see. There is one scheduler in a process."""

    def __init__(self) -> None:
        self.version: int | None = None
        """Version of the weights; None before the first update with kept requests: answers then have no versions of tokens."""
        self._num_updates = 0
        self._requests: WeakSet[Any] = WeakSet()
        self._unprocessed: list[Any] = []
        """Results of steps before the last update whose tokens the requests do not have yet."""

    def add(self, request: Any) -> None:
        """Label a request that enters the queue, also one that enters it again and has lost its KV cache."""
        self._requests.add(request)
        if self.version is not None:
            self._label(request, self.version)
            self._renew(request)

    def update(self, scheduler: Any, version: int) -> None:
        """Note that the paused scheduler has received weights."""
        before = parse_version(scheduler.server_args.weight_version) if self.version is None else self.version
        self.version = version
        self._num_updates += 1
        pending: list[tuple[Any, Any]] = list(getattr(scheduler, "result_queue", ()))  # none without the overlap schedule
        self._unprocessed = [result for _, result in pending]
        late = {id(request) for batch, _ in pending for request in batch.reqs}
        for request in self._requests:
            versions = self._label(request, before)
            if id(request) not in late:
                versions.change(version, len(request.output_ids))
        for request in scheduler.waiting_queue:
            self._renew(request)

    def processed(self, batch: Any, result: Any) -> None:
        """Change the version of requests that have received the token of a step before the update."""
        if not any(result is old for old in self._unprocessed):
            return
        assert self.version is not None, "results are old because of an update"
        self._unprocessed = [old for old in self._unprocessed if old is not result]
        for request in batch.reqs:
            self._label(request, self.version).change(self.version, len(request.output_ids))

    def _label(self, request: Any, version: int) -> TokenVersions:
        """Return the versions of the request's tokens; create them, with this version for all tokens, if there are none."""
        if request.customized_info is None:
            request.customized_info = {}
        return request.customized_info.setdefault(VERSIONS, TokenVersions(version, request.extra_key))

    def _renew(self, request: Any) -> None:
        """Let a request without KV cache use only prefixes that were computed with the current weights."""
        own = request.customized_info[VERSIONS].cache_key
        request.extra_key = f"{own or ''}#{self._num_updates}"


_in_flight = InFlight()


def install() -> None:
    """Extend SGLang's scheduler."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    for hook in (pause_generation, _add_request_to_queue, process_batch_result):
        HookRegistry.register(f"{SCHEDULER}.{hook.__name__}", hook, HookType.AROUND)
    HookRegistry.register(f"{UPDATER}.{flush_cache_after_weight_update.__name__}", flush_cache_after_weight_update, HookType.AROUND)


def parse_version(label: str) -> int:
    """Return the version in a label: `40@2` is version 40 on engine 2; `default` is SGLang's label before the first update."""
    return 0 if label == "default" else int(label.partition("@")[0])


def pause_generation(pause: Callable[[Any, Any], None], scheduler: Any, request: Any) -> None:
    """Pause; if requests keep their place, return after the step in flight, which reads the weights, and let the watchdogs wait."""
    pause(scheduler, request)
    if request.mode != "in_place":
        return
    scheduler.device_module.synchronize()
    for watchdog in (scheduler.watchdog, getattr(scheduler, "soft_watchdog", None)):
        if watchdog is not None:
            # Watchdogs compare the number of steps (`forward_ct`) with that of their last look; the time makes each look differ.
            watchdog.get_counter = lambda: time.monotonic() if scheduler._engine_paused else scheduler.forward_ct


def _add_request_to_queue(add: Callable[..., None], scheduler: Any, request: Any, *arguments: Any, **named: Any) -> None:
    """Label a request before it enters the queue, where its prefix may be looked up."""
    _in_flight.add(request)
    add(scheduler, request, *arguments, **named)


def process_batch_result(process: Callable[[Any, Any, Any], None], scheduler: Any, batch: Any, result: Any) -> None:
    """Process the result of a step."""
    process(scheduler, batch, result)
    _in_flight.processed(batch, result)


def flush_cache_after_weight_update(flush: Callable[[Any, Any], None], updater: Any, request: Any) -> None:
    """Flush the cache after a weight sync, unless the engine has kept requests: with requests, SGLang's flush would end the engine."""
    scheduler = updater.scheduler
    keeps_requests = scheduler._engine_paused  # a pause with mode `abort` does not reach the scheduler
    if request.weight_version is not None and (keeps_requests or _in_flight.version is not None):
        _in_flight.update(scheduler, parse_version(request.weight_version))
    if not keeps_requests or scheduler.is_fully_idle():
        flush(updater, request)
