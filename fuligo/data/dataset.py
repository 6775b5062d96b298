"""Prompt files as sequences of prompts."""

from __future__ import annotations

import hashlib
import logging
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, chain
from pathlib import Path
from typing import TYPE_CHECKING, Generic, Protocol, Self, TypeVar

from fuligo.config.groups import DataFlags
from fuligo.data.fields import Fields, read_fields
from fuligo.data.images import ImageDigests, ImagePlacer, check_texts, with_image_parts
from fuligo.data.locate import locate
from fuligo.data.row_file import PromptPath, RowFile, open_rows
from fuligo.data.template import ChatTemplate, as_ids, plain_ids, rendered_ids
from fuligo.errors import DataError
from fuligo.types import Messages, Prompt, PromptImage

if TYPE_CHECKING:
    from transformers.tokenization_utils_base import PreTrainedTokenizerBase

logger = logging.getLogger(__name__)

_ROWS_CHECKED = 8
"""Rows of each file that are read when it is opened, to find a wrong key or template before anything expensive starts."""


class HasRow(Protocol):
    """Item made from one row."""

    @property
    def row(self) -> int: ...

    @property
    def images(self) -> Sequence[PromptImage]: ...


Item = TypeVar("Item", bound=HasRow)


class PromptTooLongError(DataError):
    """Raised for a well-formed row whose prompt is longer than --rollout-max-prompt-len."""


@dataclass(slots=True, frozen=True)
class _Piece:
    """Selected rows of one file."""

    file: RowFile
    selected: range


class Rows:
    """Selected rows of one or several files, numbered from 0 through all of them, read by the configured keys."""

    def __init__(self, entries: Sequence[Sequence[_Piece]], settings: DataFlags) -> None:
        """Join the pieces of each entry of --prompt-data."""
        self.entry_sizes = [sum(len(piece.selected) for piece in pieces) for pieces in entries]
        """Rows of each entry."""
        self._pieces = [piece for pieces in entries for piece in pieces]
        self._ends = list(accumulate(len(piece.selected) for piece in self._pieces))
        self._settings = settings

    @classmethod
    def open(cls, paths: str | Path | Sequence[str], settings: DataFlags) -> Self:
        """Open the files of one entry or of several. Raises DataError if a file is unusable, or a slice selects no row."""
        given = [paths] if isinstance(paths, str | Path) else paths
        return cls([_pieces(PromptPath.parse(entry), settings) for entry in given], settings)

    def __len__(self) -> int:
        return self._ends[-1]

    def __getitem__(self, row: int) -> Fields:
        piece, number = self._find(row)
        return read_fields(piece.file[number], self._settings, lambda: piece.file.place(number), piece.file.path.parent)

    def place(self, row: int) -> str:
        piece, number = self._find(row)
        return piece.file.place(number)

    def first_rows(self) -> Iterator[int]:
        """Yield the rows to check before anything expensive starts: the first `_ROWS_CHECKED` selected rows of every file."""
        for piece, end in zip(self._pieces, self._ends, strict=True):
            start = end - len(piece.selected)
            yield from range(start, min(end, start + _ROWS_CHECKED))

    def digest(self) -> str:
        """Return a digest of the files' content and of the selection of their rows; the first call reads the whole files."""
        digests = [f"{piece.file.content.digest()}[{piece.selected.start}:{piece.selected.stop}]" for piece in self._pieces]
        return digests[0] if len(digests) == 1 else hashlib.blake2b(",".join(digests).encode(), digest_size=16).hexdigest()

    def _find(self, row: int) -> tuple[_Piece, int]:
        """Return the piece with a row, and the number of the row in its file."""
        index = bisect_right(self._ends, row)
        piece = self._pieces[index]
        return piece, piece.selected[row - self._ends[index] + len(piece.selected)]


def _pieces(entry: PromptPath, settings: DataFlags) -> list[_Piece]:
    """Open the files of an entry; its slice counts through all of them."""
    files = [open_rows(path, settings.keys) for path in locate(entry.path)]
    selected = entry.select(sum(len(file) for file in files))
    pieces: list[_Piece] = []
    start = 0
    for file in files:
        if inside := range(max(selected.start - start, 0), min(selected.stop - start, len(file))):
            pieces.append(_Piece(file, inside))
        start += len(file)
    return pieces


