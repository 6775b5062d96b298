import pytest

from fuligo.trainer.ranks.settings import LearningRateSchedule


def test_warm_up_rises_linearly_from_a_rate_above_zero_to_the_peak():
    schedule = LearningRateSchedule(peak=1.0, warmup_steps=3)
    assert [schedule.at(step) for step in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]


@pytest.mark.parametrize(("style", "middle"), [("linear", 0.55), ("cosine", 0.55), ("constant", 1.0)])
def test_decay_starts_at_the_peak_and_passes_the_middle(style, middle):
    schedule = LearningRateSchedule(peak=1.0, minimum=0.1, style=style, warmup_steps=10, decay_steps=30)
    assert schedule.at(10) == pytest.approx(1.0)
    assert schedule.at(20) == pytest.approx(middle)


@pytest.mark.parametrize("style", ["linear", "cosine"])
def test_decay_ends_at_the_minimum_and_stays_there(style):
    schedule = LearningRateSchedule(peak=1.0, minimum=0.1, style=style, warmup_steps=2, decay_steps=6)
    rates = [schedule.at(step) for step in range(2, 20)]
    assert rates == sorted(rates, reverse=True)
    assert rates[4:] == pytest.approx([0.1] * 14)


def test_cosine_is_above_linear_early_and_below_it_late():
    cosine, linear = (LearningRateSchedule(peak=1.0, style=style, decay_steps=8) for style in ("cosine", "linear"))
    assert cosine.at(2) > linear.at(2)
    assert cosine.at(6) < linear.at(6)
