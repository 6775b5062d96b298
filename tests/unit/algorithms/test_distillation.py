"""On-policy distillation: the reverse KL to a teacher, subtracted from the advantages."""

import numpy as np
import pytest

from fuligo.algorithms.assign import assign_advantages
from fuligo.algorithms.estimators import ESTIMATORS
from fuligo.algorithms.settings import STD_EPSILON, AdvantageSettings
from fuligo.errors import TrainerError
from fuligo.types import TrainSample
from tests.random_samples import random_samples


def taught_samples(seed: int = 0) -> list[TrainSample]:
    """Return samples with teacher log-probabilities, which are -inf at masked tokens, as for tokens the teacher does not know."""
    rng = np.random.default_rng(seed)
    samples = random_samples(seed)
    for sample in samples:
        sample.teacher_logprobs = rng.normal(-2, 1, sample.response_length).astype(np.float32)
        sample.teacher_logprobs[sample.loss_mask == 0] = -np.inf
    return samples


def assigned(samples: list[TrainSample], **settings: object) -> list[np.ndarray]:
    given = AdvantageSettings(samples_per_step=len(samples), **settings)
    return [sample.advantages for sample in assign_advantages(samples, given).samples]


@pytest.mark.parametrize("from_engine", [False, True])
@pytest.mark.parametrize("estimator", ESTIMATORS)
def test_the_difference_of_log_probabilities_comes_off_every_trained_token(estimator: str, from_engine: bool) -> None:
    """A_t = A_task - c (log p_student - log p_teacher), token by token."""
    without = assigned(random_samples(0), estimator=estimator)
    shaped = assigned(taught_samples(), estimator=estimator, distillation=0.7, old_from_engine=from_engine)
    assert any((sample.loss_mask == 0).any() for sample in taught_samples())
    for sample, task, values in zip(taught_samples(), without, shaped, strict=True):
        assert sample.teacher_logprobs is not None and sample.old_logprobs is not None
        student = sample.engine_logprobs if from_engine else sample.old_logprobs
        for t in range(sample.response_length):
            taken = 0.7 * (student[t] - sample.teacher_logprobs[t]) if sample.loss_mask[t] else 0.0
            assert values[t] == pytest.approx(task[t] - taken, abs=1e-5)


def test_the_penalty_is_whitened_with_the_advantage() -> None:
    """As in slime: mean 0 and deviation 1 over the trained tokens after the teacher's term, too."""
    samples = taught_samples()
    shaped = np.concatenate([a[s.loss_mask != 0] for s, a in zip(samples, assigned(taught_samples(), distillation=0.7))])
    whitened = np.concatenate([a[s.loss_mask != 0] for s, a in zip(samples, assigned(taught_samples(), distillation=0.7, whiten=True))])
    np.testing.assert_allclose(whitened, (shaped - shaped.mean()) / (shaped.std(ddof=1) + STD_EPSILON), atol=1e-5)


def test_without_a_reward_a_student_that_is_its_teacher_learns_nothing() -> None:
    samples = taught_samples()
    for sample in samples:
        sample.reward, sample.teacher_logprobs = 0.0, sample.old_logprobs
    assert all((values == 0).all() for values in assigned(samples, distillation=1.0))


@pytest.mark.parametrize(("missing", "whose"), [("old_logprobs", "student"), ("teacher_logprobs", "teacher")])
def test_both_must_be_known(missing: str, whose: str) -> None:
    samples = taught_samples()
    setattr(samples[0], missing, None)
    with pytest.raises(TrainerError, match=f"--use-opd.* it has no {whose} log-probabilities"):
        assigned(samples, distillation=1.0)
