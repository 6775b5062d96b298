"""Digests of the image files that rows name, so that a change of one is noticed when its row is drawn again."""

import base64
import zlib
from collections.abc import Sequence
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from fuligo.data.images import RawImage
from fuligo.errors import DataChangedError


class ImageDigests:
    """One digest for the images of each row that has been read; 8 bytes a row.

    The digest of a prompt file covers the paths in it, not the content of the images there.
    """

    def __init__(self, num_rows: int) -> None:
        self._digests = np.zeros(num_rows, np.uint64)
        """[rows] 0: not read yet."""

    def check(self, row: int, images: Sequence[RawImage], place: str) -> None:
        """Remember the images of a row, or check that they are the ones that were read before.

        `place`: file and line of the row. Raises DataChangedError if they have changed.
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
        """Return the first row that has been read with other images than those of `dump`; None if there is none."""
        earlier = self._of(text)
        changed = np.flatnonzero((earlier != self._digests) & (earlier != 0) & (self._digests != 0))
        return int(changed[0]) if len(changed) else None

    def load(self, text: str) -> None:
        """Compare later reads with what `dump` returned in an earlier part of the run."""
        earlier = self._of(text)
        self._digests = np.where(earlier != 0, earlier, self._digests)

    def _of(self, text: str) -> NDArray[np.uint64]:
        if not text:
            return np.zeros_like(self._digests)
        return np.frombuffer(zlib.decompress(base64.b85decode(text)), np.uint64)


def _digest(images: Sequence[RawImage]) -> np.uint64:
    """Return a digest of the content of images and of where each ends, not 0."""
    digest = blake2b(digest_size=8)
    for image in images:
        digest.update(len(image.data).to_bytes(8, "little"))
        digest.update(image.data)
    return np.uint64(int.from_bytes(digest.digest(), "little") or 1)
