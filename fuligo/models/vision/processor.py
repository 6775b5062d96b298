"""Image preprocessing for the vision tower: decoding, resizing, normalizing and cutting into patches, the same in every process.

Trainer and embedded engine both use transformers' image processor on Pillow, which needs no torchvision.
"""

from __future__ import annotations

import hashlib
import io
import json
import struct
import threading
import zlib
from collections import OrderedDict
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Generic, NamedTuple, TypeVar

import numpy as np

from fuligo.errors import ConfigError, DataError
from fuligo.formats.disk import read_plain_text
from fuligo.types import FloatArray, PromptImage

if TYPE_CHECKING:
    from PIL.Image import Image, Transpose

T = TypeVar("T")
PROCESSOR_FILE = "preprocessor_config.json"
WHOLE_PROCESSOR_FILE = "processor_config.json"
"""Settings of all processors of a model, as transformers 5 saves them; its image settings take precedence over PROCESSOR_FILE."""
PROCESSOR_TYPES = ("Qwen2VLImageProcessor", "Qwen2VLImageProcessorFast", "Qwen2VLImageProcessorPil")
"""Accepted values of `image_processor_type`. Which one a checkpoint has depends on the version of transformers that wrote it."""
FORMATS = ("PNG", "JPEG", "WEBP", "GIF", "BMP", "TIFF")
"""Accepted formats; for some others, Pillow starts external programs."""
MAX_IMAGE_BYTES = 32 * 2**20
MAX_DECODED_PIXELS = 64 * 2**20
"""Largest number of pixels of an image before it is resized: a small file may decode to gigabytes."""
KEPT_BYTES = 256 * 2**20
"""Size of the cache of patches in a process: the samples of a prompt, and the passes over a rollout, share images."""
KEPT_RESIZED_BYTES = 128 * 2**20
"""Size of the cache of resized images, which the samples of a prompt share."""

_NUM_DECODING = 8
"""Largest number of images that a process decodes at once."""
_DAMAGE = (OSError, ValueError, SyntaxError, EOFError, IndexError, TypeError, KeyError, MemoryError, struct.error, zlib.error)
"""Errors that Pillow raises for files that contradict their header."""
_ORIENTATION = 274
"""EXIF tag of the orientation."""
_TURNS = dict(enumerate(("FLIP_LEFT_RIGHT", "ROTATE_180", "FLIP_TOP_BOTTOM", "TRANSPOSE", "ROTATE_270", "TRANSVERSE", "ROTATE_90"), 2))
"""Transpositions that make an image upright, by its EXIF orientation."""
_KEEP_SIDES = ("FLIP_LEFT_RIGHT", "ROTATE_180", "FLIP_TOP_BOTTOM")
_RANGELESS = {"I": "32-bit integer", "F": "floating-point"}
"""Names of pixel types without a known range, by Pillow's mode."""


class Patches(NamedTuple):
    """One image, ready for the vision tower."""

    values: FloatArray
    """Normalized pixels: [patches, channels * temporal patch size * patch size * patch size]"""
    num_rows: int
    num_columns: int


@dataclass(slots=True, frozen=True)
class TokenGrid:
    """Grid of an image's tokens."""

    num_rows: int
    num_columns: int


def image_digest(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=16).hexdigest()


class LruCache(Generic[T]):
    """Cache that drops the values used least recently beyond `max_bytes` in total; the newest always stays. Thread-safe."""

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes, self._num_bytes = max_bytes, 0
        self._values: OrderedDict[str, tuple[T, int]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: str) -> T | None:
        with self._lock:
            if key not in self._values:
                return None
            self._values.move_to_end(key)
            return self._values[key][0]

    def add(self, key: str, value: T, num_bytes: int) -> None:
        with self._lock:
            self._values[key] = value, num_bytes
            self._num_bytes += num_bytes
            while self._num_bytes > self._max_bytes and len(self._values) > 1:
                self._num_bytes -= self._values.popitem(last=False)[1][1]


