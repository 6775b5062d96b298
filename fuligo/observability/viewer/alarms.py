"""Alarms of a run: faults that its metrics show, each with an explanation and a remedy. Pure functions."""

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from fuligo.observability.viewer import agreement
from fuligo.observability.viewer.metric_columns import MetricColumns, Values, finite, median
from fuligo.observability.viewer.mismatch import Explanation

BASE_STEPS = 50
"""Number of preceding steps; a value is compared with the good ones among them."""
MIN_BASE_STEPS = 3
"""Minimum number of good steps for a comparison."""
LEARNED_REWARD = 0.9
"""Mean reward from which a task with rewards up to 1 counts as learned."""
MANY_TRUNCATED = 0.25
"""Share of truncated responses above which many are truncated."""
LASTING_STEPS = 3
"""Consecutive steps that some alarms need, because a single step may be an outlier."""


@dataclass(frozen=True, slots=True)
class Alarm:
    """Fault that a metric shows in consecutive steps."""

    key: str
    """Key of the metric."""
    severity: Literal["error", "warning", "note"]
    title: str
    text: str
    first_step: int
    last_step: int
    ongoing: bool
    """True if the condition holds at the latest step."""


@dataclass(frozen=True, slots=True)
class Stretch:
    """Consecutive rows at which a condition holds."""

    first: int
    last: int


@dataclass(frozen=True, slots=True)
class _Watch:
    """Rule for one metric: which values are bad, and the text of the alarm."""

    key: str
    severity: Literal["error", "warning", "note"]
    title: str
    bad: Callable[[Values, MetricColumns], list[bool]]
    """Function that returns for each row whether the metric's value is bad, given all metrics."""
    text: str
    """Template over the facts of `_facts`."""
    lasting: int = 1
    """Minimum number of rows of a stretch."""
    excused: Callable[[MetricColumns], list[bool]] | None = None
    """Function that returns for each row whether a bad value is not a fault there; None if it always is one."""
    reason: Callable[[MetricColumns, int], str] | None = None
    """Function that returns a further sentence about the first row of a stretch; None: the text needs none."""


def alarms(metrics: MetricColumns) -> list[Alarm]:
    """Return the latest alarm of each kind: ongoing ones first, then by severity, then the newest first.

    The text of an alarm of `WATCHES` says how often it occurred before.
    """
    found = [*_watched(metrics), *_not_finite(metrics)]
    severities = ("error", "warning", "note")
    return sorted(found, key=lambda alarm: (not alarm.ongoing, severities.index(alarm.severity), -alarm.last_step))


def with_cause(alarm: Alarm, cause: Explanation | None) -> Alarm:
    """Return the alarm with its cause in title and text, if the cause is known."""
    return replace(alarm, title=f"{alarm.title}: {cause.brief}", text=f"{alarm.text} {cause.text}") if cause else alarm


def stretches(bad: Sequence[bool], lasting: int = 1) -> list[Stretch]:
    """Return the stretches of at least `lasting` rows; a single good row does not end one."""
    found: list[Stretch] = []
    for row in (row for row, is_bad in enumerate(bad) if is_bad):
        if found and row - found[-1].last <= 2:
            found[-1] = Stretch(found[-1].first, row)
        else:
            found.append(Stretch(row, row))
    return [stretch for stretch in found if stretch.last - stretch.first + 1 >= lasting]


def _watched(metrics: MetricColumns) -> Iterator[Alarm]:
    for watch in WATCHES:
        values = metrics.column(watch.key)
        bad = watch.bad(values, metrics)
        if watch.excused is not None:
            bad = [is_bad and not is_fine for is_bad, is_fine in zip(bad, watch.excused(metrics), strict=True)]
        if found := stretches(bad, watch.lasting):
            before = len(found) - 1
            text = watch.text.format(**_facts(values, found[-1]))
            text += f" {watch.reason(metrics, found[-1].first)}" if watch.reason is not None else ""
            text += f" It happened {_times(before)} before." if before else ""
            yield _alarm(metrics, watch, found[-1], text)


def _alarm(metrics: MetricColumns, watch: _Watch, stretch: Stretch, text: str) -> Alarm:
    first, last = (int(metrics.steps[row] or 0) for row in (stretch.first, stretch.last))
    ongoing = stretch.last == metrics.num_rows - 1
    when = f"in step {first}"
    if first != last:
        when = f"since step {first}" if ongoing else f"in steps {first} to {last}"
    return Alarm(watch.key, watch.severity, f"{watch.title} {when}", text, first, last, ongoing)


def _times(number: int) -> str:
    return "once" if number == 1 else "twice" if number == 2 else f"{number} times"


def _not_finite(metrics: MetricColumns) -> Iterator[Alarm]:
    for key in ("train/loss", "train/grad_norm"):
        values = metrics.columns.get(key)
        if not values or not finite(values):
            continue
        began = next(row for row, value in enumerate(values) if value is not None)
        missing = [value is None and not skipped for value, skipped in zip(metrics.column(key), _nothing_trained(metrics), strict=True)]
        if found := stretches([row > began and is_missing for row, is_missing in enumerate(missing)]):
            watch = _Watch(key, "error", f"{key} is not a number", lambda *_: [], "")
            text = "The update was skipped or corrupted the weights. Look at that step's samples and resume from a checkpoint before it."
            yield _alarm(metrics, watch, found[-1], text)


