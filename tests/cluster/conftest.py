"""Whole runs on Ray, on this machine: the command, a tiny checkpoint, a prompt file."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fuligo.engines.ports import PortClaims
from tests.e2e.conftest import checkpoint, job, prompts, start

__all__ = ["checkpoint", "job", "prompts", "start"]

pytest.importorskip("ray")


@pytest.fixture
def free_port() -> Iterator[int]:
    """For a Ray head."""
    with PortClaims() as claims:
        yield claims.claim()
