"""Plan as text: complete, to scale, without color codes outside of a terminal, and no longer than a screen."""

import io
from collections.abc import Callable
from dataclasses import replace

import pytest
from rich.console import Console

from fuligo.config import Config
from fuligo.planner.plan import Plan
from fuligo.planner.report import gpu_hours, print_report
from tests.unit.planner.hand_made_plans import broken_plan, plan_of_8, plan_of_64, plan_of_256


def report(plan: Plan, width: int = 100, *, terminal: bool = False, notes: tuple[str, ...] = ()) -> str:
    output = io.StringIO()
    console = Console(file=output, width=width, force_terminal=terminal, color_system="standard" if terminal else None, highlight=False)
    print_report(plan, Config(), console, notes)
    return output.getvalue()


def words(text: str) -> str:
    return " ".join(text.split())


@pytest.mark.parametrize("make", [plan_of_8, plan_of_256])
def test_a_good_plan_fits_a_screen(make: Callable[[], Plan]):
    lines = report(make()).splitlines()
    assert len(lines) <= 40
    assert max(map(len, lines)) <= 100


@pytest.mark.parametrize("make", [plan_of_8, plan_of_64, plan_of_256, broken_plan])
@pytest.mark.parametrize("width", [50, 80, 200])
def test_no_line_is_wider_than_the_terminal(make: Callable[[], Plan], width: int):
    assert max(map(len, report(make(), width).splitlines())) <= width


def test_no_color_codes_without_a_terminal():
    assert "\x1b" not in report(plan_of_64())
    assert "\x1b[" in report(plan_of_64(), terminal=True)


def test_where_everything_runs():
    text = words(report(plan_of_256()))
    assert "glm5.2-744b glm_moe_dsa, 744 B parameters, 40.1 B active, 256 x h100-80 on 32 nodes" in text
    assert "trainer 256 GPUs, nodes 0-31: TP 4, CP 8, PP 8, EP 32" in text
    assert "layers 14 | 8 | 8 | 8 | 8 | 8 | 8 | 16" in text
    assert "layers with their own sparse index: 5 | 2 | 2 | 2 | 2 | 2 | 2 | 4" in text
    assert "1 prefill engine x 64 GPUs, nodes 0-7: TP 64, DP 64, EP 64" in text
    assert "3 decode engines x 64 GPUs, nodes 8-31" in text
    assert "9.40 M tokens of KV cache: 282 of the longest sequences" in text


def test_engines_of_an_unknown_model_are_reported_as_left_out():
    known = plan_of_64()
    assert "not estimated" not in report(known)
    assert "memory and time not estimated: no config.json of this model on this machine" in words(report(replace(known, capacities=())))


def test_stages_that_look_alike_are_one_line():
    text = words(report(plan_of_256()))
    assert "trainer stages 1-6, 192 GPUs" in text
    assert "trainer stage 3" not in text


def test_memory_that_fits_and_memory_that_does_not():
    text = words(report(plan_of_64()))
    assert "88.0 of 80.0 GiB, 8.0 GiB too much" in text
    assert "69.8 of 80.0 GiB, 10.2 GiB free" in text


def test_a_host_with_next_to_nothing_has_no_line():
    plan = plan_of_256()
    small = replace(
        plan, memory=tuple(bar if bar.owner != "host" else replace(bar, capacity_bytes=10_000 * bar.used_bytes) for bar in plan.memory)
    )
    assert "host, fullest node" in report(plan)
    assert "host" not in report(small)


def test_step_phase_by_phase():
    text = words(report(plan_of_8()))
    assert "One step, about 348 s" in text
    for phase in ("engines rollout", "trainer score", "trainer train", "trainer optimizer", "engines sync"):
        assert phase in text
    assert "212 s 61%" in text


def test_findings_with_fixes_and_the_verdict():
    text = words(report(plan_of_64(), notes=("--lr is given twice: the last counts",)))
    assert text.index("error PLAN-MEMORY-TRAINER") < text.index("fix: --max-tokens-per-gpu 8192") < text.index("warning PLAN-LONG-SAMPLES")
    assert "samples are never truncated" in text
    assert "note: --lr is given twice" in text
    assert "1 error, 1 warning: this run would exceed the memory of h100-80" in text


def test_suggestions_with_their_cost():
    text = words(report(plan_of_64()))
    assert "--recompute-granularity full --recompute-method uniform 20.0 GiB less, +33% of the trainer's FLOPs" in text


def test_only_errors_are_shown_if_they_leave_no_layout():
    text = report(broken_plan("--context-parallel-size [3] [red]is not markup[/red]"))
    assert "[3] [red]is not markup[/red]" in words(text)
    assert "Memory" not in text


def test_a_valid_plan_says_so():
    assert "valid" in report(plan_of_8()).splitlines()[-1]


def test_gpu_hours_are_steps_times_gpus() -> None:
    flags = {"data": {"num_rollout": 100}, "cluster": {"actor_num_gpus_per_node": 4, "rollout_num_gpus": 4, "device": "cuda"}}
    config = Config.model_validate(flags)
    assert gpu_hours(90.0, config) == "; 100 of them on 8 GPUs, about 20 GPU hours"
    assert gpu_hours(90.0, Config.model_validate({"data": {"num_epoch": 1}})) == ""
    one = Config.model_validate(
        {"data": {"num_rollout": 100}, "cluster": {"colocate": True, "actor_num_gpus_per_node": 1, "device": "cuda"}}
    )
    assert gpu_hours(90.0, one) == "; 100 of them on 1 GPU, about 2.5 GPU hours"
    assert gpu_hours(45_000.0, one) == "; 100 of them on 1 GPU, about 1,250 GPU hours"
    assert gpu_hours(0.28, one) == "; 100 of them on 1 GPU, less than 0.1 GPU hours"
