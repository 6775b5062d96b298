"""Mathematical equality: by spelling and plain numbers where they decide it, by math-verify in a worker process where not."""

from __future__ import annotations

from collections import OrderedDict

from fuligo.rollout.rewards.exact import equal_exactly, is_number, nothing_to_find
from fuligo.rollout.rewards.extraction import last_boxed, num_boxes
from fuligo.rollout.rewards.worker_pool import WorkerPool

_REMEMBERED = 8192
"""Verdicts kept: the samples of a group, and of later epochs, often give the same answers."""


class SymbolicComparison:
    """Compares answers with the label's golds, any of which is right."""

    def __init__(self, pool: WorkerPool) -> None:
        self._pool = pool
        self._verdicts: OrderedDict[tuple[str, tuple[str, ...], bool], bool] = OrderedDict()

    async def answer_equals(self, answer: str, golds: list[str]) -> bool:
        """All of `answer` is the answer.

        Raises:
            RewardFailure: it takes algebra, and that raised or outlasted its deadline.
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
        """The answer stands in `text`: in its only box, or else wherever math-verify finds it.

        Raises:
            RewardFailure: as `answer_equals`.
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
