"""Images in their final size have the patches of the originals, and no processor changes them again."""

import io
import json

import numpy as np
import pytest
from PIL import Image
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

from fuligo.errors import DataError
from fuligo.models.vision import processor as processor_module
from fuligo.models.vision.processor import ImageProcessor, ResizedImages, image_digest
from fuligo.types import PromptImage
from tests import tiny_vision


@pytest.fixture(scope="module")
def processor(tmp_path_factory) -> ImageProcessor:
    directory = tmp_path_factory.mktemp("processor")
    (directory / "preprocessor_config.json").write_text(json.dumps(tiny_vision.PROCESSOR))
    return ImageProcessor(directory)


def prompt_image(data: bytes, first_token: int = 5) -> PromptImage:
    return PromptImage("a.png", data, image_digest(data), first_token, 2, 3)


def photo(width: int, height: int, **options) -> bytes:
    file = io.BytesIO()
    tiny_vision.decoded(tiny_vision.png(width, height)).save(file, "JPEG", **options)
    return file.getvalue()


def test_patches_stay_equal_also_without_fuligos_reading_of_the_file(processor):
    turned = Image.Exif()
    turned[274] = 6
    clear = io.BytesIO()
    Image.fromarray(np.full((20, 30, 4), 100, np.uint8)).save(clear, "PNG")
    theirs = Qwen2VLImageProcessorPil.from_dict({**tiny_vision.PROCESSOR, "image_processor_type": "Qwen2VLImageProcessorPil"})
    for data in (tiny_vision.png(33, 41), tiny_vision.png(300, 200), tiny_vision.png(5, 5), photo(50, 20, exif=turned), clear.getvalue()):
        before = processor.patches(data, image_digest(data))
        found = ResizedImages(processor).of(prompt_image(data))
        after = theirs(images=[Image.open(io.BytesIO(found.data)).convert("RGB")], return_tensors="np")
        np.testing.assert_array_equal(after["pixel_values"], before.values)
        assert after["image_grid_thw"].tolist() == [[1, before.num_rows, before.num_columns]]
        assert processor.resized(found.data) == found.data
        assert (found.source, found.first_token, found.num_tokens) == ("a.png", 5, 6)


def test_samples_of_a_prompt_share_the_resized_image(processor, monkeypatch):
    monkeypatch.setattr(processor_module, "KEPT_RESIZED_BYTES", 1)
    images = ResizedImages(processor)
    first = images.of(prompt_image(tiny_vision.png(33, 41)))
    assert images.of(prompt_image(tiny_vision.png(33, 41), first_token=9)).data is first.data
    images.of(prompt_image(tiny_vision.png(41, 33)))
    assert images.of(prompt_image(tiny_vision.png(33, 41))).data is not first.data, "the oldest was dropped"


def test_an_image_that_cannot_be_decoded_is_named(processor):
    with pytest.raises(DataError, match=r"cannot process a\.png: the bytes are not an image"):
        ResizedImages(processor).of(prompt_image(b"no image"))
