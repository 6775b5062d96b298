"""Whole runs on Ray, on this machine: the command, a tiny checkpoint, a prompt file."""

from __future__ import annotations

import pytest

from tests.e2e.conftest import checkpoint, job, prompts, start

__all__ = ["checkpoint", "job", "prompts", "start"]

pytest.importorskip("ray")