@dataclass(eq=False)
class Dataset(Generic[Item]):
    """Random access to the items made from the rows of prompt files. Each access parses and tokenizes its row."""

    rows: Rows
    settings: DataFlags
    tokenizer: PreTrainedTokenizerBase
    images: ImagePlacer | None
    end_ids: frozenset[int]

    def __post_init__(self) -> None:
        self.image_digests = ImageDigests(len(self.rows))
        """Digests of the image files that have been read."""
        kwargs = self.settings.apply_chat_template_kwargs
        self._template = ChatTemplate(self.tokenizer, kwargs) if self.settings.apply_chat_template else None

    @classmethod
    def open(
        cls,
        paths: str | Path | Sequence[str],
        settings: DataFlags,
        tokenizer: PreTrainedTokenizerBase,
        images: ImagePlacer | None = None,
        end_ids: frozenset[int] = frozenset(),
    ) -> Self:
        """Index the files, check their first rows, and make sure that at least one row is usable.

        Args:
            paths: entry of --prompt-data, or several; each with an optional slice: `FILE@[a:b]`
            images: image placer of the model; None if rows have no images
            end_ids: tokens at which the model stops, to end supervised turns

        Raises DataError if a file, one of its first rows (unless `skip_bad_rows`) or every row is unusable, and ConfigError if the
        tokenizer lacks a chat template.
        """
        dataset = cls(Rows.open(paths, settings), settings, tokenizer, images, end_ids)
        dataset._check_first_rows(paths)
        return dataset

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, row: int) -> Item:
        """Make the item of a row.

        Raises PromptTooLongError, DataError if the row is malformed (with file and line), and DataChangedError if the file or an image of
        the row has changed since it was opened or first read.
        """
        fields = self.rows[row]
        if fields.images:
            self.image_digests.check(row, fields.images, self.rows.place(row))
        try:
            item, num_tokens = self._make(row, fields)
        except DataError as error:
            raise DataError(f"cannot use {self.rows.place(row)}: {error}") from error
        limit = self.settings.rollout_max_prompt_len
        if limit is not None and num_tokens > limit:
            raise PromptTooLongError(f"{self.rows.place(row)}: {num_tokens} tokens, more than --rollout-max-prompt-len {limit}; raise it")
        return item

    def _make(self, row: int, fields: Fields) -> tuple[Item, int]:
        """Make the item, and return it with the number of tokens that the length limit applies to."""
        raise NotImplementedError

    def _with_images(self, messages: Messages) -> Messages:
        """Return messages in the form that chat templates of models with images expect.

        Raises DataError if an assistant message has an image, or a text contains the image token.
        """
        if self.images is None:
            return messages
        check_texts(messages, str(self.tokenizer.convert_ids_to_tokens(self.images.token_id)))
        return with_image_parts(messages)

    def _check_images(self, row: int, item: Item) -> None:
        """Raise DataError if an image of one of the first rows cannot be decoded; in later rows, bad images only fail their samples."""
        if self.images is None:
            return
        try:
            self.images.decode(item.images)
        except DataError as error:
            raise DataError(f"cannot use {self.rows.place(row)}: {error}") from error

    def _check_first_rows(self, paths: str | Path | Sequence[str]) -> None:
        usable = 0
        reason = ""
        first = set(self.rows.first_rows())
        for row in chain(sorted(first), (row for row in range(len(self)) if row not in first)):
            if usable and row not in first:
                return
            try:
                self._check_images(row, self[row])
                usable += 1
            except PromptTooLongError as error:
                reason = reason or str(error)
            except DataError as error:
                if not self.settings.skip_bad_rows:
                    raise
                reason = reason or str(error)
        if not usable:
            shown = paths if isinstance(paths, str | Path) else " ".join(paths)
            raise DataError(f"cannot use {shown}: none of its rows ({len(self)}) is usable; the first: {reason}")


class PromptDataset(Dataset[Prompt]):
    """Prompts of a file, with the chat template applied if --apply-chat-template is set."""

    def _check_first_rows(self, paths: str | Path | Sequence[str]) -> None:
        super()._check_first_rows(paths)
        for row in self.rows.first_rows():
            try:
                messages = self.rows[row].prompt
            except DataError:  # a row that --skip-bad-rows skips
                continue
            if not isinstance(messages, str) and messages[-1]["role"] == "assistant":
                logger.warning(
                    "%s: the prompt ends with a message of the assistant, and the model is asked for another one after it; remove this "
                    "message if it holds the answer",
                    self.rows.place(row),
                )
                return

    def _make(self, row: int, fields: Fields) -> tuple[Prompt, int]:
        images: tuple[PromptImage, ...] = ()
        if isinstance(fields.prompt, str):
            ids = as_ids(plain_ids(self.tokenizer, fields.prompt))
        else:
            assert self._template is not None
            messages = self._with_images(fields.prompt)
            ids = as_ids(rendered_ids(self.tokenizer, self._template.prompt(messages, fields.tools)))
        if fields.images:
            assert self.images is not None, "opened with the model's images"
            placed = self.images.place(ids.tolist(), fields.images)
            ids, images = placed.ids, placed.images
        if not len(ids):
            raise DataError("the prompt has no tokens; remove the row")
        return Prompt(row, fields.prompt, ids, fields.label, fields.metadata, images), len(ids)
