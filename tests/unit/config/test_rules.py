"""Tests that violate every rule once in an otherwise valid config, and apply its fix."""

import re

import pytest

from fuligo.algorithms.estimators import ESTIMATORS
from fuligo.config.changes import apply_changes
from fuligo.config.findings import Severity
from fuligo.config.flags import flags
from fuligo.config.rules import effects, required
from fuligo.config.validate import RULES, findings, validate
from fuligo.errors import ConfigError
from fuligo.rollout.rewards.rules import NAMED
from fuligo.rollout.rewards.rules import RULES as REWARDS
from tests.unit.config.broken import BROKEN
from tests.unit.config.conftest import Values, config_of, config_with


@pytest.mark.parametrize(("rule", "values", "text"), [(rule, *case) for rule, cases in BROKEN.items() for case in cases])
def test_a_broken_rule_is_one_finding_that_names_its_flags(rule: str, values: Values, text: str) -> None:
    config = config_of(values)
    (finding,) = findings(config)
    assert finding.id == rule
    assert finding.fix or finding.advice
    assert finding.flags and any(option in finding.text for option in finding.flags)
    if finding.severity is Severity.ERROR:
        with pytest.raises(ConfigError, match=re.escape(text)):
            validate(config)
    else:
        (warning,) = validate(config)
        assert text in warning


@pytest.mark.parametrize(("rule", "values"), [(rule, case[0]) for rule, cases in BROKEN.items() for case in cases])
def test_a_fix_mends_what_it_is_for_and_breaks_nothing(rule: str, values: Values) -> None:
    config = config_of(values)
    (finding,) = findings(config)
    if finding.fix:
        assert findings(apply_changes(config, finding.fix)) == ()


def test_every_rule_is_tested_and_says_why_it_is_one() -> None:
    ids = [rule.id for rule in RULES]
    assert len(set(ids)) == len(ids)
    assert {*BROKEN, *(effect.id for effect in effects.EFFECTS)} == set(ids)
    assert all(rule.check.__doc__ for rule in RULES)


def test_all_problems_are_reported_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        validate(config_with(hf_checkpoint=None, global_batch_size=100, kl_loss_coef=0.1, eval_interval=2))
    assert len(caught.value.problems) == 4


def test_the_table_of_rewards_is_that_of_the_rewards() -> None:
    assert NAMED.keys() == required.REWARD_NEEDS.keys()
    assert {name for name, rule in REWARDS.items() if not rule.keys} - required.NUMBERS == {"remote_rm", "boxed_remote_rm"}
    assert {*REWARDS} == {*NAMED, *(f"boxed_{name}" for name in NAMED)}


def test_the_choices_of_estimators_are_those_of_the_algorithms() -> None:
    assert set(flags()["advantage_estimator"].choices) == {*ESTIMATORS}
