"""Labels of a data set as the answers that count as right."""

from __future__ import annotations

from typing import Any

from fuligo.answers.statement import last_boxed
from fuligo.rollout.rewards.failure import FailureReason, RewardFailure


def gold_answers(label: Any) -> list[str]:
    r"""Return the answers of a label: a string, a number, an answer in a `\boxed{}`, or a list of these, each of which is right.

    Raises:
        RewardFailure: there is no label, it is empty, or it is of another type.
    """
    if isinstance(label, list | tuple):
        if not label:
            raise RewardFailure(FailureReason.BAD_LABEL, "the label is an empty list, so no answer would be right")
        return [answer for entry in label for answer in gold_answers(entry)]
    if isinstance(label, str):
        boxed = last_boxed(label)
        gold = label.strip() if boxed is None else boxed
        if not gold:
            raise RewardFailure(FailureReason.BAD_LABEL, f"the label {label!r} is empty, so no answer would be right; remove the row")
        return [gold]
    if isinstance(label, int | float) and not isinstance(label, bool):
        return [str(label)]
    if label is None:
        raise RewardFailure(FailureReason.BAD_LABEL, "the sample has no label to compare with; name the column with --label-key")
    raise RewardFailure(FailureReason.BAD_LABEL, f"a label must be a string, a number or a list of these, not {label!r:.80}")
