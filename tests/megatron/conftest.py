"""Ranks of the Megatron trainer on a CPU: up to four over gloo, shared by all tests of a session."""

from collections.abc import Iterator

import pytest

from tests.megatron.ranks import RankPool


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        if "tests/megatron/" in item.path.as_posix():
            item.add_marker(pytest.mark.megatron)


@pytest.fixture(scope="session")
def pool() -> Iterator[RankPool]:
    pool = RankPool()
    yield pool
    pool.close()