class ImageProcessor:
    """Image processor of a checkpoint, with a cache of the patches of recently used images. Thread-safe."""

    def __init__(self, directory: str | Path) -> None:
        """Read the settings. Raises ConfigError if Pillow is not installed, or the checkpoint has no settings of a known processor."""
        self._processor: Any = _processor(Path(directory))
        self.merge_size: int = self._processor.merge_size
        """Number of patches per token in each direction."""
        self._recent: LruCache[Patches] = LruCache(KEPT_BYTES)
        self._decoding = tuple(threading.Lock() for _ in range(_NUM_DECODING))
        """Locks by digest: the requests of a group arrive together, so the first decodes their image and the others wait."""

    def grid(self, data: bytes) -> TokenGrid:
        """Return the grid of an image's tokens, from its size. Raises DataError if it is not an image, or too large."""
        image = _opened(data)
        patches = self._size(image)
        return TokenGrid(patches[0] // self.merge_size, patches[1] // self.merge_size)

    def patches(self, data: bytes, digest: str) -> Patches:
        """Return the patches of the image that `digest` identifies. Raises DataError if it is damaged, or decodes to too many pixels."""
        with self._decoding[hash(digest) % _NUM_DECODING]:
            found = self._recent.get(digest)
            if found is None:
                image = _decoded(data)
                try:
                    inputs = self._processor(images=[image], return_tensors="np")
                except ValueError as error:
                    raise DataError(
                        f"the image processor rejects an image of {image.width} x {image.height} pixels: {error}; resize or replace it"
                    ) from error
                _, num_rows, num_columns = (int(number) for number in inputs["image_grid_thw"][0])
                found = Patches(np.ascontiguousarray(inputs["pixel_values"], np.float32), num_rows, num_columns)
                self._recent.add(digest, found, found.values.nbytes)
            return found

    def resized(self, data: bytes) -> bytes:
        """Return the image as an RGB PNG file with the same patches, in the size that other image processors leave unchanged."""
        image = _decoded(data)
        if self._processor.do_resize:
            num_rows, num_columns = self._size(_opened(data))
            side = self._processor.patch_size
            image = image.resize((num_columns * side, num_rows * side), self._processor.resample)
        file = io.BytesIO()
        image.save(file, "PNG", compress_level=1)
        return file.getvalue()

    def _size(self, image: Image) -> tuple[int, int]:
        """Return the numbers of rows and columns of patches. Raises DataError if the image processor rejects the size."""
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

        processor, side = self._processor, self._processor.patch_size
        turn = _turn(image)
        width, height = image.size if turn is None or turn.name in _KEEP_SIDES else (image.height, image.width)
        if processor.do_resize:
            try:
                limits = {"min_pixels": processor.size["shortest_edge"], "max_pixels": processor.size["longest_edge"]}
                height, width = smart_resize(height, width, factor=side * self.merge_size, **limits)
            except ValueError as error:
                raise DataError(
                    f"the image processor rejects an image of {width} x {height} pixels: {error}; resize or replace it"
                ) from error
        return height // side, width // side


class ResizedImages:
    """Images as RGB PNG files of the size that is cut into patches, so that an engine's own resizing does not change their pixels."""

    def __init__(self, processor: ImageProcessor) -> None:
        self._processor = processor
        self._recent: LruCache[PromptImage] = LruCache(KEPT_RESIZED_BYTES)
        self._lock = threading.Lock()

    def of(self, image: PromptImage) -> PromptImage:
        """Return the image resized; its tokens are the same. Raises DataError if it cannot be decoded."""
        with self._lock:  # the samples of a prompt arrive together, so the first resizes their image
            found = self._recent.get(image.digest)
            if found is None:
                try:
                    data = self._processor.resized(image.data)
                except DataError as error:
                    raise DataError(f"cannot process {image.source}: {error}") from error
                found = replace(image, data=data, digest=image_digest(data))
                self._recent.add(image.digest, found, len(data))
        return replace(found, source=image.source, first_token=image.first_token)


def read_settings(directory: Path) -> dict[str, Any]:
    """Read an image processor's settings without transformers.

    Raises ConfigError if Pillow is missing, or the settings are unreadable or of an unknown processor.
    """
    try:
        import PIL.Image  # noqa: F401
    except ImportError as error:
        raise ConfigError("cannot process images: Pillow is not installed; pip install 'fuligo[vision]'") from error
    file = directory / WHOLE_PROCESSOR_FILE
    whole = _read_json(file) if file.exists() else None
    settings = whole.get("image_processor") if isinstance(whole, dict) else None
    if settings is None:
        file = directory / PROCESSOR_FILE
        settings = _read_json(file)
    kind = settings.get("image_processor_type") if isinstance(settings, dict) else None
    if kind not in PROCESSOR_TYPES:
        raise ConfigError(
            f"cannot process images: image_processor_type of {file} is {kind!r}; use a model with {' or '.join(PROCESSOR_TYPES)}"
        )
    return settings


def _read_json(file: Path) -> Any:
    try:
        return json.loads(read_plain_text(file))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"cannot read {file}: {error}; use a checkpoint with the settings of its image processor") from error


