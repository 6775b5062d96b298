"""Metrics of one rollout (`rollout/*`), and scores of the responses to a prompt (`mean@n`, `pass@k`)."""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np

from fuligo.rollout.dynamic_sampling import DynamicSampling
from fuligo.rollout.filters import MIN_REWARD_STD, reward_std
from fuligo.rollout.judging import STALE, usable
from fuligo.rollout.protocol import RolloutState
from fuligo.types import Sample, SampleGroup, SampleStatus


def prompt_scores(
    prompts: Sequence[Sequence[Sample]], num_samples: int, reward_key: str | None, pass_key: str | None = None
) -> dict[str, float]:
    """Return `mean@n` and `pass@k` of the judged samples of each prompt; empty without prompts.

    mean@n is the mean reward over a prompt's samples, then over prompts. A sample passes if its reward, without those of --extra-rm-path,
    is at least 1; the value of `pass_key` counts instead where a dict reward has it. pass@k is reported for k = 1, 2, 4, ... and n, over
    the prompts that have at least k samples. Samples split from one response count once.
    """
    prompts = [kept for samples in prompts if (kept := [sample for sample in samples if has_scalar(sample, reward_key)])]
    if not prompts:
        return {}
    # The last sample of a response that was split into several stands for it.
    responses = [{sample.index: sample for sample in samples}.values() for samples in prompts]
    rewards = [np.array([sample.reward_value(reward_key) for sample in of_prompt], np.float64) for of_prompt in responses]
    num_passed = [sum(sample.passes(reward_key, pass_key) for sample in of_prompt) for of_prompt in responses]
    scores = {f"mean@{num_samples}": float(np.mean([values.mean() for values in rewards]))}
    for k in sorted({2**power for power in range(num_samples.bit_length()) if 2**power <= num_samples} | {num_samples}):
        estimates = [pass_at_k(len(values), passed, k) for values, passed in zip(rewards, num_passed) if len(values) >= k]
        if estimates:
            scores[f"pass@{k}"] = float(np.mean(estimates))
    return scores


def has_scalar(sample: Sample, reward_key: str | None) -> bool:
    """Return whether a judged sample has a scalar reward. Without `reward_key`, --custom-reward-post-process-path computes it later."""
    return not isinstance(sample.reward, dict) or reward_key is not None


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Return the chance that at least one of k samples drawn without replacement is correct: 1 - C(n - c, k) / C(n, k).

    This estimates without bias the chance for k independent samples (Chen et al. 2021, "Evaluating Large Language Models Trained on Code").
    """
    assert 0 <= num_correct <= num_samples and 1 <= k <= num_samples, (num_samples, num_correct, k)
    return 1.0 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


def reported_means(samples: Iterable[Sample]) -> dict[str, float]:
    """Return the means of the numbers that rewards and hooks report for each sample, each over the samples that have it.

    `reward/<key>` is the mean of a number in dict rewards, `sample/<name>` the mean of a number in `Sample.metrics`.
    """
    values: dict[str, list[float]] = {}
    for sample in samples:
        parts = sample.reward if isinstance(sample.reward, dict) else {}
        for name, value in parts.items():
            if isinstance(value, Real):
                values.setdefault(f"reward/{name}", []).append(float(value))
        for name, value in sample.metrics.items():
            values.setdefault(f"sample/{name}", []).append(float(value))
    return {name: float(np.mean(values[name])) for name in sorted(values)}


def is_finite(value: object) -> bool:
    """Return whether a value is a number that a float can hold."""
    try:
        return isinstance(value, Real) and math.isfinite(value)
    except OverflowError:
        return False  # an integer of hundreds of digits


def metrics_problem(metrics: Mapping[Any, Any]) -> str | None:
    """Return why metrics that a hook set are invalid, or None."""
    for name, value in metrics.items():
        if not isinstance(name, str) or not is_finite(value):
            return f"metrics has {name!r}: {value!r:.80}; names must be strings, and values finite numbers"
    return None


@dataclass(slots=True)
class RolloutCounts:
    """Counts of a rollout that cannot be computed from its samples."""

    num_resumed: int = 0
    """Samples that continued a response of an earlier rollout."""
    num_stale: int = 0
    """Buffered groups that were too old to continue."""
    num_tokens_before: int = 0
    """Response tokens of resumed groups that earlier rollouts sampled."""
    elapsed_s: float = 0.0


def sample_metrics(
    groups: Sequence[SampleGroup], *, reward_key: str | None, pass_key: str | None = None, policy_version: int
) -> dict[str, float]:
    """Return means over the usable samples of kept groups, and scores over the prompts of all finished groups that are not stale.

    `pass_key` decides whether a sample passes (None: `reward_key`); the policy lag is relative to `policy_version`.
    """
    samples = usable(sample for group in groups if group.kept for sample in group.samples)
    rewards = np.array([sample.reward_value(reward_key) for sample in samples if has_scalar(sample, reward_key)], np.float64)
    prompts = [judged for group in groups if group.finished and group.drop_reason != STALE and (judged := usable(group.samples))]
    num_samples = max((len({sample.index for sample in group.samples}) for group in groups), default=0)
    lengths = [sample.response_length for sample in samples]
    return _named(
        {
            "reward_mean": _mean(rewards),
            "reward_std": float(rewards.std()) if len(rewards) else 0.0,
            "response_len_mean": _mean(lengths),
            "response_len_max": max(lengths, default=0),
            "prompt_len_mean": _mean([len(sample.prompt_ids) for sample in samples]),
            "truncated_ratio": _mean([sample.status is SampleStatus.TRUNCATED for sample in samples]),
            "num_failed": sum(sample.status is SampleStatus.FAILED for group in groups for sample in group.samples),
            "num_judge_timeouts": sum(sample.judge_error is not None for group in groups for sample in group.samples),
        }
        | prompt_scores(prompts, num_samples, reward_key, pass_key)
        | reported_means(samples)
    ) | staleness_metrics(groups, policy_version)


def staleness_metrics(groups: Sequence[SampleGroup], policy_version: int) -> dict[str, float]:
    """Return the mean and maximum policy lag of the kept groups' samples, in versions relative to `policy_version`."""
    samples = usable(sample for group in groups if group.kept for sample in group.samples)
    return _named(
        {
            "staleness": _mean([policy_version - sample.versions.mean() for sample in samples]),
            "staleness_max": max((policy_version - int(sample.versions.min()) for sample in samples), default=0),
        }
    )


