"""Prompts with images: where images come from, and their tokens."""

import base64
import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from transformers import Qwen2VLImageProcessorPil, Qwen3VLProcessor

from fuligo.config.groups import DataFlags
from fuligo.data import images as module
from fuligo.data.check import check_file
from fuligo.data.conversation import ConversationDataset
from fuligo.data.dataset import PromptDataset
from fuligo.data.source import PromptSource
from fuligo.errors import DataChangedError, DataError
from fuligo.models.vision.placing import PromptImages
from fuligo.models.vision.processor import MAX_DECODED_PIXELS
from tests import tiny_vision

SETTINGS = DataFlags(multimodal_keys={"image": "images"}, apply_chat_template=True)
PNG, OTHER = tiny_vision.png(16, 24), tiny_vision.png(30, 9, seed=1)


@pytest.fixture(scope="module")
def images(tmp_path_factory) -> PromptImages:
    return PromptImages(tiny_vision.save_checkpoint(tmp_path_factory.mktemp("qwen3_vl")))


def data_uri(data: bytes) -> str:
    return "data:image/png;base64," + base64.b64encode(data).decode()


def opened(directory: Path, images: PromptImages, *rows: dict[str, Any]) -> PromptDataset:
    file = directory / "rows.jsonl"
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return PromptDataset.open(file, SETTINGS, tiny_vision.tokenizer(), images)


def test_tokens_are_those_of_the_models_processor(tmp_path, images):
    """Texts around two images, by transformers' own processor."""
    dataset = opened(tmp_path, images, {"input": "what <image> is <image>the sum", "images": [data_uri(PNG), data_uri(OTHER)]})
    prompt = dataset[0]

    tokenizer = tiny_vision.tokenizer()
    own = Qwen2VLImageProcessorPil.from_dict({**tiny_vision.PROCESSOR, "image_processor_type": "Qwen2VLImageProcessorPil"})
    grids = own(images=[tiny_vision.decoded(PNG), tiny_vision.decoded(OTHER)], return_tensors="np")
    processor = Qwen3VLProcessor.__new__(Qwen3VLProcessor)  # its constructor wants a processor of videos, which wants torchvision
    processor.image_processor, processor.image_token = own, "<|image_pad|>"
    texts = ["what ", " is ", "the sum"]
    pads = [processor.replace_image_token(grids, number) for number in range(2)]
    shown = texts[0] + "".join(f"<|vision_start|>{pad}<|vision_end|>{text}" for pad, text in zip(pads, texts[1:]))
    want = tokenizer(f"<|user|>{shown}<|end|><|assistant|>", add_special_tokens=False)["input_ids"]
    assert prompt.prompt_ids.tolist() == want
    assert [(image.num_rows, image.num_columns) for image in prompt.images] == [tuple(grid[1:] // 2) for grid in grids["image_grid_thw"]]
    for image in prompt.images:
        tokens = prompt.prompt_ids[image.first_token : image.first_token + image.num_tokens]
        assert set(tokens.tolist()) == {tiny_vision.token_id("<|image_pad|>")}
    assert prompt.prompt == [{"role": "user", "content": "what <image> is <image>the sum"}]


def test_images_come_from_files_uris_and_the_columns_of_datasets(tmp_path, images):
    (tmp_path / "pictures").mkdir()
    (tmp_path / "pictures" / "a.png").write_bytes(PNG)
    parts = [{"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "how many"}]}]
    dataset = opened(
        tmp_path,
        images,
        {"input": "<image>how many", "images": ["pictures/a.png"]},
        {"input": "<image>how many", "images": data_uri(PNG)},
        {"input": parts, "images": [{"bytes": None, "path": "pictures/a.png"}]},
        {"input": "how many", "images": None},
    )
    first, *others, alone = [dataset[row] for row in range(4)]
    assert first.images[0].source == str(tmp_path / "pictures" / "a.png")
    for other in others:
        np.testing.assert_array_equal(other.prompt_ids, first.prompt_ids)
        assert (other.images[0].data, other.images[0].digest) == (PNG, first.images[0].digest)
    assert alone.images == () and len(alone.prompt_ids) < len(first.prompt_ids)

    image = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    rows = [{"input": "<image>how many", "images": [{"bytes": PNG, "path": "lost.png"}]}]
    pq.write_table(pa.Table.from_pylist(rows, pa.schema([("input", pa.string()), ("images", pa.list_(image))])), tmp_path / "rows.parquet")
    (prompt,) = [PromptDataset.open(tmp_path / "rows.parquet", SETTINGS, tiny_vision.tokenizer(), images)[0]]
    np.testing.assert_array_equal(prompt.prompt_ids, first.prompt_ids)


@pytest.mark.parametrize(
    ("row", "reason"),
    [
        ({"images": ["lost.png"]}, "lost.png is not a file"),
        ({"images": ["http://h/a.png"]}, "must be a path, a data URI, bytes"),
        ({"images": [7]}, "image 1 of 'images' is 7"),
        ({"images": []}, "has 0 images, but the prompt contains <image> 1 time;"),
        ({"images": [data_uri(PNG)] * 2}, "has 2 images, but the prompt contains <image> 1 time;"),
        ({"images": ["data:image/png;base64,#"]}, "without valid base64"),
        ({"images": ["data:image/png;base64,\u00e9"]}, "without valid base64"),
        ({"images": ["iVBORw0KGgo" * 400]}, "cannot read .{200}: .*if it is base64, put data:image/png;base64, before it"),
        ({}, "no key 'images' \\(--multimodal-keys\\)"),
    ],
)
def test_a_row_without_its_images_is_found_before_models_load(tmp_path, row, reason):
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"input": "<image>how many", **row}))
    with pytest.raises(DataError, match=f"rows.jsonl, line 1: .*{reason}"):
        check_file(file, SETTINGS)


@pytest.mark.parametrize("name", ["/dev/zero", "pipe.png"])
def test_pipes_and_devices_are_not_waited_for(tmp_path, name):
    os.mkfifo(tmp_path / "pipe.png")
    with pytest.raises(DataError, match="is not a file"):
        module.read_images(name, "images", tmp_path)


def test_a_large_file_is_not_read(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "MAX_FILE_BYTES", 9)
    monkeypatch.setattr(Path, "read_bytes", lambda path: pytest.fail("read"))
    (tmp_path / "a.png").write_bytes(PNG)
    with pytest.raises(DataError, match=r"a\.png has [0-9,]+ bytes, more than 9; scale it down"):
        module.read_images("a.png", "images", tmp_path)


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"GIF87a?", "not an image in one of the formats"),
        (PNG[:-40], "the image is damaged"),
        (b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n", "not an image in one of the formats"),
        (tiny_vision.png(1, 900), "rejects an image of 1 x 900 pixels"),
    ],
)
def test_an_unreadable_image_names_its_row(tmp_path, images, data, reason):
    with pytest.raises(DataError, match=f"rows.jsonl, line 1: cannot process image 1 of 'images'.*{reason}"):
        opened(tmp_path, images, {"input": "<image>how many", "images": [data_uri(data)]})


