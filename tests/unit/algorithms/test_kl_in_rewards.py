"""`--kl-coef` with every estimator that reads it and every `--kl-loss-type`, against a reference in plain Python floats."""

import math

import numpy as np
import pytest

from fuligo.algorithms.assign import assign_advantages
from fuligo.algorithms.estimators import ESTIMATORS
from fuligo.algorithms.settings import AdvantageSettings, KlType
from fuligo.types import TrainSample
from tests.random_samples import random_samples

COEF = 0.3
READING = [name for name, estimator in ESTIMATORS.items() if estimator.uses_kl_coef]


def kl(old: float, reference: float, kind: str) -> float:
    d = old - reference
    k3 = math.exp(-d) - 1 + d
    return {"k1": d, "k2": d * d / 2, "k3": k3, "low_var_kl": max(-10.0, min(10.0, k3))}[kind]


def penalties(samples: list[TrainSample], kind: str, *, from_engine: bool) -> list[list[float]]:
    """Return the penalty of every token of every sample; 0 where masked."""
    rows: list[list[float]] = []
    for s in samples:
        old = s.engine_logprobs if from_engine else s.old_logprobs
        assert old is not None and s.ref_logprobs is not None
        rows.append([COEF * kl(float(a), float(b), kind) if m else 0.0 for a, b, m in zip(old, s.ref_logprobs, s.loss_mask)])
    return rows


def expected(samples: list[TrainSample], estimator: str, rows: list[list[float]]) -> list[list[float]]:
    """Return the advantages at a discount and lambda of 1."""
    if estimator == "rloo":
        rewards = [s.reward - sum(row) for s, row in zip(samples, rows)]
        others = [[r for r, o in zip(rewards, samples) if o.group_index == s.group_index and o is not s] for s in samples]
        return [[r - sum(o) / len(o)] * len(row) for r, o, row in zip(rewards, others, rows)]
    if estimator == "reinforce_plus_plus_baseline":
        groups = [[o.reward for o in samples if o.group_index == s.group_index] for s in samples]
        return [[s.reward - sum(g) / len(g) - p for p in row] for s, g, row in zip(samples, groups, rows)]
    # A token's return is the reward less the penalties from there on; with lambda 1 the value model subtracts its value.
    values = [s.values if estimator == "ppo" else np.zeros(len(row)) for s, row in zip(samples, rows)]
    return [[s.reward - sum(row[t:]) - float(v[t]) for t in range(len(row))] for s, row, v in zip(samples, rows, values) if v is not None]


def taught(seed: int) -> list[TrainSample]:
    samples = random_samples(seed)
    for sample in samples:
        assert sample.old_logprobs is not None and sample.ref_logprobs is not None
        sample.ref_logprobs[0] -= 12  # far enough for low_var_kl to clamp, and negative d grows exponentially in k3
        sample.ref_logprobs[-1] += 4
        sample.old_logprobs[sample.loss_mask == 0] = np.nan
    return samples


@pytest.mark.parametrize("from_engine", [False, True])
@pytest.mark.parametrize("kind", ["k1", "k2", "k3", "low_var_kl"])
@pytest.mark.parametrize("estimator", READING)
def test_the_penalty_follows_the_type_of_kl(estimator: str, kind: KlType, from_engine: bool) -> None:
    samples = taught(3)
    settings = AdvantageSettings(len(samples), estimator=estimator, kl_coef=COEF, kl_type=kind, old_from_engine=from_engine)
    batch = assign_advantages(samples, settings)
    rows = penalties(samples, kind, from_engine=from_engine)
    for sample, wanted in zip(batch.samples, expected(samples, estimator, rows), strict=True):
        trained = sample.loss_mask != 0
        np.testing.assert_allclose(sample.advantages[trained], np.array(wanted)[trained], rtol=1e-5, atol=1e-5)


def test_both_variants_of_reinforce_plus_plus_read_the_coefficient() -> None:
    assert {"reinforce_plus_plus", "reinforce_plus_plus_baseline", "ppo"} <= set(READING)
