"""One run, struck by a fault after the other."""

import random
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path

import pytest

from tests.chaos.campaign import RESTARTING, WITHOUT_FAULTS, Campaign
from tests.chaos.faults import DRIVER_KILLED, NETWORK_LOST, STANDBY_KILLED, Fault
from tests.chaos.machine import machine, why_not
from tests.e2e.command import HAS_CUDA, succeed
from tests.e2e.conftest import checkpoint, prompts

__all__ = ["checkpoint", "prompts"]

DRAWN = [STANDBY_KILLED, NETWORK_LOST]  # tests/e2e/test_restarts.py kills ranks, and tests/e2e/test_no_loss.py drivers


@pytest.mark.skipif(why_not() is not None, reason=str(why_not()))
@pytest.mark.parametrize("faults", [DRAWN, pytest.param([DRIVER_KILLED, *DRAWN], marks=pytest.mark.slow)], ids=len)
def test_a_run_survives_each_fault(faults: list[Fault], checkpoint: Path, prompts: Path, tmp_path: Path) -> None:
    """`make chaos` starts all processes fresh, and draws from all faults."""
    with machine(tmp_path) as own, nullcontext() if HAS_CUDA else own.warm() as warm:
        campaign = Campaign(own, checkpoint, prompts, num_rollouts=12, mode=RESTARTING, random=random.Random(7), warm=warm)
        campaign.survive(iter(faults))
        assert {strike.fault for strike in campaign.strikes} == {fault.name for fault in faults}
        # Without faults, the run needs no machine of its own.
        succeed(*replace(campaign, mode=WITHOUT_FAULTS).command(tmp_path / "uninterrupted"))
        campaign.assert_ledger(tmp_path / "uninterrupted")
