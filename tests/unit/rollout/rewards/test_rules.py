"""Built-in rewards follow their published rules."""

import subprocess
import sys
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fuligo.config.groups import RewardFlags
from fuligo.errors import ConfigError
from fuligo.rollout.rewards import RULES, RewardRunner, find_rule
from fuligo.rollout.rewards.dapo import dapo_reward, normalize
from fuligo.rollout.rewards.rules import f1_score
from fuligo.types import SampleGroup, SampleStatus

MakeGroup = Callable[..., SampleGroup]


@pytest.fixture(scope="module")
def cases() -> list[tuple[str, str, Any, Any]]:
    """(rm_type, response, label, reward)"""
    boxed = r"so \boxed{%s}".__mod__
    return [
        ("math", boxed("42"), "42", 1.0),
        ("math", boxed("41"), "42", 0.0),
        ("math", "42", 42, 1.0),
        ("math", "The answer is 42.", 42, 1.0),
        ("math", "The answer is $x^2+1$.", "1+x^2", 1.0),
        ("math", "who knows", 42, 0.0),
        ("math", boxed("1") + " and " + boxed("2")[3:], "\\{1, 2\\}", 1.0),
        ("math", boxed("1") + " and " + boxed("2")[3:], "2", 0.0),
        ("math", boxed("5") + " no wait " + boxed("6"), "6", 1.0),
        ("math", boxed("5") + " no wait " + boxed("6"), "5", 0.0),
        ("math", "The answer is 5 or 6 or 7", "5", 0.0),
        ("math", boxed("0.0"), r"6.626\times10^{-34}", 0.0),
        ("deepscaler", "</think>" + boxed("42"), "42", 1.0),
        ("deepscaler", "</think>" + boxed(r"\frac{1}{2}"), 0.5, 1.0),
        ("deepscaler", "</think>" + boxed("0.5"), r"\boxed{\frac{1}{2}}", 1.0),
        ("deepscaler", "</think>" + boxed("8"), [7, "8"], 1.0),
        ("deepscaler", "</think>" + boxed("9"), [7, "8"], 0.0),
        ("deepscaler", "###Response" + boxed(r"18\text{ dollars}"), 18, 1.0),
        ("deepscaler", boxed("42"), "42", 0.0),
        ("deepscaler", "</think> 42", "42", 0.0),
        ("boxed_deepscaler", boxed("42"), "42", 1.0),
        ("boxed_math", boxed(r"\frac12"), "0.5", 1.0),
        ("boxed_math", "42", "42", 0.0),
        ("dapo", "Answer: 42 dollars", 42, {"score": 1.0, "acc": 1.0, "pred": "42"}),
        ("dapo", "Answer: $x = 42$", ["7", "42"], {"score": 1.0, "acc": 1.0, "pred": "42"}),
        ("dapo", "Answer: 42", "42.0", {"score": 1.0, "acc": 1.0, "pred": "42"}),
        ("dapo", "Answer: 18.", "18", {"score": 1.0, "acc": 1.0, "pred": "18"}),
        ("dapo", "**Answer:** 18", "18", {"score": 1.0, "acc": 1.0, "pred": "18"}),
        ("dapo", "Answer: dollars", "cents", {"score": -1.0, "acc": 0.0, "pred": ""}),
        ("dapo", "Answer: 41", "42", {"score": -1.0, "acc": 0.0, "pred": "41"}),
        ("dapo", boxed("42"), "42", {"score": -1.0, "acc": 0.0, "pred": "[INVALID]"}),
        ("boxed_dapo", boxed("42"), "42", {"score": 1.0, "acc": 1.0, "pred": "42"}),
        ("f1", "The cat sat", "a cat sat down", pytest.approx(0.8)),
        ("f1", "dog", ["cat", "dog"], 1.0),
        ("boxed_f1", r"I think \boxed{the cat}", "cat", 1.0),
        ("boxed_f1", "no box", "cat", 0.0),
    ]


async def test_rewards_follow_their_rules(cases: list[tuple[str, str, Any, Any]], make_group: MakeGroup) -> None:
    async with RewardRunner(RewardFlags(reward_key="score")) as runner:
        for rm_type, response, label, expected in cases:
            group = make_group(response, label=label, rm_type=rm_type)
            await runner(group)
            sample = group.samples[0]
            assert (sample.reward, sample.error) == (expected, None), (rm_type, response, label)
            assert [span.name for span in sample.spans] == ["reward"]


