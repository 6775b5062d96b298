"""Which prompts fill a rollout: waves, drops, surplus. Pure bookkeeping; nothing here waits or generates.

A rollout needs `target` kept groups. Prompts are submitted in waves of `wave_size`. A finished group is kept or dropped. The rollout is
complete the moment `target` groups are kept; and when `submitted - dropped < target`, those in flight cannot complete it any more and
another wave is due.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from fuligo.errors import RolloutError


class DynamicSampling:
    """The state of one rollout.

    Args:
        target: groups to keep (`--rollout-batch-size`)
        wave_size: groups of one wave (`--over-sampling-batch-size`), at least `target`
        max_waves: after so many waves the rollout ends with an error
        in_submission_order: False: the groups that finish first fill the rollout, which favours short answers. True: those submitted
            first fill it, however long they take; only dropped ones are passed over.
    """

    def __init__(self, target: int, wave_size: int, max_waves: int, *, in_submission_order: bool = False) -> None:
        assert 1 <= target <= wave_size, (target, wave_size)
        self.target = target
        self.wave_size = wave_size
        self.max_waves = max_waves
        self.in_submission_order = in_submission_order
        self.num_waves = 0
        self.dropped: dict[int, str] = {}
        """Reason by group index."""
        self._submitted: dict[int, None] = {}
        self._kept: dict[int, None] = {}
        """Accepted groups in the order in which they finished."""

    @property
    def num_submitted(self) -> int:
        return len(self._submitted)

    @property
    def in_flight(self) -> list[int]:
        """Submitted and not judged, in the order of submission."""
        return [index for index in self._submitted if index not in self._kept and index not in self.dropped]

    @property
    def complete(self) -> bool:
        """Enough groups are kept; sampling stops."""
        return len(self._filling()) == self.target

    @property
    def needs_wave(self) -> bool:
        """What is kept and in flight together cannot fill the rollout."""
        return self.num_submitted - len(self.dropped) < self.target

    @property
    def exhausted(self) -> bool:
        """Whether all waves that are allowed have begun."""
        return self.num_waves == self.max_waves

    def begin_wave(self) -> None:
        """
        Raises:
            RolloutError: `max_waves` waves did not fill the rollout.
        """
        if self.exhausted:
            tried = f"{self.num_waves} sampling waves ({self.num_submitted} prompts)"
            raise too_many_dropped(tried, len(self._kept), self.target, self.drop_counts())
        self.num_waves += 1

    def submit(self, indices: Iterable[int]) -> None:
        """These groups are being sampled."""
        for index in indices:
            assert index not in self._submitted, f"group {index} was submitted twice"
            self._submitted[index] = None

    def finish(self, index: int, drop_reason: str | None) -> None:
        """A group is done; `drop_reason` None keeps it."""
        assert index in self._submitted and index not in self._kept and index not in self.dropped, index
        if drop_reason is None:
            self._kept[index] = None
        else:
            self.dropped[index] = drop_reason

    def chosen(self) -> list[int]:
        """The groups that fill the rollout, ordered by index."""
        return sorted(self._filling())

    def surplus(self) -> list[int]:
        """Groups that were accepted and not needed, ordered by index."""
        filling = set(self._filling())
        return sorted(index for index in self._kept if index not in filling)

    def drop_counts(self) -> Counter[str]:
        return Counter(self.dropped.values())

    def _filling(self) -> list[int]:
        """The groups that fill the rollout as things stand; `target` of them at most."""
        if not self.in_submission_order:
            return list(self._kept)[: self.target]
        filling: list[int] = []
        for index in self._submitted:
            if len(filling) == self.target or (index not in self._kept and index not in self.dropped):
                break
            if index in self._kept:
                filling.append(index)
        return filling


def too_many_dropped(what: str, num_kept: int, target: int, reasons: Counter[str]) -> RolloutError:
    """The end of a run whose filter drops (nearly) everything.

    Args:
        what: how much was tried
    """
    dropped = ", ".join(f"{count} by {reason}" for reason, count in reasons.most_common())
    return RolloutError(
        f"{what} gave {num_kept} of the {target} groups needed; dropped: {dropped}. If every answer gets the same reward, the prompts "
        "are too easy or too hard for the model, or the reward is wrong. Else loosen --dynamic-sampling-filter-path or raise "
        "--max-sampling-waves."
    )
