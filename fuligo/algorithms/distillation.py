"""On-policy distillation: subtracts the reverse KL to a teacher from the advantages, token by token.

Thinking Machines Lab, "On-Policy Distillation" (2025); as a term beside any estimator: slime's documentation, "On-Policy Distillation".
"""

import numpy as np

from fuligo.algorithms.settings import Distillation
from fuligo.errors import TrainerError
from fuligo.types import FloatArray, TrainSample


def distillation_penalty(sample: TrainSample, settings: Distillation) -> FloatArray:
    """Return [R] kl_coef * d, with d = student - teacher log-probability of the sampled token, in nats; 0 where masked.

    The mean of d over the student's samples is KL(student || teacher). A token's penalty does not include later tokens (discount 0).

    Raises:
        TrainerError: the student's or the teacher's log-probabilities are missing.
    """
    student = sample.engine_logprobs if settings.from_engine else sample.old_logprobs
    if student is None or sample.teacher_logprobs is None:
        missing = "student" if student is None else "teacher"
        raise TrainerError(f"cannot distil (--use-opd) from sample {sample.index}: it has no {missing} log-probabilities")
    # Masked tokens may hold anything, including -inf and NaN.
    trained = sample.loss_mask != 0
    difference = np.subtract(student, sample.teacher_logprobs, where=trained, out=np.zeros(len(trained), np.float32))
    return np.float32(settings.kl_coef) * difference
