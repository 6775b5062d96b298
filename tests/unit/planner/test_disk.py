"""Space of checkpoints and exports."""

import pytest

from fuligo.planner.make_plan import disk_of_checkpoints
from fuligo.planner.plan import Disk
from tests.unit.planner.subjects import GLM4_9B_COLOCATED, facts, subject_of

GLM4 = facts("glm4-9b").num_parameters
SAVES = "--num-rollout 100 --save-interval 10"


def disk(flags: str) -> Disk | None:
    return disk_of_checkpoints(subject_of(f"{GLM4_9B_COLOCATED} {flags}", "glm4-9b"))


@pytest.mark.parametrize(
    ("flags", "bytes_per_parameter"),
    [
        ("", 2 + 4 + 8),
        ("--ref-update-interval 5", 2 + 4 + 8 + 2),
        ("--advantage-estimator ppo", 2 * (2 + 4 + 8)),
    ],
)
def test_a_checkpoint_holds_weights_and_optimizer(flags: str, bytes_per_parameter: int) -> None:
    found = disk(flags)
    assert found is not None and found.checkpoint_bytes == bytes_per_parameter * GLM4


@pytest.mark.parametrize(
    ("flags", "checkpoints", "exports"),
    [
        ("", 1, 0),  # the last rollout is always saved
        ("--num-rollout 95 --save-interval 10 --keep-checkpoints none --no-save-last", 9, 0),
        (SAVES, 3, 0),
        (f"{SAVES} --keep-checkpoints none", 10, 0),
        ("--num-rollout 95 --save-interval 10 --keep-checkpoints none", 10, 0),
        ("--num-rollout 15 --save-interval 10 --keep-checkpoints 5", 2, 0),
        (f"{SAVES} --save-hf exports/{{rollout_id}}", 3, 10),
        (f"{SAVES} --save-hf exports/latest", 3, 1),
    ],
)
def test_old_checkpoints_are_removed_and_exports_stay(flags: str, checkpoints: int, exports: int) -> None:
    found = disk(flags)
    assert found is not None
    assert (found.num_checkpoints, found.num_exports) == (checkpoints, exports)
    assert found.used_bytes == checkpoints * 14 * GLM4 + exports * 2 * GLM4


@pytest.mark.parametrize("flags", ["--debug-rollout-only", "--no-save-last", "--no-save-last --save-interval 10 --num-rollout 9"])
def test_a_run_that_saves_nothing_needs_no_space(flags: str) -> None:
    assert disk(flags) is None
