"""Difference between engine and trainer, compared with the model's precision noise if the run has measured it. Pure functions."""

from fuligo.observability.viewer.metric_columns import MetricColumns, Values

DIFFERENCE = "train/logprob_abs_diff"
NOISE = "train/precision_noise"
NOISE_FACTOR = 3.0
"""Multiple of the noise above which engine and trainer disagree. Two bf16 implementations of a model have differed by 0.5 to 1.7 times its
noise; with samples up to two versions old, by 2.2 times; with FP8 on one side, by at least 3.2 times (docs/view.md)."""
LEAST = 0.03
"""Difference in nats up to which engine and trainer always agree."""
MOST = 1.0
"""Difference in nats above which engine and trainer disagree whatever noise was measured, because the measurement may be wrong. Two bf16
implementations of a model with random weights have differed by 0.6 nats, its noise; wrong kernels by 2.7 (docs/fp8.md)."""
FIXED = 0.1
"""Limit in nats if the noise was not measured, and lowest limit for tokens of older versions, which also differ by the updates since."""


def noise(metrics: MetricColumns) -> Values:
    """Return the latest measured noise in nats, by row; None before the first measurement."""
    known: Values = []
    for measured in metrics.column(NOISE):
        known.append(measured if measured is not None or not known else known[-1])
    return known


def limits(metrics: MetricColumns) -> list[float]:
    """Return the difference in nats, by row, above which engine and trainer disagree, whatever its usual value."""
    ages = metrics.column("rollout/staleness")
    return [
        FIXED if own is None else min(max(NOISE_FACTOR * own, FIXED if age else LEAST), MOST)
        for own, age in zip(noise(metrics), ages, strict=True)
    ]


def _limit(limit: float) -> str:
    """Describe the limit, and the rule for rises of smaller values if it can apply."""
    rises = f", or three times the usual value (at least {LEAST} nats) if that is lower" if limit > LEAST else ""
    return f"{limit:.2g} nats{rises}"


def reason(metrics: MetricColumns, row: int) -> str:
    """Return the alarm's sentence about what the difference in a row is compared with."""
    own = noise(metrics)[row]
    if own is None:
        return f"The model's own precision noise was not measured, so the limit is fixed: {_limit(FIXED)}."
    return f"This model's own bf16 noise is {own:.2g} nats; the limit is {_limit(limits(metrics)[row])}."


def comparison(metrics: MetricColumns) -> str | None:
    """Return the health page's sentence about the latest step with a difference; None if no step has one."""
    values = metrics.column(DIFFERENCE)
    row = next((row for row in reversed(range(len(values))) if values[row] is not None), None)
    if row is None:
        return None
    own = noise(metrics)[row]
    basis = "the model's own precision noise was not measured" if own is None else f"this model's own bf16 noise is {own:.2g} nats"
    return f"Engine and trainer differ by {values[row]:.2g} nats; {basis}. The alarm's limit is {_limit(limits(metrics)[row])}."
