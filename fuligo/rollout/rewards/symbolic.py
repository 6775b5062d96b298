"""Mathematical equality: decided by spelling and plain numbers if possible, else by math-verify in a worker process."""

from __future__ import annotations

from collections import OrderedDict

from fuligo.rollout.rewards.exact import equal_exactly, is_number, nothing_to_find
from fuligo.rollout.rewards.extraction import last_boxed, num_boxes
from fuligo.rollout.rewards.worker_pool import WorkerPool

_REMEMBERED = 8192
"""Verdicts kept, because samples of a group and of later epochs often give the same answers."""


class SymbolicComparison:
    """Comparison of answers with the label's golds, each of which is right."""

    def __init__(self, pool: WorkerPool) -> None:
        self._pool = pool
        self._verdicts: OrderedDict[tuple[str, tuple[str, ...], bool], bool] = OrderedDict()

    async def answer_equals(self, answer: str, golds: list[str]) -> bool:
        """Return whether `answer` as a whole equals a gold.

        Raises:
            RewardFailure: the symbolic comparison raised or exceeded its deadline.
        """
        undecided: list[str] = []
        for gold in golds:
            verdict = equal_exactly(answer, gold)
            if verdict:
                return True
            if verdict is None:
                undecided.append(gold)
        return bool(undecided) and await self._ask(answer, undecided, is_text=False)

    async def text_answers(self, text: str, golds: list[str]) -> bool:
        """Return whether the answer in `text` equals a gold: that of its only box, or else the one that math-verify finds.

        Raises:
            RewardFailure: see `answer_equals`.
        """
        if num_boxes(text) == 1 and (boxed := last_boxed(text)) is not None:
            return await self.answer_equals(boxed, golds)
        if is_number(text):
            return await self.answer_equals(text, golds)
        if nothing_to_find(text):
            return False
        return await self._ask(text, golds, is_text=True)

    async def _ask(self, answer: str, golds: list[str], *, is_text: bool) -> bool:
        key = answer, tuple(golds), is_text
        if key in self._verdicts:
            self._verdicts.move_to_end(key)
            return self._verdicts[key]
        verdict = self._verdicts[key] = await self._pool.ask(answer=answer, golds=golds, is_text=is_text)
        if len(self._verdicts) > _REMEMBERED:
            self._verdicts.popitem(last=False)
        return verdict
