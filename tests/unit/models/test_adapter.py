"""Adapters of PEFT in a model, apart from their numerics."""

import logging

import pytest

import fuligo.models.adapter as _  # noqa: F401 - its import sets the level


def test_a_kernel_that_is_not_used_is_not_missed(caplog: pytest.LogCaptureFixture) -> None:
    logger = logging.getLogger("bitsandbytes.backends.cpu.ops")
    logger.warning("Failed to load CPU gemm_4bit_forward")
    assert not caplog.records
    logger.error("cannot multiply")
    assert len(caplog.records) == 1