def _base(values: Values, row: int, bad: Sequence[bool]) -> float | None:
    """Return the median of the good ones of the `BASE_STEPS` rows before a row; None if they are fewer than `MIN_BASE_STEPS`."""
    good = [value for at, value in enumerate(values[max(0, row - BASE_STEPS) : row], max(0, row - BASE_STEPS)) if not bad[at]]
    known = finite(good)
    return median(known) if len(known) >= MIN_BASE_STEPS else None


def _rises(
    factor: float, least: float, at_once: Callable[[MetricColumns], list[float]] | None = None
) -> Callable[[Values, MetricColumns], list[bool]]:
    """Return a rule for values that rise.

    A value is bad if it exceeds both `least` and `factor` times the median of the good steps before it, or the limit that `at_once` returns
    for its row.
    """

    def bad(values: Values, metrics: MetricColumns) -> list[bool]:
        limits = [math.inf] * len(values) if at_once is None else at_once(metrics)
        found: list[bool] = []
        for row, value in enumerate(values):
            base = _base(values, row, found) if value is not None and value > least else None
            rise = base is not None and value is not None and value > factor * base
            found.append(rise or (value is not None and value > limits[row]))
        return found

    return bad


def _above(limit: float) -> Callable[[Values, MetricColumns], list[bool]]:
    return lambda values, _: [value is not None and value > limit for value in values]


def _first_median(values: Values, number: int = 5) -> float | None:
    """Return the median of the first values; None if there are none."""
    return median(finite(values)[:number])


def _entropy_collapses(values: Values, _: MetricColumns) -> list[bool]:
    start = _first_median(values)
    return [start is not None and row >= 5 and value is not None and value < 0.1 * start for row, value in enumerate(values)]


def _learned(metrics: MetricColumns) -> list[bool]:
    """Return whether the task is learned, by row: the reward is near 1, or high and equal within most groups.

    A high reward is above its start and at least 90% of its maximum. A policy that has learned its task is certain of its answers.
    """
    rewards = metrics.column("rollout/reward_mean")
    equal = metrics.column("rollout/zero_std_ratio")
    start = _first_median(rewards)
    return [
        reward is not None
        and start is not None
        and (LEARNED_REWARD <= reward <= 1 or (same is not None and same > 0.5 and reward > start and reward >= 0.9 * max(finite(rewards))))
        for reward, same in zip(rewards, equal, strict=True)
    ]


def _nothing_trained(metrics: MetricColumns) -> list[bool]:
    """Return whether no sample of the rollout had an advantage, so that there is neither a loss nor a gradient norm, by row."""
    return [share == 1 for share in metrics.column("train/skipped_share")]


def _learned_or_without_reward(metrics: MetricColumns) -> list[bool]:
    """Return whether success, or the alarm about a reward of 0, explains that all samples are skipped, by row."""
    rewards = metrics.column("rollout/reward_mean")
    return [is_learned or reward == 0 for is_learned, reward in zip(_learned(metrics), rewards, strict=True)]


def _halves(values: Values, _: MetricColumns) -> list[bool]:
    start = _first_median(values, 3)  # within five steps, answers can become half as long
    return [start is not None and row >= 3 and value is not None and value < 0.5 * start for row, value in enumerate(values)]


def _stops_late_or_earns_no_more(metrics: MetricColumns) -> list[bool]:
    """Return whether shorter responses are not a sign of an exploited reward, by row.

    They are not where many of the first responses were truncated, so that the policy has learned to stop, or the reward has not risen.
    """
    rewards, truncated = metrics.column("rollout/reward_mean"), _first_median(metrics.column("rollout/truncated_ratio"))
    start = _first_median(rewards)
    stops_late = truncated is not None and truncated > MANY_TRUNCATED
    return [stops_late or reward is None or start is None or reward <= start for reward in rewards]


def _most_run(metrics: MetricColumns) -> list[bool]:
    """Return whether the engines run at least as many requests as wait in them, by row."""
    running, waiting = (metrics.column(f"engine/num_{state}_mean") for state in ("running", "waiting"))
    return [ran is None or waited is None or ran >= waited for ran, waited in zip(running, waiting, strict=True)]


def _facts(values: Values, stretch: Stretch) -> dict[str, float | str]:
    """Return facts about a stretch for the texts; `compared` is its worst value and the usual one: `0.31, 18 times the 0.017 before`."""
    shown = finite(values[stretch.first : stretch.last + 1])
    worst, base = max(shown), median(finite(values[max(0, stretch.first - BASE_STEPS) : stretch.first]))
    times = f", {worst / base:.3g} times the {base:.3g} before" if base else ""
    return {
        "worst": worst,
        "compared": f"{worst:.3g}{times}",
        "compared_nats": f"{worst:.3g} nats{times}",
        "low": min(shown),
        "start": _first_median(values) or 0.0,
        "first": _first_median(values, 3) or 0.0,
        "total": sum(shown),
    }


