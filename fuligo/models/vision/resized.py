"""Images resized before they are sent to an engine, so that the engine's own resizing does not change the pixels that the trainer sees."""

import threading
from collections import OrderedDict
from dataclasses import replace

from fuligo.errors import DataError
from fuligo.models.vision.processor import ImageProcessor, image_digest
from fuligo.types import PromptImage

KEPT_BYTES = 128 * 2**20
"""Size of the cache of resized images, which the samples of a prompt share."""


class ResizedImages:
    """Cache of resized images: RGB PNG files of the size that is cut into patches for the vision tower."""

    def __init__(self, processor: ImageProcessor) -> None:
        self._processor = processor
        self._kept: OrderedDict[str, PromptImage] = OrderedDict()
        self._kept_bytes = 0
        self._lock = threading.Lock()

    def of(self, image: PromptImage) -> PromptImage:
        """Return the image resized; its tokens are the same. Raises DataError if it cannot be decoded."""
        with self._lock:  # the samples of a prompt arrive together, so the first resizes their image
            found = self._kept.get(image.digest)
            if found is None:
                try:
                    data = self._processor.resized(image.data)
                except DataError as error:
                    raise DataError(f"cannot process {image.source}: {error}") from error
                found = replace(image, data=data, digest=image_digest(data))
                self._kept[image.digest] = found
                self._kept_bytes += len(found.data)
                while self._kept_bytes > KEPT_BYTES and len(self._kept) > 1:
                    self._kept_bytes -= len(self._kept.popitem(last=False)[1].data)
            self._kept.move_to_end(image.digest)
        return replace(found, source=image.source, first_token=image.first_token)
