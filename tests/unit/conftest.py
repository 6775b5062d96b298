"""Fixtures of unit tests."""

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from fuligo.environments.environment import Environment
from fuligo.environments.isolation.factory import IsolatedFactory
from fuligo.environments.isolation.workers import Workers

Isolate = Callable[..., IsolatedFactory]


@pytest.fixture
def isolate() -> Iterator[Isolate]:
    """Make factories of environments in processes of their own, which end with the test."""
    started: list[Workers] = []

    def make(kind: type[Environment], **options: Any) -> IsolatedFactory:
        workers = Workers(f"{kind.__module__}.{kind.__name__}", {}, **options)
        started.append(workers)
        workers.start()
        return IsolatedFactory(kind, kind.Settings(), workers)

    yield make
    for workers in started:
        workers.close()
