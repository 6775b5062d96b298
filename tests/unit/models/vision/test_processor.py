"""Images as the tower sees them: upright, on white, with all of their bits."""

import io
import json
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageOps

from fuligo.errors import ConfigError, DataError
from fuligo.models.vision import processor as processor_module
from fuligo.models.vision.processor import ImageProcessor
from tests import tiny_vision

PIXELS = np.random.default_rng(0).integers(0, 256, (16, 40, 3), dtype=np.uint8)


@pytest.fixture(scope="module")
def processor(tmp_path_factory) -> ImageProcessor:
    directory = tmp_path_factory.mktemp("processor")
    (directory / "preprocessor_config.json").write_text(json.dumps(tiny_vision.PROCESSOR))
    return ImageProcessor(directory)


def encoded(image: Image.Image, file_format: str, **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, file_format, **options)
    return file.getvalue()


def patches_of(processor: ImageProcessor, data: bytes) -> np.ndarray:
    return processor.patches(data, str(hash(data))).values


def assert_seen_as(processor: ImageProcessor, data: bytes, image: Image.Image) -> None:
    """Compare an encoded image with the same pixels as a plain PNG."""
    want = encoded(image, "PNG")
    np.testing.assert_array_equal(patches_of(processor, data), patches_of(processor, want))
    assert processor.grid(data) == processor.grid(want)


def test_settings_are_found_where_transformers_5_saves_them(processor, tmp_path):
    (tmp_path / "processor_config.json").write_text(json.dumps({"image_processor": tiny_vision.PROCESSOR}))
    data = encoded(Image.fromarray(PIXELS), "PNG")
    np.testing.assert_array_equal(patches_of(ImageProcessor(tmp_path), data), patches_of(processor, data))


def test_invalid_settings_are_refused(tmp_path):
    (tmp_path / "preprocessor_config.json").write_text(json.dumps({**tiny_vision.PROCESSOR, "size": {"height": 8, "width": 8}}))
    with pytest.raises(ConfigError, match=r"the settings of the image processor in .* are invalid: .*shortest_edge"):
        ImageProcessor(tmp_path)


@pytest.mark.parametrize(("file_format", "options"), [("JPEG", {}), ("PNG", {}), ("WEBP", {"lossless": True}), ("TIFF", {})])
def test_photos_are_turned_as_their_exif_data_says(processor, file_format, options):
    for orientation in range(1, 9):
        exif = Image.Exif()
        exif[274] = orientation
        data = encoded(Image.fromarray(PIXELS), file_format, exif=exif, **options)
        assert_seen_as(processor, data, ImageOps.exif_transpose(Image.open(io.BytesIO(data))))


@pytest.mark.parametrize("mode", ["RGBA", "LA", "P"])
def test_transparent_pixels_are_white(processor, mode):
    """Line drawings are often black on nothing, and their hidden color is black."""
    image, options = Image.new(mode, (32, 32), 0), {"transparency": 0} if mode == "P" else {}
    assert_seen_as(processor, encoded(image, "PNG", **options), Image.new("RGB", (32, 32), "white"))


def test_16_bits_are_scaled_to_8(processor):
    values = np.arange(32 * 32, dtype=np.uint16).reshape(32, 32) * 64
    want = Image.fromarray((values >> 8).astype(np.uint8)).convert("RGB")
    assert_seen_as(processor, encoded(Image.fromarray(values), "PNG"), want)


@pytest.mark.parametrize("dtype", [np.int32, np.float32])
def test_pixels_without_a_range_are_refused(processor, dtype):
    data = encoded(Image.fromarray(np.ones((32, 32), dtype)), "TIFF")
    with pytest.raises(DataError, match="whose range is not known; convert it to 8 bits"):
        processor.patches(data, "")


def test_a_file_of_too_many_bytes_is_refused(processor, monkeypatch):
    data = encoded(Image.fromarray(PIXELS), "PNG")
    monkeypatch.setattr(processor_module, "MAX_IMAGE_BYTES", len(data) - 1)
    for read in (processor.grid, lambda data: processor.patches(data, "")):
        with pytest.raises(DataError, match=f"{len(data):,} bytes, more than {len(data) - 1:,}; scale it down"):
            read(data)


def test_the_first_frame_of_an_animation_is_seen(processor):
    frames = [Image.new("RGB", (32, 32), color) for color in ("red", "blue")]
    for file_format in ("GIF", "WEBP", "PNG"):
        data = encoded(frames[0], file_format, save_all=True, append_images=frames[1:])
        assert patches_of(processor, data)[:, :16].mean() > 0.9, file_format  # the red channel
