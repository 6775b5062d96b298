"""Prompt files as sequences of prompts."""

from __future__ import annotations

from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Generic, Protocol, Self, TypeVar

from fuligo.data.fields import Fields, read_fields
from fuligo.data.row_file import PromptPath, RowFile, open_rows
from fuligo.data.settings import DataSettings
from fuligo.data.template import ChatTemplate, as_ids, plain_ids, rendered_ids
from fuligo.errors import DataError
from fuligo.types import Prompt

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_ROWS_CHECKED = 8
"""Rows that are read when a file is opened, to find a wrong key or template before anything expensive starts."""


class HasRow(Protocol):
    """Item made from one row."""

    @property
    def row(self) -> int: ...


Item = TypeVar("Item", bound=HasRow)


class PromptTooLongError(DataError):
    """Well-formed row that is longer than --rollout-max-prompt-len."""


class Rows:
    """Selected rows of a file, numbered from 0, read by the configured keys."""

    def __init__(self, file: RowFile, selected: range, settings: DataSettings) -> None:
        self._file = file
        self._selected = selected
        self._settings = settings

    @classmethod
    def open(cls, path: str | Path, settings: DataSettings) -> Self:
        prompt_path = PromptPath.parse(path)
        file = open_rows(prompt_path.path, settings.keys)
        return cls(file, prompt_path.select(len(file)), settings)

    def __len__(self) -> int:
        return len(self._selected)

    def __getitem__(self, row: int) -> Fields:
        number = self._selected[row]
        return read_fields(self._file[number], self._settings, lambda: self._file.place(number))

    def place(self, row: int) -> str:
        return self._file.place(self._selected[row])

    def digest(self) -> str:
        """Return a digest of the file's content and of which of its rows are selected."""
        return f"{self._file.content.digest()}[{self._selected.start}:{self._selected.stop}]"


class Dataset(Generic[Item]):
    """Random access to the items made from the rows of a file. Each access parses and tokenizes its row."""

    def __init__(self, rows: Rows, settings: DataSettings, tokenizer: PreTrainedTokenizerBase) -> None:
        self.settings = settings
        self._rows = rows
        self._tokenizer = tokenizer
        self._template = ChatTemplate(tokenizer, settings.apply_chat_template_kwargs) if settings.apply_chat_template else None

    @classmethod
    def open(cls, path: str | Path, settings: DataSettings, tokenizer: PreTrainedTokenizerBase) -> Self:
        """Index the file, check its first rows, and make sure that at least one row is usable.

        Args:
            path: jsonl or parquet file, with an optional slice: `FILE@[a:b]`

        Raises:
            DataError: the file is missing, unreadable, empty or of an unknown format; one of its first rows is malformed
                (unless `skip_bad_rows`); or no row is usable
            ConfigError: the tokenizer has no chat template, and one is requested
        """
        dataset = cls(Rows.open(path, settings), settings, tokenizer)
        dataset._check_first_rows(path)
        return dataset

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, row: int) -> Item:
        """Make the item of a row.

        Raises:
            PromptTooLongError: it is longer than `max_prompt_tokens`
            DataError: the row is malformed; names the file and the line
            DataChangedError: the file's content has changed since it was opened, or cannot be read any more
        """
        fields = self._rows[row]
        try:
            item, num_tokens = self._make(row, fields)
        except DataError as error:
            raise DataError(f"{self._rows.place(row)}: {error}") from error
        limit = self.settings.max_prompt_tokens
        if limit is not None and num_tokens > limit:
            raise PromptTooLongError(f"{self._rows.place(row)}: {num_tokens} tokens, more than --rollout-max-prompt-len {limit}")
        return item

    def digest(self) -> str:
        """Return a digest of the rows; the first call reads the whole file.

        Raises:
            DataChangedError: the file's content has changed since it was opened, or cannot be read any more
        """
        return self._rows.digest()

    def _make(self, row: int, fields: Fields) -> tuple[Item, int]:
        """Make the item, and return it with the number of tokens that the length limit applies to."""
        raise NotImplementedError

    def _check_first_rows(self, path: str | Path) -> None:
        usable = 0
        reason = ""
        for row in range(len(self)):
            if usable and row >= _ROWS_CHECKED:
                return
            try:
                self[row]
                usable += 1
            except PromptTooLongError as error:
                reason = reason or str(error)
            except DataError as error:
                if not self.settings.skip_bad_rows:
                    raise
                reason = reason or str(error)
        if not usable:
            raise DataError(f"{path}: none of its {len(self)} rows is usable; the first: {reason}")


class PromptDataset(Dataset[Prompt]):
    """Prompts of a file, with the chat template applied if --apply-chat-template is set."""

    def _make(self, row: int, fields: Fields) -> tuple[Prompt, int]:
        if isinstance(fields.prompt, str):
            ids = plain_ids(self._tokenizer, fields.prompt)
        else:
            assert self._template is not None
            ids = rendered_ids(self._tokenizer, self._template.prompt(fields.prompt, fields.tools))
        if not ids:
            raise DataError("the prompt has no tokens")
        return Prompt(row, fields.prompt, as_ids(ids), fields.label, fields.metadata), len(ids)


def check_file(path: str | Path, settings: DataSettings) -> int:
    """Check a prompt file without a tokenizer (it is readable and not empty, its first rows have the keys) and count its selected rows.

    Raises:
        DataError: the file is unusable; names the file, the line and the fix
    """
    rows = Rows.open(path, settings)
    for row in islice(range(len(rows)), _ROWS_CHECKED):
        try:
            rows[row]
        except DataError:
            if not settings.skip_bad_rows:
                raise
    return len(rows)
