"""Images of rows: reading them from files or the row itself, placing them in messages, and detecting changes by digests."""

from __future__ import annotations

import base64
import os
import zlib
from collections.abc import Sequence
from hashlib import blake2b
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from fuligo.errors import DataChangedError, DataError
from fuligo.formats.disk import open_plain
from fuligo.quantities import count
from fuligo.types import Messages, PlacedImages, PromptImage, RawImage

PLACEHOLDER = "<image>"
"""Text that stands for an image in a prompt."""
MAX_FILE_BYTES = 32 * 2**20


class ImagePlacer(Protocol):
    """Placement of images in a model's prompts: the number of tokens of each, and their positions."""

    token_id: int
    """Id of the token that the template writes for an image."""

    def place(self, ids: Sequence[int], images: Sequence[RawImage]) -> PlacedImages:
        """Insert all tokens of the images; their number depends only on the images' sizes.

        `ids` are the token ids that the chat template writes, with one token for each image. Raises DataError if an image's header cannot
        be read, an image is too large, or the numbers of images differ.
        """
        ...

    def decode(self, images: Sequence[PromptImage]) -> None:
        """Raise DataError if an image cannot be decoded."""


def read_images(value: Any, key: str, directory: Path) -> tuple[RawImage, ...]:
    """Read the images of a row's column: one, a list, or none (null).

    Each image is a path relative to the data file's directory, a data URI with base64, bytes, or an object with `bytes` or `path` (the
    format of the package `datasets`). Raises DataError if an image has another form, or its file cannot be read or is too large.
    """
    given = [] if value is None else value if isinstance(value, list) else [value]
    return tuple(_read(each, f"image {number} of {key!r}", directory) for number, each in enumerate(given, 1))


def _read(value: Any, name: str, directory: Path) -> RawImage:
    if isinstance(value, dict):
        value = value["bytes"] if value.get("bytes") is not None else value.get("path")
    if isinstance(value, bytes):
        _check_size(len(value), name)
        return RawImage(name, value)
    if isinstance(value, str) and value.startswith("data:"):
        try:
            return RawImage(name, base64.b64decode(value.partition(",")[2], validate=True))
        except ValueError as error:
            raise DataError(f"{name} is a data URI without valid base64; encode the image's bytes in base64") from error
    if isinstance(value, str) and value and "://" not in value:
        path = directory / value
        try:
            if not path.is_file():
                raise DataError(f"{name}: {path} is not a file; paths are relative to the data file's directory")
            with open_plain(path) as file:
                _check_size(os.fstat(file.fileno()).st_size, f"{name}: {path}")
                data = file.read(MAX_FILE_BYTES + 1)  # files of /proc have no size, and others grow
            _check_size(len(data), f"{name}: {path}")
            return RawImage(str(path), data, is_file=True)
        except OSError as error:
            raise DataError(
                f"{name}: cannot read {path!s:.200}: {error.strerror or error}; if it is base64, put data:image/png;base64, before it"
            ) from error
    raise DataError(f"{name} is {value!r:.80}; it must be a path, a data URI, bytes, or an object with bytes or path")


def _check_size(num_bytes: int, name: str) -> None:
    if num_bytes > MAX_FILE_BYTES:
        raise DataError(f"{name} has {num_bytes:,} bytes, more than {MAX_FILE_BYTES:,}; scale it down")


def check_placeholders(messages: Messages, num_images: int, key: str) -> None:
    """Check that the messages have a placeholder for each image. Raises DataError if the numbers differ."""
    found = sum(message["content"].count(PLACEHOLDER) for message in messages if isinstance(message.get("content"), str))
    if found != num_images:
        raise DataError(
            f"{key!r} has {count(num_images, 'image')}, but the prompt contains {PLACEHOLDER} {count(found, 'time')}; "
            "write it once for each image"
        )


def check_texts(messages: Messages, image_token: str) -> None:
    """Raise DataError if the text of a message contains the image token, or an assistant message has an image."""
    for number, message in enumerate(messages, 1):
        text = message.get("content") or ""
        if image_token in text:
            raise DataError(f"message {number} contains {image_token}, the token of an image; write {PLACEHOLDER} where an image belongs")
        if message["role"] == "assistant" and PLACEHOLDER in text:
            raise DataError(
                f"message {number} is an assistant message with {PLACEHOLDER}, but the model writes only text; move it to another message"
            )


def with_image_parts(messages: Messages) -> Messages:
    """Return messages whose placeholders are separate parts, as chat templates of models with images expect."""
    return [
        {**message, "content": _parts(message["content"])} if PLACEHOLDER in (message.get("content") or "") else message
        for message in messages
    ]


def _parts(text: str) -> list[dict[str, str]]:
    first, *rest = text.split(PLACEHOLDER)
    parts: list[dict[str, str]] = [{"type": "text", "text": first}]
    for each in rest:
        parts += [{"type": "image"}, {"type": "text", "text": each}]
    return [part for part in parts if part.get("text") != ""]


class ImageDigests:
    """Digests of the images of each row that has been read, 8 bytes per row.

    They are needed because the digest of a prompt file covers the paths of image files, not their content.
    """

    def __init__(self, num_rows: int) -> None:
        self._digests = np.zeros(num_rows, np.uint64)
        """[rows] digest of each row's images; 0 if the row has not been read or has no image files."""

    def check(self, row: int, images: Sequence[RawImage], place: str) -> None:
        """Remember the images of a row, or check that they are the same as when the row was read before.

        `place` is the file and line of the row. Raises DataChangedError if the images have changed.
        """
        if not any(image.is_file for image in images):
            return
        digest = _digest(images)
        if self._digests[row] not in (0, digest):
            files = ", ".join(image.source for image in images if image.is_file)
            raise DataChangedError(
                f"cannot continue with {place}: its images have changed since this run first read them ({files:.500}); restore the files "
                "and resume from the last checkpoint, or start a new run"
            )
        self._digests[row] = digest

    def dump(self) -> str:
        """Return all digests as text; empty if no row has image files."""
        return base64.b85encode(zlib.compress(self._digests.tobytes(), 1)).decode() if self._digests.any() else ""

    def first_changed(self, text: str) -> int | None:
        """Return the first row whose images differ from those in `text`, which `dump` returned earlier; None if there is none."""
        earlier = self._of(text)
        changed = np.flatnonzero((earlier != self._digests) & (earlier != 0) & (self._digests != 0))
        return int(changed[0]) if len(changed) else None

    def load(self, text: str) -> None:
        """Take over the digests in `text`, which `dump` returned in an earlier part of the run, for comparison with later reads."""
        earlier = self._of(text)
        self._digests = np.where(earlier != 0, earlier, self._digests)

    def _of(self, text: str) -> NDArray[np.uint64]:
        if not text:
            return np.zeros_like(self._digests)
        return np.frombuffer(zlib.decompress(base64.b85decode(text)), np.uint64)


def _digest(images: Sequence[RawImage]) -> np.uint64:
    """Return a nonzero digest of the contents and lengths of images."""
    digest = blake2b(digest_size=8)
    for image in images:
        digest.update(len(image.data).to_bytes(8, "little"))
        digest.update(image.data)
    return np.uint64(int.from_bytes(digest.digest(), "little") or 1)
