"""Sources of prompts: the order of rows, rows that were given back, and an exact position in both for resume."""

import logging
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Generic, Self

import numpy as np
from numpy.typing import NDArray

from fuligo.config.groups import DataFlags
from fuligo.data.dataset import Dataset, Item, PromptTooLongError, Rows
from fuligo.errors import DataError
from fuligo.quantities import count
from fuligo.types import Prompt

SourceState = dict[str, int | str | list[int]]
"""State for a checkpoint: `num_rows` of an epoch, `digest` of files and weights, `epoch`, `offset`, `returned`, and the counts
`dropped_too_long` and `bad_rows`; `images`, the digests of image files that have been read, if rows have images."""

_OTHER_DATA = (
    "resume with the same --prompt-data and --prompt-data-weights, or start a new run from the checkpoint's weights with --ref-load"
)
logger = logging.getLogger(__name__)


@dataclass(slots=True)
class SourceCounts:
    """Rows skipped since the run began; a row counts again in every epoch."""

    dropped_too_long: int = 0
    bad_rows: int = 0


def weights_of(settings: DataFlags) -> Sequence[float]:
    """Return the weights of the entries of --prompt-data; empty if all are 1."""
    return [] if all(weight == 1 for weight in settings.prompt_data_weights) else settings.prompt_data_weights


class PromptOrder:
    """Endless sequence of row numbers: every epoch has each row once, in file order or in a new permutation.

    With weights, an epoch draws weight x size rows of every entry, and the next epoch continues where it stopped, so that all rows of an
    entry are drawn equally often over the epochs. The order is a function of (seed, epoch), so it is recomputed on resume and never saved.
    """

    def __init__(self, entry_sizes: Sequence[int], *, shuffle: bool, seed: int, weights: Sequence[float] = ()) -> None:
        """Start at the first epoch. `entry_sizes` are the rows of each entry of --prompt-data; without `weights`, all weights are 1."""
        self._sizes = list(entry_sizes)
        self._drawn = [max(1, round(size * weight)) for size, weight in zip(self._sizes, weights or [1.0] * len(self._sizes), strict=True)]
        self.num_rows = sum(self._drawn)
        """Rows of an epoch."""
        self.epoch = 0
        """Complete passes over the rows."""
        self.offset = 0
        """Rows drawn in this epoch; less than `num_rows`."""
        self._shuffle = shuffle
        self._seed = seed
        self._current: tuple[int, NDArray[np.integer]] | None = None

    @classmethod
    def of(cls, rows: Rows, settings: DataFlags) -> Self:
        """Return the order in which a run with these flags draws its rows."""
        return cls(rows.entry_sizes, shuffle=settings.rollout_shuffle, seed=settings.rollout_seed, weights=weights_of(settings))

    @property
    def num_drawn(self) -> int:
        """Rows drawn in all epochs."""
        return self.epoch * self.num_rows + self.offset

    def next(self) -> int:
        """Return the number of the next row; after the last row of an epoch, the next epoch starts."""
        row = int(self._rows()[self.offset]) if self._shuffle or self._drawn != self._sizes else self.offset
        self.offset += 1
        if self.offset == self.num_rows:
            self.epoch, self.offset = self.epoch + 1, 0
        return row

    def epoch_rows(self) -> NDArray[np.integer]:
        """Return the rows of this epoch, in the order in which they are drawn."""
        return self._rows() if self._shuffle or self._drawn != self._sizes else np.arange(self.num_rows)

    def seek(self, epoch: int, offset: int) -> None:
        """Continue as if `epoch` passes and `offset` rows had been drawn."""
        self.epoch, self.offset = epoch, offset

    def _rows(self) -> NDArray[np.integer]:
        if self._current is None or self._current[0] != self.epoch:
            rows = self._drawn_rows() if self._drawn != self._sizes else None
            if self._shuffle:
                order = self._permutation(self.num_rows, self.epoch)
                rows = order if rows is None else rows[order]
            assert rows is not None
            self._current = self.epoch, rows
        return self._current[1]

    def _drawn_rows(self) -> NDArray[np.integer]:
        """Return the rows of this epoch, entry by entry."""
        parts: list[NDArray[np.integer]] = []
        for entry, (size, drawn) in enumerate(zip(self._sizes, self._drawn, strict=True)):
            passes, rows = np.divmod(np.arange(self.epoch * drawn, (self.epoch + 1) * drawn), size)
            if self._shuffle:
                permuted = {number: self._permutation(size, int(number), entry) for number in np.unique(passes)}
                rows = np.concatenate([permuted[number][rows[passes == number]] for number in permuted])
            parts.append(rows + sum(self._sizes[:entry]))
        return np.concatenate(parts)

    def _permutation(self, size: int, *numbers: int) -> NDArray[np.integer]:
        # RandomState, unlike Generator, gives the same permutation in every version of numpy (NEP 19).
        return np.random.RandomState(np.random.MT19937(np.random.SeedSequence([self._seed, *numbers]))).permutation(size)


