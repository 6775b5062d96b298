"""One run, struck by a fault after the other."""

from __future__ import annotations

import os
import random
import shutil
from pathlib import Path

import pytest

from tests.chaos.campaign import EXACT, Campaign, uninterrupted_run
from tests.chaos.faults import FAULTS
from tests.e2e.conftest import checkpoint, prompts
from tests.small_disk import mounted

__all__ = ["checkpoint", "prompts"]

DISK_BYTES = 64 * 1024**2


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("ip") is None, reason="a network and a disk of its own need root and iproute2")
def test_a_run_survives_each_fault(checkpoint: Path, prompts: Path, tmp_path: Path) -> None:
    with mounted(tmp_path / "disk", DISK_BYTES) as disk:
        campaign = Campaign(disk, checkpoint, prompts, num_rollouts=14, mode=EXACT, random=random.Random(7))
        campaign.survive(iter(FAULTS))
        assert {strike.fault for strike in campaign.strikes} == {fault.name for fault in FAULTS}
        campaign.assert_ledger(uninterrupted_run(campaign, tmp_path / "uninterrupted"))