def test_a_decompression_bomb_is_refused_by_its_header(tmp_path, images):
    bomb = tiny_vision.blank_png(1 << 14, (MAX_DECODED_PIXELS >> 14) + 1)
    assert len(bomb) < 2**20
    with pytest.raises(DataError, match=r"16,384 x 4,097 pixels, more than"):
        opened(tmp_path, images, {"input": "<image>how many", "images": [data_uri(bomb)]})


@pytest.mark.parametrize(
    "row", [{"input": "<image>how <|image_pad|>", "images": [data_uri(PNG)]}, {"input": "<|image_pad|>", "images": []}]
)
def test_text_that_spells_an_image_token_is_refused(tmp_path, images, row):
    with pytest.raises(DataError, match=r"message 1 contains <\|image_pad\|>, the token of an image; write <image>"):
        opened(tmp_path, images, row)


@pytest.mark.parametrize(
    ("texts", "reason"),
    [
        (["<image> and <|image_pad|>", "price", "<image>"], "message 1 contains"),
        (["<image>", "price <image>"], "message 2 is an assistant message with <image>"),
    ],
)
def test_conversations_with_images_in_the_wrong_place_are_refused(tmp_path, images, texts, reason):
    """Otherwise the second image would take the place of the token in the text, or its tokens would be trained as an answer."""
    messages = [{"role": role, "content": text} for role, text in zip(("user", "assistant", "user"), texts)]
    (tmp_path / "rows.jsonl").write_text(json.dumps({"input": messages, "images": [data_uri(PNG), data_uri(OTHER)]}))
    with pytest.raises(DataError, match=reason):
        ConversationDataset.open(tmp_path / "rows.jsonl", SETTINGS, tiny_vision.tokenizer(), images)