class RowSource(Generic[Item]):
    """Source of the items of a dataset, epoch after epoch; returned rows come first."""

    def __init__(self, dataset: Dataset[Item]) -> None:
        settings = dataset.settings
        self.counts = SourceCounts()
        self._dataset = dataset
        self._digest = dataset.rows.digest() + "".join(f"*{weight:g}" for weight in weights_of(settings))
        self._skip_bad_rows = settings.skip_bad_rows
        self._order = PromptOrder.of(dataset.rows, settings)
        self._returned: deque[int] = deque()
        self._num_skipped_told = 0

    def __len__(self) -> int:
        """Return the number of rows in one epoch, including rows that will be skipped."""
        return self._order.num_rows

    @property
    def epoch(self) -> int:
        """Complete passes over the data."""
        return self._order.epoch

    def take(self, num_items: int) -> list[Item]:
        """Return the next `num_items` items. Rows that are too long are skipped and counted, and malformed ones with `skip_bad_rows`.

        Raises DataError if a row is malformed (without `skip_bad_rows`), or a whole epoch has no usable row.
        """
        items = [self._next() for _ in range(num_items)]
        self._warn_of_skipped_rows()
        return items

    def _warn_of_skipped_rows(self) -> None:
        """Warn about the first skipped row, and whenever twice as many rows have been skipped as at the last warning."""
        num_skipped = self.counts.dropped_too_long + self.counts.bad_rows
        if num_skipped < max(1, 2 * self._num_skipped_told):
            return
        self._num_skipped_told = num_skipped
        reasons = (
            (self.counts.dropped_too_long, f"longer than --rollout-max-prompt-len {self._dataset.settings.rollout_max_prompt_len}"),
            (self.counts.bad_rows, "malformed (--skip-bad-rows)"),
        )
        logger.warning(
            "%d of the %d rows drawn so far were skipped: %s; metrics.jsonl counts them in every step",
            num_skipped,
            self._order.num_drawn - len(self._returned),
            ", ".join(f"{count} {reason}" for count, reason in reasons if count),
        )

    def give_back(self, items: Iterable[Item]) -> None:
        """Take back items that were not used; they are drawn next, in the given order."""
        self._returned.extendleft(reversed([item.row for item in items]))

    def state(self) -> SourceState:
        """Return the position in the data, for a checkpoint; `restore` continues from it."""
        images = self._dataset.image_digests.dump()
        return {
            "num_rows": self._order.num_rows,
            "digest": self._digest,
            "epoch": self._order.epoch,
            "offset": self._order.offset,
            "returned": list(self._returned),
            "dropped_too_long": self.counts.dropped_too_long,
            "bad_rows": self.counts.bad_rows,
            **({"images": images} if images else {}),
        }

    def check(self, state: SourceState) -> None:
        """Check that the state belongs to this dataset. Raises DataError if the datasets differ."""
        if state.get("num_rows") != len(self):
            raise DataError(
                f"cannot resume: the dataset has {count(len(self), 'row')}, but the checkpoint's had "
                f"{state.get('num_rows', 'none')}; {_OTHER_DATA}"
            )
        if "digest" not in state:
            logger.warning("the checkpoint has no digest of its prompt file: only the number of rows was compared")
        elif state["digest"] != self._digest:
            raise DataError(
                f"cannot resume: the dataset has {count(len(self), 'row')} like the checkpoint's, but different content "
                f"(digest {self._digest} instead of {state['digest']}); {_OTHER_DATA}"
            )
        if (changed := self._dataset.image_digests.first_changed(str(state.get("images", "")))) is not None:
            raise DataError(
                f"cannot resume: the images of {self._dataset.rows.place(changed)} have changed since the run read them; {_OTHER_DATA}"
            )

    def restore(self, state: SourceState) -> None:
        """Continue exactly where `state()` was called. Raises DataError if the state belongs to another dataset."""
        self.check(state)
        self._dataset.image_digests.load(str(state.get("images", "")))
        position = {name: value for name, value in state.items() if isinstance(value, int)}
        returned = state["returned"]
        assert isinstance(returned, list)
        self._order.seek(position["epoch"], position["offset"])
        self._returned = deque(returned)
        self.counts = SourceCounts(position["dropped_too_long"], position["bad_rows"])
        self._num_skipped_told = self.counts.dropped_too_long + self.counts.bad_rows

    def _next(self) -> Item:
        for _ in range(len(self._returned) + len(self) + 1):
            row = self._returned.popleft() if self._returned else self._order.next()
            try:
                return self._dataset[row]
            except PromptTooLongError:
                self.counts.dropped_too_long += 1
            except DataError as error:
                if not self._skip_bad_rows:
                    raise DataError(f"{error}; resume or start with --skip-bad-rows to skip such rows") from error
                self.counts.bad_rows += 1
        raise DataError(
            f"cannot draw a prompt: a whole epoch of {count(len(self), 'row')} has no usable one (so far {self.counts.bad_rows} malformed, "
            f"{self.counts.dropped_too_long} too long); fix the rows or raise --rollout-max-prompt-len"
        )


PromptSource = RowSource[Prompt]
