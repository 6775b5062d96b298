"""Suggestions for runs that do not fit: changes that make them fit, the cheapest first."""

from dataclasses import replace

import pytest

from fuligo.config.changes import apply_changes
from fuligo.planner.estimate import estimate
from fuligo.planner.subject import Subject
from fuligo.planner.suggestions import remedies, violated_rules
from tests.unit.planner.subjects import CPU_ADAM, FLASH_8, GLM4_9B_COLOCATED, GLM4_9B_SEPARATE, subject_of

NO_RECOMPUTE = GLM4_9B_SEPARATE.replace("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1", "")
TOO_BIG = {
    "cpu adam missing": (FLASH_8, "glm4.7-flash", "h100-80"),
    "long micro-batches": (f"{NO_RECOMPUTE} --max-tokens-per-gpu 32768", "glm4-9b", "h100-80"),
    "small GPUs": (GLM4_9B_SEPARATE, "glm4-9b", "a100-40"),
    "greedy engines": (GLM4_9B_COLOCATED.replace("static 0.7", "static 0.99"), "glm4-9b", "h100-80"),
    "starved engines": (GLM4_9B_COLOCATED.replace("static 0.7", "static 0.1"), "glm4-9b", "h100-80"),
}


@pytest.mark.parametrize("case", TOO_BIG)
def test_every_suggestion_fits_and_breaks_no_rule(case: str) -> None:
    flags, model, gpu_name = TOO_BIG[case]
    subject = subject_of(flags, model, gpu_name)
    found = remedies(subject)
    assert 1 <= len(found) <= 3
    for remedy in found:
        changed = replace(subject, config=apply_changes(subject.config, remedy.changes))
        assert estimate(changed).fits
        assert not violated_rules(changed) - violated_rules(subject)
        assert len(remedy.suggestion.flags) == len(remedy.changes)
    assert [remedy.gpu_seconds for remedy in found] == sorted(remedy.gpu_seconds for remedy in found)


def test_what_fits_needs_no_suggestion() -> None:
    assert remedies(subject_of(f"{FLASH_8} {CPU_ADAM}", "glm4.7-flash")) == ()


def first(subject: Subject) -> tuple[str, ...]:
    return remedies(subject)[0].suggestion.flags


def test_cpu_adam_is_the_cheapest_way_to_train_glm47_flash_on_8_gpus() -> None:
    assert first(subject_of(FLASH_8, "glm4.7-flash")) == (
        "--optimizer-cpu-offload",
        "--overlap-cpu-optimizer-d2h-h2d",
        "--use-precision-aware-optimizer",
    )


def test_costs_are_told() -> None:
    suggestions = [remedy.suggestion for remedy in remedies(subject_of(FLASH_8, "glm4.7-flash"))]
    assert "of a node's memory" in suggestions[0].cost
    assert all(suggestion.cost.startswith("a step takes ") and suggestion.saved_bytes > 0 for suggestion in suggestions)
    assert any("on 2 nodes instead of 1" in suggestion.cost for suggestion in suggestions)


def test_an_engine_without_a_cache_gets_a_larger_share() -> None:
    [share] = first(subject_of(GLM4_9B_COLOCATED.replace("static 0.7", "static 0.1"), "glm4-9b"))
    assert share.startswith("--sglang-mem-fraction-static 0.")
