"""Bookkeeping of the groups that fill a rollout: waves, drops, surplus. It does no I/O and generates nothing.

A rollout needs `target` kept groups. Prompts are submitted in waves of `wave_size`. A finished group is kept or dropped. The rollout is
complete as soon as `target` groups are kept. When `submitted - dropped < target`, the groups in flight cannot complete it, and another
wave is needed.
"""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import KW_ONLY, dataclass

from fuligo.errors import RolloutError
from fuligo.quantities import count

HOPELESS_ROLLOUTS = 10
"""Sampling gives up when this many times `target` groups were dropped and none was kept. Otherwise `--max-sampling-waves` is the limit."""
HOPELESS_GROUPS = 64
"""Smallest number of dropped groups at which `HOPELESS_ROLLOUTS` applies."""


@dataclass(eq=False)
class DynamicSampling:
    """Groups of one rollout that are submitted, kept and dropped."""

    target: int
    """Groups to keep (`--rollout-batch-size`)."""
    wave_size: int
    """Groups of one wave (`--over-sampling-batch-size`), at least `target`."""
    max_waves: int
    _: KW_ONLY
    in_submission_order: bool = False
    """False: the groups that finish first fill the rollout, which favors short answers. True: the groups submitted first fill it, however
    long they take; only dropped ones are skipped."""

    def __post_init__(self) -> None:
        assert 1 <= self.target <= self.wave_size, (self.target, self.wave_size)
        self.num_waves = 0
        self.dropped: dict[int, str] = {}
        """Reasons of dropped groups, by group index."""
        self._submitted: dict[int, None] = {}
        self._kept: dict[int, None] = {}
        """Groups that were not dropped, in the order in which they finished."""

    @property
    def num_submitted(self) -> int:
        return len(self._submitted)

    @property
    def complete(self) -> bool:
        """True once enough groups are kept; sampling stops."""
        return len(self._filling()) == self.target

    @property
    def needs_wave(self) -> bool:
        """True if the groups kept and in flight are too few to fill the rollout."""
        return self.num_submitted - len(self.dropped) < self.target

    @property
    def exhausted(self) -> bool:
        """True if all allowed waves have begun, or if many groups were dropped and none was kept (`HOPELESS_ROLLOUTS`)."""
        hopeless = len(self.dropped) >= max(HOPELESS_ROLLOUTS * self.target, HOPELESS_GROUPS)
        return self.num_waves == self.max_waves or (hopeless and not self._kept)

    @property
    def num_kept(self) -> int:
        """Groups that were not dropped, surplus included."""
        return len(self._kept)

    def begin_wave(self, explain: Callable[[], str] = str) -> None:
        """Count a new wave. Raises RolloutError if `exhausted`; `explain` returns sentences to append to the error."""
        if self.exhausted:
            tried = f"{count(self.num_waves, 'sampling wave')} ({count(self.num_submitted, 'prompt')})"
            raise too_many_dropped(tried, len(self._kept), self.target, self.drop_counts(), explain())
        self.num_waves += 1

    def submit(self, indices: Iterable[int]) -> None:
        """Add groups that are being sampled."""
        for index in indices:
            assert index not in self._submitted, f"group {index} was submitted twice"
            self._submitted[index] = None

    def finish(self, index: int, drop_reason: str | None) -> None:
        """Keep a finished group, or drop it if there is a `drop_reason`."""
        assert index in self._submitted and index not in self._kept and index not in self.dropped, index
        if drop_reason is None:
            self._kept[index] = None
        else:
            self.dropped[index] = drop_reason

    def chosen(self) -> list[int]:
        """Return the groups that fill the rollout, ordered by index."""
        return sorted(self._filling())

    def drop_counts(self) -> Counter[str]:
        return Counter(self.dropped.values())

    def _filling(self) -> list[int]:
        """Return the groups that fill the rollout so far, at most `target`."""
        if not self.in_submission_order:
            return list(self._kept)[: self.target]
        filling: list[int] = []
        for index in self._submitted:
            if len(filling) == self.target or (index not in self._kept and index not in self.dropped):
                break
            if index in self._kept:
                filling.append(index)
        return filling


def too_many_dropped(tried: str, num_kept: int, target: int, reasons: Counter[str], details: str) -> RolloutError:
    """Return the error of a run that drops (nearly) every group; `tried` says what was sampled, `details` comes from `explain_drops`."""
    dropped = ", ".join(f"{count} by {reason}" for reason, count in reasons.most_common())
    return RolloutError(
        f"cannot fill the rollout: {tried} gave {num_kept} of {target} needed groups; dropped: {dropped}. If all responses to a prompt "
        "get the same reward, the prompts are too easy or too hard for the model, or the reward is wrong. Otherwise loosen "
        f"--dynamic-sampling-filter-path or raise --max-sampling-waves.{details}"
    )