def test_a_damaged_image_of_a_later_row_is_left_to_the_engine(tmp_path, images):
    """Rows are drawn in the event loop, where decoding every image would hold up all else; the engine refuses the request by name."""
    rows = [{"input": "<image>how many", "images": [data_uri(PNG if number < 8 else PNG[:-40])]} for number in range(9)]
    dataset = opened(tmp_path, images, *rows)
    assert dataset[8].images[0].num_tokens == dataset[0].images[0].num_tokens


def test_conversations_train_the_answers_beside_their_images(tmp_path, images):
    """Two turns with an image each: the tokens of both are in the sequence, and only the answers are trained."""
    turns = [("what <image>", "price"), ("is <image> the", "sum")]
    messages = [{"role": role, "content": text} for turn in turns for role, text in zip(("user", "assistant"), turn)]
    file = tmp_path / "rows.jsonl"
    file.write_text(json.dumps({"input": messages, "images": [data_uri(PNG), data_uri(OTHER)]}))
    tokenizer = tiny_vision.tokenizer()
    (sample,) = ConversationDataset.open(file, SETTINGS, tokenizer, images)[0].as_samples(0)

    tokens, mask = sample.tokens, np.concatenate([np.zeros(len(sample.prompt_ids), np.int8), sample.loss_mask])
    assert str(tokenizer.decode(tokens[mask == 1])) == "price<|end|>sum<|end|>"
    first, second = sample.images
    assert first.num_tokens + second.num_tokens == (tokens == tiny_vision.token_id("<|image_pad|>")).sum()
    for image in (first, second):
        assert set(tokens[image.first_token : image.first_token + image.num_tokens]) == {tiny_vision.token_id("<|image_pad|>")}
        assert tokens[image.first_token - 1] == tiny_vision.token_id("<|vision_start|>")
    assert second.first_token > len(sample.prompt_ids), "behind the first answer"


def with_files(directory: Path, images: PromptImages, number: int = 12) -> PromptDataset:
    """Return rows each with an image file of its own; the first eight are read when they are opened."""
    for row in range(number):
        (directory / f"{row}.png").write_bytes(PNG)
    return opened(directory, images, *({"input": f"<image>{row}", "images": [f"{row}.png"]} for row in range(number)))


def rewrite(file: Path, content: bytes) -> None:
    """Write in place, and set the times back."""
    before = file.stat()
    file.write_bytes(content)
    os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))


@pytest.mark.parametrize("skips_bad_rows", [False, True])
def test_an_image_that_changes_under_a_run_is_named_when_its_row_is_drawn_again(tmp_path, images, skips_bad_rows, monkeypatch):
    monkeypatch.setattr("tests.unit.data.test_images.SETTINGS", SETTINGS.model_copy(update={"skip_bad_rows": skips_bad_rows}))
    source = PromptSource(with_files(tmp_path, images))
    source.take(12)
    os.utime(tmp_path / "3.png")
    rewrite(tmp_path / "10.png", tiny_vision.png(16, 24, seed=9))
    assert [prompt.row for prompt in source.take(10)] == list(range(10)), "its times alone do not count"
    with pytest.raises(DataChangedError, match=r"rows\.jsonl, line 11: its images have changed .*10\.png"):
        source.take(1)


@pytest.mark.parametrize(("row", "at_start"), [(2, True), (10, False)])
def test_an_image_that_changes_before_a_resume_is_named(tmp_path, images, row, at_start):
    source = PromptSource(with_files(tmp_path, images))
    source.take(11)
    state = json.loads(json.dumps(source.state()))
    again = PromptSource(PromptDataset.open(tmp_path / "rows.jsonl", SETTINGS, tiny_vision.tokenizer(), images))
    again.restore(state)
    assert [prompt.row for prompt in again.take(12)] == [11, *range(11)]

    rewrite(tmp_path / f"{row}.png", OTHER)
    resumed = PromptSource(PromptDataset.open(tmp_path / "rows.jsonl", SETTINGS, tiny_vision.tokenizer(), images))
    if at_start:
        with pytest.raises(DataError, match=r"cannot resume: the images of .*rows\.jsonl, line 3 have changed"):
            resumed.check(state)
        return
    resumed.restore(state)
    with pytest.raises(DataChangedError, match=r"line 11: its images have changed"):
        resumed.take(12)


def test_an_image_that_no_row_has_read_yet_may_still_change(tmp_path, images):
    source = PromptSource(with_files(tmp_path, images))
    rewrite(tmp_path / "10.png", OTHER)
    assert len(source.take(12)) == 12


def test_the_state_without_image_files_is_as_before(tmp_path, images):
    source = PromptSource(opened(tmp_path, images, {"input": "<image>", "images": data_uri(PNG)}))
    source.take(1)
    assert "images" not in source.state()
