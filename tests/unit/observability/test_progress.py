"""Progress on the console, within the width of the terminal."""

import io
import logging
import re
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from fuligo.observability.progress import (
    LiveProgress,
    PlainProgress,
    Progress,
    before_after_table,
    open_progress,
    show_origin,
    warnings_before_progress,
)
from fuligo.types import Sample, SampleGroup


class Clock:
    """Clock that tests advance."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


def record(step: int, reward: float = 0.5) -> dict:
    return {
        "step": step,
        "rollout/reward_mean": reward,
        "rollout/response_len_mean": 20.0 - step,
        "rollout/tokens_per_s": 12345.6,
        "train/tokens_per_s": 23456.7,
        "train/loss": -0.01234,
        "train/grad_norm": 0.5,
        "perf/step_s": 1.25,
    }


def live(title: str, num_rollouts: int, *, start: int = 0, clock: Callable[[], float] = time.monotonic) -> LiveProgress:
    return LiveProgress(Console(), title, num_rollouts, start=start, clock=clock)


def drawn(progress: LiveProgress, width: int = 80) -> list[str]:
    console = Console(file=io.StringIO(), width=width, record=True, color_system=None)
    console.print(progress)
    return [line.rstrip() for line in console.export_text().splitlines()]


def test_panel_shows_the_phase_before_the_first_step() -> None:
    clock = Clock()
    panel = live("runs/demo", 40, clock=clock)
    assert drawn(panel)[-1].split() == ["now", "starting"]
    panel.phase("rollout", 0)
    clock.now_s += 75
    assert drawn(panel) == [
        "fuligo  runs/demo" + " " * 54 + "step 0/40",
        "reward  -",
        "length  -",
        "speed   -",
        "now     sampling, step 1  1:15",
    ]


EVALUATION = {"eval/gsm8k/mean@4": 0.96, "eval/gsm8k/pass@4": 1.0, "eval/gsm8k/num_failed": 3.0, "eval/a/b/mean@1": 0.5}


def test_an_evaluation_is_shown_beside_the_first_one() -> None:
    console = Console(file=io.StringIO(), width=60)
    plain = PlainProgress(console, 40)
    plain.evaluation(0, {"eval/gsm8k/mean@4": 0.35}, None)
    plain.evaluation(20, EVALUATION, {"num_rollouts": 0, "eval/gsm8k/mean@4": 0.35})
    assert console.file.getvalue().splitlines() == [
        "eval 0/40  gsm8k  mean@4 0.350",
        "eval 20/40  gsm8k  mean@4 0.350 -> 0.960 (3 failed)",
        "eval 20/40  a/b  mean@1 0.500",
    ]

    panel = live("runs/demo", 40)
    panel.evaluation(20, EVALUATION, {"eval/gsm8k/mean@4": 0.35})
    assert drawn(panel)[3:5] == ["eval    gsm8k  mean@4 0.350 -> 0.960 (3 failed)", "eval    a/b  mean@1 0.500"]


def test_panel_and_pace_follow_the_records() -> None:
    clock = Clock()
    panel = live("runs/demo", 40, clock=clock)
    for step in range(10):
        clock.now_s += 2
        panel.record(record(step, reward=step / 9))
    panel.phase("train", 10)
    lines = drawn(panel)
    assert lines[0].endswith("step 10/40  1:00 left")
    assert lines[1] == "reward    1.000  ▁▂▃▃▄▅▆▆▇█  from 0.000"
    assert lines[2].startswith("length     11.0  █") and lines[2].endswith("from 20.0")
    assert lines[3] == "speed   12,346 tokens/s sampled · 23,457 trained · 1.25 s per step"
    assert lines[4] == "now     training, step 11  0 s"
    panel.phase("eval", 10)
    assert drawn(panel)[4] == "now     evaluating  0 s"


@pytest.mark.parametrize("width", [40, 80, 200])
def test_no_line_is_wider_than_the_terminal(width: int) -> None:
    panel = live("runs/" + "a-long-name-" * 20, 1000)
    for step in range(500):
        panel.record(record(step, reward=-5.0 + step % 7))
    lines = drawn(panel, width)
    assert len(lines) == 5
    assert max(len(line) for line in lines) <= width


def test_a_resumed_run_counts_from_its_start() -> None:
    clock = Clock()
    panel = live("runs/demo", 30, start=20, clock=clock)
    assert "step 20/30" in drawn(panel)[0]
    clock.now_s += 4
    panel.record(record(20))
    assert drawn(panel)[0].endswith("step 21/30  36 s left")


def test_a_run_without_rewards_has_a_panel() -> None:
    panel = live("sft", 2)
    panel.record({"step": 0, "train/loss": 2.0, "perf/step_s": 0.5})
    assert drawn(panel)[1:4] == ["reward  -", "length  -", "speed   0.50 s per step"]


def test_values_that_are_not_finite_are_left_out_of_the_curve() -> None:
    panel = live("demo", 3)
    for step, reward in enumerate((0.25, float("nan"))):
        panel.record(record(step, reward))
    assert drawn(panel)[1] == "reward    0.250  ▃  from 0.250"


def test_the_live_panel_stays_and_lets_prints_through() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=80, color_system=None)
    progress = LiveProgress(console, "runs/demo", 1)
    with progress:
        progress.phase("rollout", 0)
        print("a warning")
        progress.record(record(0))
    text = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", console.file.getvalue())  # type: ignore[attr-defined]
    assert "a warning" in text
    assert text.rstrip().endswith("now     done")
    assert text.count("\x1b") == 0


def test_plain_progress_prints_one_line_per_step() -> None:
    console = Console(file=io.StringIO(), width=20)
    progress = PlainProgress(console, 40)
    progress.record(record(11))
    assert console.file.getvalue() == (  # type: ignore[attr-defined]
        "step 12/40  reward 0.500  length 9.0  loss -0.0123  grad_norm 0.5  tokens/s 12,346  s 1.25\n"
    )


def test_a_loss_that_rounds_to_zero_has_no_sign() -> None:
    console = Console(file=io.StringIO(), width=200)
    PlainProgress(console, 2).record({"step": 0, "train/loss": -1e-9})
    assert console.file.getvalue() == "step 1/2  loss 0.0000\n"


@pytest.mark.parametrize("mode", ["plain", "rich"])
def test_warnings_are_shown_up_to_a_few_of_each_kind(mode: str) -> None:
    console = Console(file=io.StringIO(), force_terminal=mode == "rich", width=40, color_system=None)
    logger = logging.getLogger("fuligo.rollout.runner")
    with open_progress(mode, "demo", 3, console=console):  # type: ignore[arg-type]
        for index in range(10):
            logger.warning("sample %d: [the reward] raised something that takes more than a line", index)
        logger.info("not shown")
    logger.warning("not shown after the end")
    shown = console.file.getvalue()  # type: ignore[attr-defined]
    lines = [line for line in shown.splitlines() if "warning: " in line]
    assert len(lines) == 3
    assert "takes more than a line (further warnings of this kind are in log.txt only)" in lines[2]
    assert "not shown" not in shown


@pytest.mark.parametrize(("mode", "is_shown"), [("auto", True), ("plain", True), ("rich", True), ("none", False)])
def test_warnings_before_the_display_are_shown_unless_there_is_none(mode: str, is_shown: bool, capsys: pytest.CaptureFixture[str]) -> None:
    logger = logging.getLogger("fuligo.data.dataset")
    with warnings_before_progress(mode):
        logger.warning("a row is odd")
    logger.warning("not shown after the end")
    assert capsys.readouterr().out == ("warning: a row is odd\n" if is_shown else "")


@pytest.mark.parametrize(
    ("mode", "terminal", "kind"),
    [
        ("auto", True, LiveProgress),
        ("auto", False, PlainProgress),
        ("plain", True, PlainProgress),
        ("rich", False, LiveProgress),
        ("none", True, Progress),
    ],
)
def test_the_mode_fits_the_console(mode: str, terminal: bool, kind: type) -> None:
    console = Console(file=io.StringIO(), force_terminal=terminal)
    assert type(open_progress(mode, "demo", 3, console=console)) is kind  # type: ignore[arg-type]


def test_before_after_table_is_readable_without_colors() -> None:
    def answered(*responses: tuple[str, float]) -> list[SampleGroup]:
        prompts, ids = (("What is\n17 + 25?", "42"), ("And 1 + 1?", "2")), np.zeros(1, np.int32)
        samples = [
            Sample(0, 0, [{"role": "user", "content": prompt}], ids, label, response=response, reward=reward)
            for (prompt, label), (response, reward) in zip(prompts, responses, strict=True)
        ]
        return [SampleGroup(number, number, [sample]) for number, sample in enumerate(samples)]

    before, after = answered(("The answer is 41", 0.0), ("", 0.0)), answered(("[bold]42", 1.0), ("2", 1.0))
    console = Console(file=io.StringIO(), width=80, record=True, color_system="truecolor")
    console.print(before_after_table(before, after))
    styled = console.export_text(styles=True, clear=False)
    lines = [line.strip() for line in console.export_text().splitlines() if line.strip()]
    assert re.fullmatch(r"What is 17 \+ 25\?\s+✗ The answer is 41\s+✓ \[bold\]42\s+42", lines[2])
    assert re.fullmatch(r"And 1 \+ 1\?\s+✗ \(nothing\)\s+✓ 2\s+2", lines[3])
    assert "\x1b[31m✗ (nothing)" in styled and "\x1b[32m✓ 2" in styled
    assert max(len(line) for line in lines) <= 80


@pytest.mark.parametrize(("mode", "shown"), [("plain", "resuming from runs/[a]/iter_0000040, after 40 of 100 rollouts\n"), ("none", "")])
def test_the_checkpoint_that_a_run_resumes_from_is_shown_on_one_line(mode: str, shown: str) -> None:
    console = Console(file=io.StringIO(), width=20)
    show_origin(mode, Path("runs/[a]/iter_0000040"), 40, 100, console)
    assert isinstance(console.file, io.StringIO) and console.file.getvalue() == shown


@pytest.mark.parametrize(
    ("share", "num_steps", "text"),
    [
        (0.25, 0, "skipped 25% of samples (advantage 0)"),
        (0.75, 1, "skipped 75% of samples and 1 optimizer step (advantage 0)"),
        (1.0, 2, "skipped training (all advantages are 0)"),
    ],
)
def test_skipped_samples_are_shown_with_the_reason(share: float, num_steps: int, text: str) -> None:
    skipped = {"train/skipped_share": share, "train/num_skipped_steps": num_steps}
    console = Console(file=io.StringIO(), width=80)
    panel = live("runs/demo", 40)
    for progress in (PlainProgress(console, 40), panel):
        progress.record({"step": 0, **skipped})
    assert console.file.getvalue() == f"step 1/40  {text}\n"
    assert f"train   {text}" in drawn(panel)


def test_a_step_that_trains_on_all_samples_does_not_mention_skipping() -> None:
    trained = record(0) | {"train/skipped_share": 0.0, "train/num_skipped_steps": 0}
    console = Console(file=io.StringIO(), width=60)
    panel = live("runs/demo", 40)
    for progress in (PlainProgress(console, 40), panel):
        progress.record(trained)
    assert "skip" not in console.file.getvalue() and len(drawn(panel)) == 5
