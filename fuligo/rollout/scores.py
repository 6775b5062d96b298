"""Scores of judged samples, in training and evaluation: mean@n and pass@k per prompt, parts of rewards, numbers of hooks."""

import math
from collections.abc import Iterable, Sequence
from numbers import Real

import numpy as np

from fuligo.types import Sample


def prompt_scores(
    prompts: Sequence[Sequence[Sample]], num_samples: int, reward_key: str | None, pass_key: str | None = None
) -> dict[str, float]:
    """Return `mean@n` and `pass@k` of the judged samples of each prompt; empty without prompts.

    mean@n is the mean reward over a prompt's samples, then over prompts. A sample passes if its reward is at least 1; the value of
    `pass_key` counts instead where a dict reward has it. pass@k is reported for k = 1, 2, 4, ... and n, over the prompts that have k
    samples. Samples split from one response count once.
    """
    prompts = [kept for samples in prompts if (kept := [sample for sample in samples if has_scalar(sample, reward_key)])]
    if not prompts:
        return {}
    responses = [_responses(samples) for samples in prompts]
    rewards = [np.array([sample.reward_value(reward_key) for sample in of_prompt], np.float64) for of_prompt in responses]
    num_passed = [sum(sample.passes(reward_key, pass_key) for sample in of_prompt) for of_prompt in responses]
    scores = {f"mean@{num_samples}": float(np.mean([values.mean() for values in rewards]))}
    for k in sorted({2**power for power in range(num_samples.bit_length()) if 2**power <= num_samples} | {num_samples}):
        estimates = [pass_at_k(len(values), passed, k) for values, passed in zip(rewards, num_passed) if len(values) >= k]
        if estimates:
            scores[f"pass@{k}"] = float(np.mean(estimates))
    return scores


def has_scalar(sample: Sample, reward_key: str | None) -> bool:
    """Return whether a judged sample has a scalar reward already. A dict without a key gets one by --custom-reward-post-process-path."""
    return not isinstance(sample.reward, dict) or reward_key is not None


def _responses(samples: Sequence[Sample]) -> list[Sample]:
    """Return one sample of each response, the last of those that it was split into."""
    return list({sample.index: sample for sample in samples}.values())


def pass_at_k(num_samples: int, num_correct: int, k: int) -> float:
    """Return the chance that at least one of k samples drawn without replacement is correct: 1 - C(n - c, k) / C(n, k).

    This estimates without bias the chance for k independent samples (Chen et al. 2021, "Evaluating Large Language Models Trained on Code").
    """
    assert 0 <= num_correct <= num_samples and 1 <= k <= num_samples, (num_samples, num_correct, k)
    return 1.0 - math.comb(num_samples - num_correct, k) / math.comb(num_samples, k)


def reported_means(samples: Iterable[Sample]) -> dict[str, float]:
    """Return the means of the numbers that rewards and hooks report for each sample.

    `reward/<key>` is a number of a dict reward, `sample/<name>` one of `Sample.metrics`; each is a mean over the samples that have it.
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


def metrics_problem(sample: Sample) -> str | None:
    """Return what is wrong with `Sample.metrics`, which hooks set; None if nothing is."""
    for name, value in sample.metrics.items():
        if not isinstance(name, str) or not is_finite(value):
            return f"metrics has {name!r}: {value!r:.80}; names are strings and values finite numbers"
    return None