def _processor(directory: Path) -> Any:
    settings = read_settings(directory)
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

    try:
        return Qwen2VLImageProcessorPil.from_dict({**settings, "image_processor_type": PROCESSOR_TYPES[-1]})
    except (ValueError, TypeError) as error:
        raise ConfigError(
            f"cannot process images: the settings of the image processor in {directory} are invalid: {error}; copy the published ones"
        ) from error


def _opened(data: bytes) -> Image:
    """Open an image, reading only its header. Raises DataError if the bytes are not an image, or the image is too large."""
    import PIL.Image

    if len(data) > MAX_IMAGE_BYTES:
        raise DataError(f"an image has {len(data):,} bytes, more than {MAX_IMAGE_BYTES:,}; scale it down")
    try:
        image = PIL.Image.open(io.BytesIO(data), formats=FORMATS)
    except (PIL.UnidentifiedImageError, PIL.Image.DecompressionBombError, OSError, ValueError, SyntaxError) as error:
        raise DataError(f"the bytes are not an image in one of the formats {', '.join(FORMATS)}; convert or replace the image") from error
    if image.width * image.height > MAX_DECODED_PIXELS:
        raise DataError(f"an image has {image.width:,} x {image.height:,} pixels, more than {MAX_DECODED_PIXELS:,}; scale it down")
    return image


def _decoded(data: bytes) -> Image:
    """Decode an image to RGB, turned upright by its EXIF orientation and with a white background. Raises DataError if it is damaged."""
    import PIL.Image

    image = _opened(data)
    turn = _turn(image)
    try:
        image.load()
        if turn is not None:
            image = image.transpose(turn)
        if image.mode.startswith("I;16"):  # convert() would clip its 16 bits to 8
            image = image.convert("I").point(lambda value: value / 256).convert("L")
        if image.mode in _RANGELESS:
            raise DataError(f"the image has {_RANGELESS[image.mode]} pixels, whose range is not known; convert it to 8 bits")
        if image.has_transparency_data:
            image = image.convert("RGBA")
            image = PIL.Image.alpha_composite(PIL.Image.new("RGBA", image.size, "white"), image)
        return image.convert("RGB")
    except _DAMAGE as error:
        raise DataError(f"the image is damaged: {error}; replace the image") from error


def _turn(image: Image) -> Transpose | None:
    """Return the transposition that makes an image upright, read from its header; None if it is upright."""
    from PIL.Image import Transpose

    # Pillow turns TIFF itself. EXIF data after a PNG's pixels is ignored, since reading it would decode the image.
    if image.format == "TIFF" or (image.format == "PNG" and "exif" not in image.info):
        return None
    try:
        orientation: Any = image.getexif().get(_ORIENTATION)
        name = _TURNS.get(orientation)
    except _DAMAGE as error:
        raise DataError(f"the image is damaged: {error}; replace the image") from error
    return None if name is None else Transpose[name]
