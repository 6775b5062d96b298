"""Mathematical equality: decided in this process by spelling and plain numbers if possible, else with sympy in a worker process."""

from collections import OrderedDict

from fuligo.answers.equality import NeedsAlgebraError, equal_answers
from fuligo.rollout.rewards.worker_pool import WorkerPool

_REMEMBERED = 8192
"""Verdicts kept, because samples of a group and of later epochs often have the same answers."""
_MAX_CHARS_HERE = 200
"""Longest answer compared in this process; longer ones go to a worker, where they do not block the event loop."""


class SymbolicComparison:
    """Comparison of an answer with the correct answers of a label, with a cache of the workers' verdicts."""

    def __init__(self, pool: WorkerPool) -> None:
        self._pool = pool
        self._verdicts: OrderedDict[tuple[str, tuple[str, ...]], bool] = OrderedDict()

    async def answer_equals(self, answer: str, golds: list[str]) -> bool:
        """Return whether an answer equals one of the golds. Raises RewardError if the comparison raised or timed out."""
        undecided: list[str] = []
        for gold in golds:
            verdict = _equal_at_once(answer, gold)
            if verdict:
                return True
            if verdict is None:
                undecided.append(gold)
        return bool(undecided) and await self._ask(answer, undecided)

    async def _ask(self, answer: str, golds: list[str]) -> bool:
        key = answer, tuple(golds)
        if key in self._verdicts:
            self._verdicts.move_to_end(key)
            return self._verdicts[key]
        verdict = self._verdicts[key] = await self._pool.ask(answer=answer, golds=golds)
        if len(self._verdicts) > _REMEMBERED:
            self._verdicts.popitem(last=False)
        return verdict


def _equal_at_once(answer: str, gold: str) -> bool | None:
    """Return whether two answers are equal; None if a worker must decide."""
    if answer == gold:
        return True
    if max(len(answer), len(gold)) > _MAX_CHARS_HERE:
        return None
    try:
        return equal_answers(answer, gold)
    except NeedsAlgebraError:
        return None
