"""Metrics of the optimizer steps of a rollout."""

from fuligo.trainer.metric_sums import mean_of_steps


def test_a_metric_is_the_mean_of_the_steps_that_have_it() -> None:
    assert mean_of_steps([{"loss": 1.0}, {"loss": 2.0, "rare": 5.0}, {"loss": 6.0}]) == {"loss": 3.0, "rare": 5.0}