_NO_REWARD = (
    "The mean reward of these steps is at most {worst:.2g}, so next to nothing is learned. Read some samples: does the answer have the "
    "form that the reward reads, is the label right, is the response cut off? Then try easier prompts."
)
_DISAGREE = "Their log-probabilities of the same tokens differ on average by up to {compared_nats}."
_CLIPPED = (
    "Up to {worst:.0%} of the tokens have no gradient because the policy moves too far within a step. "
    "Try fewer optimizer steps per rollout, a smaller learning rate or a wider clip range."
)
_KL_GROWS = "It reaches {compared_nats}. Read samples: the policy may be exploiting the reward."
_COLLAPSED = (
    "It fell from {start:.3g} to {low:.3g} nats while the task is not learned: the samples of a group are nearly identical, so there is "
    "little left to learn from. Resume from an earlier checkpoint with a smaller learning rate, a higher temperature or --entropy-coef."
)
_SHORTER = (
    "Their mean length fell from {first:.3g} to {low:.3g} tokens while the reward rose: the policy may be exploiting the reward. Read "
    "samples with the highest rewards. If their answers are too short, evaluate something that the reward does not check, and train on "
    "prompts, or with a reward, that ask for whole answers; then resume from a checkpoint before the decline."
)
_GRADIENT_JUMPS = "It reaches {compared}. Look at the samples of that step for very long responses or rewards out of range."
_TRUNCATED = (
    "Up to {worst:.0%} are truncated at the maximum length and judged without their end. Read some: if they are not repetitive, raise "
    "--rollout-max-response-len."
)
_EQUAL = (
    "In up to {worst:.0%} of the groups all rewards are equal; estimators that compare the samples of a group learn nothing from these "
    "groups. Try harder or easier prompts, more samples per prompt, or dynamic sampling, which replaces such groups."
)
_NOT_TRAINED = (
    "All advantages of these rollouts are 0, usually because all rewards of each group are equal. Their optimizer steps are skipped, so "
    "the weights do not change. Read some samples, then try harder or easier prompts, more samples per prompt, or dynamic sampling."
)
_WAITING = (
    "Up to {worst:.0f} requests wait on average, more than run: the KV caches are too small (engine/kv_usage_max near 1), or the engines "
    "run too few requests at a time. SGLang sizes its cache by the memory that is free when it starts: look for other processes on its "
    "GPUs (nvidia-smi). Otherwise raise --sglang-mem-fraction-static or --sglang-max-running-requests, for the embedded engine "
    "--embedded-max-total-tokens or --embedded-max-running-requests, or lower --rollout-concurrency."
)
_FAILED = "{total:.0f} in total. Each failed sample shows its reason (Samples, filter by failed)."

WATCHES = (
    # A difference above the limits means wrong weights, sampling parameters or routing, or FP8.
    _Watch(
        agreement.DIFFERENCE,
        "error",
        "Engine and trainer disagree",
        _rises(3, agreement.LEAST, at_once=agreement.limits),
        _DISAGREE,
        reason=agreement.reason,
    ),
    _Watch(
        "rollout/reward_mean",
        "error",
        "The reward is (almost) 0",
        lambda values, _: [value == 0 for value in values],
        _NO_REWARD,
        LASTING_STEPS,
    ),
    _Watch("train/clip_fraction", "warning", "Much of the update is clipped", _above(0.3), _CLIPPED, LASTING_STEPS),
    _Watch("train/kl", "warning", "KL to the reference is growing", _rises(5, 0.1), _KL_GROWS, LASTING_STEPS),
    _Watch("train/entropy", "warning", "Entropy has collapsed", _entropy_collapses, _COLLAPSED, LASTING_STEPS, _learned),
    _Watch("train/grad_norm", "warning", "The gradient norm jumps", _rises(10, 0.0), _GRADIENT_JUMPS),
    _Watch(
        "rollout/response_len_mean",
        "warning",
        "Responses have become short",
        _halves,
        _SHORTER,
        LASTING_STEPS,
        _stops_late_or_earns_no_more,
    ),
    _Watch("rollout/truncated_ratio", "warning", "Many responses are truncated", _above(MANY_TRUNCATED), _TRUNCATED, LASTING_STEPS),
    _Watch("rollout/zero_std_ratio", "note", "Most groups have equal rewards", _above(0.8), _EQUAL, LASTING_STEPS),
    _Watch(
        "train/skipped_share",
        "warning",
        "Nothing to train on",
        lambda values, _: [value == 1 for value in values],
        _NOT_TRAINED,
        LASTING_STEPS,
        _learned_or_without_reward,
    ),
    _Watch("engine/num_waiting_mean", "warning", "Most requests wait in the engines", _above(0), _WAITING, LASTING_STEPS, _most_run),
    _Watch("rollout/num_failed", "warning", "Samples failed", _above(0), _FAILED),
)
"""Rules of all alarms except those of `_not_finite`. Their limits are rules of thumb, chosen so that ordinary runs raise no alarm."""
