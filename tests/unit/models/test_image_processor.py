"""Images as the vision tower sees them, and how many of them a process keeps."""

import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import numpy as np
import pytest
from transformers import Qwen2VLImageProcessorPil

from fuligo.models.vision import processor as module
from fuligo.models.vision.processor import ImageProcessor, image_digest
from tests import tiny_vision

SIZES = [(1, 1), (7, 1), (9, 3), (5, 7), (16, 16), (40, 33), (20, 200), (64, 64), (300, 200)]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_vision.save_checkpoint(tmp_path_factory.mktemp("qwen3_vl"))


@pytest.mark.parametrize("size", SIZES)
def test_patches_and_grid_are_those_of_transformers(checkpoint: Path, size: tuple[int, int]) -> None:
    processor, data = ImageProcessor(checkpoint), tiny_vision.png(*size)
    theirs = Qwen2VLImageProcessorPil.from_dict({**tiny_vision.PROCESSOR, "image_processor_type": "Qwen2VLImageProcessorPil"})
    want = theirs(images=[tiny_vision.decoded(data)], return_tensors="np")
    patches, grid = processor.patches(data, image_digest(data)), processor.grid(data)
    np.testing.assert_array_equal(patches.values, want["pixel_values"])
    assert [1, patches.num_rows, patches.num_columns] == want["image_grid_thw"][0].tolist()
    assert (2 * grid.num_rows, 2 * grid.num_columns) == (patches.num_rows, patches.num_columns)


def test_requests_for_one_image_at_once_decode_it_once(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    processor, data = ImageProcessor(checkpoint), tiny_vision.png(32, 32)
    decode, calls, together = module._decoded, [], Barrier(4)
    monkeypatch.setattr(module, "_decoded", lambda given: (calls.append(given), time.sleep(0.05), decode(given))[-1])

    def patches(_: int) -> object:
        together.wait()
        return processor.patches(data, "0")

    with ThreadPoolExecutor(4) as threads:
        first, *others = threads.map(patches, range(4))
    assert len(calls) == 1 and all(other is first for other in others)


def test_the_least_recently_used_patches_are_dropped(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    images = [tiny_vision.png(32, 32, seed=number) for number in range(3)]
    size = ImageProcessor(checkpoint).patches(images[0], "0").values.nbytes
    monkeypatch.setattr(module, "KEPT_BYTES", 2 * size)
    processor = ImageProcessor(checkpoint)
    first = processor.patches(images[0], "0")
    second = processor.patches(images[1], "1")
    assert processor.patches(images[0], "0") is first
    processor.patches(images[2], "2")
    assert processor.patches(images[0], "0") is first, "used last but one"
    again = processor.patches(images[1], "1")
    assert again is not second
    np.testing.assert_array_equal(again.values, second.values)