def sampling_metrics(
    groups: Sequence[SampleGroup], aborted: Sequence[SampleGroup], sampling: DynamicSampling, counts: RolloutCounts, reward_key: str | None
) -> dict[str, float]:
    """Count all groups of a rollout by outcome; `aborted` ones were unfinished when the rollout was full."""
    num_kept = sum(group.kept for group in groups)
    candidates = [group for group in groups if group.kept or group.index in sampling.dropped]
    num_tokens = sum(sample.response_length for group in groups for sample in group.samples) - counts.num_tokens_before
    return _named(
        {
            "zero_std_ratio": _zero_std_ratio(candidates, reward_key),
            "num_waves": sampling.num_waves,
            "num_groups_kept": num_kept,
            "num_groups_dropped": len(sampling.dropped),
            "num_groups_surplus": len(groups) - num_kept - len(sampling.dropped) - len(aborted),
            "num_groups_aborted": len(aborted),
            "num_groups_stale": counts.num_stale,
            "num_resumed": counts.num_resumed,
            "aborted_len_mean": _mean([sample.response_length for group in aborted for sample in group.samples if not sample.finished]),
            "num_tokens": num_tokens,
            "tokens_per_s": num_tokens / max(counts.elapsed_s, 1e-9),
        }
        | {f"dropped/{reason}": count for reason, count in sorted(sampling.drop_counts().items())}
    )


def continuous_metrics(
    groups: Sequence[SampleGroup],
    *,
    reasons: Mapping[str, int],
    num_queued: int,
    num_in_flight: int,
    num_tokens: int,
    elapsed_s: float,
    reward_key: str | None,
) -> dict[str, float]:
    """Count the kept and dropped groups since the last rollout by outcome, for continuous sampling.

    `num_queued` kept groups wait for later rollouts; `num_in_flight` are sampled or judged. `num_tokens` were sampled in `elapsed_s`.
    """
    samples = [sample for group in groups for sample in group.samples if sample.response_length]
    num_stale = reasons.get(STALE, 0)
    return _named(
        {
            "zero_std_ratio": _zero_std_ratio([group for group in groups if group.drop_reason != STALE], reward_key),
            "num_groups_kept": sum(group.kept for group in groups),
            "num_groups_dropped": sum(reasons.values()) - num_stale,
            "num_groups_stale": num_stale,
            "num_resumed": sum(bool((sample.versions != sample.versions[0]).any()) for sample in samples),
            "num_queued": num_queued,
            "num_in_flight": num_in_flight,
            "num_tokens": num_tokens,
            "tokens_per_s": num_tokens / max(elapsed_s, 1e-9),
        }
        | {f"dropped/{reason}": count for reason, count in sorted(reasons.items())}
    )


def _zero_std_ratio(groups: Iterable[SampleGroup], reward_key: str | None) -> float:
    """Return the share of groups whose rewards are all equal, among those with at least two usable samples."""
    candidates = [samples for group in groups if len(samples := usable(group.samples)) > 1]
    return _mean([reward_std(samples, reward_key) <= MIN_REWARD_STD for samples in candidates])


_OF_SOURCE = {"epoch": "epoch", "num_rows_too_long": "dropped_too_long", "num_rows_malformed": "bad_rows"}
"""Metrics by name, with the key of `SourceState` that has the value."""


def source_metrics(state: RolloutState) -> dict[str, float]:
    """Return the complete passes over the data and the rows skipped since the run began; empty for a user's data source."""
    values = {name: state.source.get(key) for name, key in _OF_SOURCE.items()}
    return _named({name: value for name, value in values.items() if isinstance(value, int)})


def _named(metrics: Mapping[str, float]) -> dict[str, float]:
    return {f"rollout/{name}": float(value) for name, value in metrics.items()}


def _mean(values: Sequence[float] | np.ndarray) -> float:
    return float(np.mean(values, dtype=np.float64)) if len(values) else 0.0
