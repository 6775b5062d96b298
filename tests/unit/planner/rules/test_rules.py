"""Each rule has runs that violate it alone; a shown fix leaves a run without findings."""

from dataclasses import replace

import pytest

from fuligo.config.changes import apply_changes, change_text
from fuligo.config.findings import Rule
from fuligo.planner.check import check
from fuligo.planner.rules import RULES
from fuligo.planner.rules.reference import reference
from tests.unit.planner.rules.broken_runs import BROKEN, CASES, checked
from tests.unit.planner.rules.recipe_runs import DENSE, DRAFTS, EXAMPLES, FP8, LARGE, MIXTURE, REDUNDANT, SPARSE, Run

_IDS = [rule.id for rule in RULES]
_ADVICE_ONLY = {
    "PLAN-QUANTIZED-WEIGHTS",
    "PLAN-MXFP4-ENGINES",
    "PLAN-QUANTIZED-ENGINES",
    "PLAN-CHECKPOINT-GPU",
    "PLAN-TORCH-ONLY",
    "PLAN-MEGATRON-ONLY",
    "PLAN-EMBEDDED-MODEL",
    "PLAN-SGLANG-MODEL",
}
"""Rules that no change of flags fixes."""


@pytest.mark.parametrize("recipe", [DENSE, DRAFTS, MIXTURE, REDUNDANT, LARGE, FP8, SPARSE])
def test_the_recipes_break_no_rule(recipe: str) -> None:
    assert check(Run(recipe).subject()) == ()


@pytest.mark.parametrize(("rule", "number"), CASES)
def test_only_the_broken_rule_is_found_and_its_fix_resolves_it(rule: str, number: int) -> None:
    subject, found = checked(rule, number)
    assert {finding.id for finding in found} == {rule}
    for finding in found:
        assert finding.flags
        assert any(flag in finding.text or flag == "--sglang-config" for flag in finding.flags)
        assert finding.fix or rule in _ADVICE_ONLY, finding
        assert finding.fix or finding.advice
        assert all(change_text(change, subject.config) for change in finding.fix)
    if rule not in _ADVICE_ONLY:
        fixed = subject.config
        for finding in found:
            fixed = apply_changes(fixed, finding.fix)
        assert check(replace(subject, config=fixed)) == ()


def test_every_rule_is_broken_by_some_run() -> None:
    assert sorted(BROKEN) == sorted(_IDS)
    assert len(set(_IDS)) == len(_IDS)


def test_the_page_of_rules_is_what_the_rules_say() -> None:
    assert (EXAMPLES.parent / "docs" / "rules.md").read_text(encoding="utf-8") == reference()


@pytest.mark.parametrize("rule", RULES, ids=_IDS)
def test_a_rule_says_why_it_is_one(rule: Rule) -> None:
    assert rule.id.startswith("PLAN-")
    assert rule.why.endswith(".") and len(rule.why) < 160
    assert rule.flags
