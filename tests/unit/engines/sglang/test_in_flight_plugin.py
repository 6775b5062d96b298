"""Part `fuligo_in_flight` of the plugin `fuligo_sync`; with real engines it is tested in tests/sglang/test_in_flight.py."""

import importlib
from types import SimpleNamespace
from typing import Any

import pytest

from tests.unit.weights.dying_engine import fuligo_sync

assert fuligo_sync  # importing it makes the plugin's directory importable
plugin: Any = importlib.import_module("fuligo_in_flight")


class Request:
    """SGLang's request."""

    def __init__(self, num_tokens: int = 0, extra_key: str | None = None) -> None:
        self.output_ids = list(range(num_tokens))
        self.extra_key = extra_key
        self.customized_info: dict[str, Any] | None = None

    @property
    def versions(self) -> list[int]:
        assert self.customized_info is not None
        return self.customized_info[plugin.VERSIONS][0 : len(self.output_ids)]


class Scheduler:
    """SGLang's scheduler, which processes the result of a step after it has begun the next one."""

    def __init__(self) -> None:
        self.server_args = SimpleNamespace(weight_version="3@1")
        self.waiting_queue: list[Request] = []
        self.result_queue: list[tuple[Any, Any]] = []
        self._engine_paused = True
        self.requests: list[Request] = []
        self.num_flushes = 0
        self.num_waits = 0
        self.device_module = self
        self.forward_ct = 7
        self.watchdog, self.soft_watchdog = (SimpleNamespace(get_counter=lambda: self.forward_ct) for _ in range(2))

    def synchronize(self) -> None:
        self.num_waits += 1

    def is_fully_idle(self) -> bool:
        return not self.requests

    def add(self, request: Request) -> Request:
        self.requests.append(request)
        plugin._add_request_to_queue(lambda scheduler, request: self.waiting_queue.append(request), self, request)
        return request

    def start(self) -> None:
        self.waiting_queue.clear()

    def step(self, *requests: Request) -> None:
        """Begin a step, and process the one before."""
        self.result_queue.append((SimpleNamespace(reqs=list(requests)), SimpleNamespace()))
        if len(self.result_queue) > 1:
            plugin.process_batch_result(self.process, self, *self.result_queue.pop(0))

    def process(self, scheduler: Any, batch: Any, result: Any) -> None:
        for request in batch.reqs:
            request.output_ids.append(0)

    def update(self, label: str | None) -> None:
        def flush(updater: Any, request: Any) -> None:
            assert self.is_fully_idle(), "SGLang ends"
            self.num_flushes += 1

        plugin.flush_cache_after_weight_update(flush, SimpleNamespace(scheduler=self), SimpleNamespace(weight_version=label))


@pytest.fixture(autouse=True)
def scheduler(monkeypatch: pytest.MonkeyPatch) -> Scheduler:
    monkeypatch.setattr(plugin, "_in_flight", plugin.InFlight())
    return Scheduler()


def test_the_step_in_flight_at_an_update_belongs_to_the_old_weights(scheduler: Scheduler) -> None:
    scheduler.update("4@1")
    request, other = scheduler.add(Request()), scheduler.add(Request())
    scheduler.start()
    scheduler.step(request, other)
    scheduler.step(request, other)
    scheduler.step(request)
    assert (len(request.output_ids), len(other.output_ids)) == (2, 2)
    scheduler.update("5@1")
    scheduler.step(request)  # it is begun with the new weights
    scheduler.step(request)
    scheduler.update("6@1")
    scheduler.update("7@1")
    scheduler.step(request, other)
    scheduler.step(request, other)
    scheduler.step()
    assert request.versions == [4, 4, 4, 5, 5, 7, 7]
    assert other.versions == [4, 4, 7, 7]


def test_versions_are_sent_in_slices() -> None:
    versions = plugin.TokenVersions(1, None)
    versions.change(2, 3)
    versions.change(4, 5)
    assert [versions[0:2], versions[2:4], versions[4:9], versions[9:9]] == [[1, 1], [1, 2], [2, 4, 4, 4, 4], []]
    versions.change(5, 5)
    assert versions[0:7] == [1, 1, 1, 2, 2, 5, 5]


def test_only_requests_with_keys_of_old_weights_find_them(scheduler: Scheduler) -> None:
    scheduler.update("4@1")
    running = scheduler.add(Request(extra_key="own"))
    scheduler.start()
    waiting = scheduler.add(Request(extra_key="own"))
    before = running.extra_key
    assert waiting.extra_key == before and before is not None and before.startswith("own")
    scheduler.update("5@1")
    late = scheduler.add(Request(extra_key="own"))
    assert running.extra_key == before
    assert waiting.extra_key == late.extra_key != before
    scheduler.add(running)  # it was retracted: its keys are gone
    assert running.extra_key == late.extra_key
    scheduler.start()
    scheduler.update("5@1")  # weights were sent again, for another engine was lost
    assert scheduler.add(Request(extra_key="own")).extra_key not in (late.extra_key, before)
    assert scheduler.add(Request()).extra_key != scheduler.add(Request(extra_key="own")).extra_key


def test_requests_from_before_the_first_update_have_the_first_version(scheduler: Scheduler) -> None:
    request = scheduler.add(Request(num_tokens=2))
    assert request.customized_info is None and request.extra_key is None
    scheduler.update("4@1")
    request.output_ids.append(0)
    assert request.versions == [3, 3, 4] and scheduler.num_flushes == 0


def test_an_idle_engine_flushes_its_cache(scheduler: Scheduler) -> None:
    scheduler.update("4@1")
    assert scheduler.num_flushes == 1


def test_a_bucket_without_version_changes_nothing(scheduler: Scheduler) -> None:
    request = scheduler.add(Request(num_tokens=2))
    scheduler.update(None)
    assert request.customized_info is None


def test_an_update_after_an_abort_is_labeled_only_if_others_were(scheduler: Scheduler) -> None:
    scheduler._engine_paused = False
    scheduler.update("4")
    assert scheduler.add(Request()).customized_info is None
    scheduler._engine_paused = True
    scheduler.update("5")
    scheduler._engine_paused = False
    scheduler.requests.clear()
    scheduler.update("6")
    assert scheduler.add(Request(num_tokens=1)).versions == [6] and scheduler.num_flushes == 2


@pytest.mark.parametrize(("mode", "num_waits"), [("in_place", 1), ("retract", 0)])
def test_a_pause_in_place_ends_after_the_step_in_flight(scheduler: Scheduler, mode: str, num_waits: int) -> None:
    paused = []
    plugin.pause_generation(lambda *arguments: paused.append(arguments), scheduler, request := SimpleNamespace(mode=mode))
    assert paused == [(scheduler, request)] and scheduler.num_waits == num_waits


@pytest.mark.parametrize("name", ["watchdog", "soft_watchdog"])
def test_watchdogs_see_a_paused_engine_as_alive_and_a_stuck_one_as_stuck(scheduler: Scheduler, name: str) -> None:
    for _ in range(2):
        plugin.pause_generation(lambda *_: None, scheduler, SimpleNamespace(mode="in_place"))
    looks = [getattr(scheduler, name).get_counter() for _ in range(2)]
    scheduler._engine_paused = False
    looks += [getattr(scheduler, name).get_counter() for _ in range(2)]
    assert len(set(looks[:3])) == 3 and looks[2:] == [scheduler.forward_ct] * 2


@pytest.mark.parametrize(("label", "version"), [("default", 0), ("7", 7), ("40@2", 40)])
def test_versions_are_parsed_from_labels(label: str, version: int) -> None:
    assert plugin.parse_version(label) == version
