"""Sandboxed interpreters that all tests share."""

import asyncio
import functools

import pytest

from fuligo.environments.tools.python import PythonSession, PythonSettings
from fuligo.errors import RolloutError

SETTINGS = PythonSettings(timeout_s=30, cpu_s=30, memory_mb=128, disk_mb=16, max_processes=12, output_bytes=4096)
SHORT = SETTINGS.model_copy(update={"timeout_s": 4, "cpu_s": 0.5})
"""Limits that a greedy program reaches, and a small one does not, not even on a busy machine."""


@functools.cache
def sandbox_problem() -> str | None:
    """Return why no sandbox can be built on this machine, None where one can."""

    async def probe() -> str | None:
        session = PythonSession(SETTINGS)
        try:
            await session.run("")
        except RolloutError as error:
            return str(error)
        finally:
            session.close()

    return asyncio.run(probe())


@pytest.fixture(scope="session")
def sandbox() -> None:
    if (problem := sandbox_problem()) is not None:
        pytest.skip(problem)