@pytest.mark.parametrize(
    ("answer", "normal"),
    [
        (r"\$1,234", "1234"),
        ("x = 5", "5"),
        (r"\frac12", r"\frac{1}{2}"),
        (r"\sqrt2", r"\sqrt{2}"),
        (r"90^\circ", "90"),
        (r"5\text{ cm}", "5"),
        (r"\text{(A)}", "(A)"),
        (r"\textbf{12}", "12"),
        ("a dog", "dog"),
        ("so $7$ it is", "7"),
        (r"\mathrm{th}3", "3"),
    ],
)
def test_dapo_compares_answers_without_units_and_markup(answer: str, normal: str) -> None:
    assert normalize(answer) == normal


@settings(deadline=None)
@given(st.text(max_size=400))
def test_dapo_accepts_any_text(text: str) -> None:
    assert dapo_reward(text, [text])["acc"] in (0.0, 1.0)


WORDS = st.lists(st.sampled_from(["cat", "dog", "sat", "on"]), max_size=6).map(" ".join)


@settings(deadline=None)
@given(answer=WORDS, gold=WORDS)
def test_f1_is_the_harmonic_mean_of_precision_and_recall(answer: str, gold: str) -> None:
    """Compare with the definition by removal of matched tokens, one at a time."""
    left, matched = gold.split(), 0
    for token in answer.split():
        if token in left:
            left.remove(token)
            matched += 1
    score = f1_score(f"The {answer}!", f"a {gold}.")
    assert score == f1_score(gold, answer)
    if matched:
        precision, recall = matched / len(answer.split()), matched / len(gold.split())
        assert score == pytest.approx(2 * precision * recall / (precision + recall))
    else:
        assert score == float(not answer and not gold)


async def test_random_is_a_fair_coin_that_depends_on_the_sample_only(make_group: MakeGroup) -> None:
    async with RewardRunner(RewardFlags(rm_type="random")) as runner:
        first, second = make_group(*["x"] * 400), make_group(*["y"] * 400)
        await runner(first)
        await runner(second)
    rewards = [sample.reward for sample in first.samples]
    assert rewards == [sample.reward for sample in second.samples]
    assert set(rewards) == {0.0, 1.0} and 150 < sum(rewards) < 250


@pytest.mark.parametrize("label", [None, "", " ", "\\boxed{}", [], {"answer": 1}, True])
@pytest.mark.parametrize("rm_type", ["math", "deepscaler", "dapo", "f1"])
async def test_without_a_usable_label_the_sample_fails(make_group: MakeGroup, rm_type: str, label: Any) -> None:
    async with RewardRunner(RewardFlags(rm_type=rm_type, reward_key="acc")) as runner:
        group = make_group("no answer at all", label=label)
        await runner(group)
    assert group.samples[0].status is SampleStatus.FAILED
    assert "label" in str(group.samples[0].error)


def test_an_unknown_name_lists_the_known_ones_and_the_nearest() -> None:
    with pytest.raises(ConfigError, match=r"--rm-type deepscalar is not a built-in reward; did you mean deepscaler") as raised:
        find_rule("deepscalar")
    for name in ("math", "deepscaler", "dapo", "f1", "random", "remote_rm", "boxed_"):
        assert name in str(raised.value)
    assert all(find_rule(name) for name in RULES)


def test_contradictory_settings_are_refused() -> None:
    with pytest.raises(ConfigError, match="needs --rm-url"):
        RewardRunner(RewardFlags(rm_type="boxed_remote_rm"))
    with pytest.raises(ConfigError, match="choose --reward-key score"):
        RewardRunner(RewardFlags(rm_type="dapo"))


def test_the_worker_imports_little() -> None:
    code = "import runpy, sys; runpy.run_path(sys.argv[1])['prepare'](); print({'torch', 'numpy', 'fuligo.config'} & set(sys.modules))"
    from fuligo.rollout.rewards import symbolic_judge

    done = subprocess.run(
        [sys.executable, "-P", "-c", code, symbolic_judge.__file__], capture_output=True, text=True, check=True, timeout=240
    )
    assert done.stdout.strip() == "set()"
