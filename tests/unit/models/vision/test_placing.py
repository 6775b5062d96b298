"""Places of images in token ids."""

import pytest

from fuligo.errors import DataError
from fuligo.models.vision.placing import collapsed, completed, place_images
from fuligo.models.vision.processor import TokenGrid

IMAGE = 9


@pytest.mark.parametrize(
    ("ids", "reason"),
    [
        ([1, 9, 9, 2, 9, 9], "the prompt ends with b; text must follow it"),
        ([1, 9, 9, 2], "b has no tokens in the prompt"),
        ([1, 9, 9, 2, 9, 3], "b has 1 x 2 tokens, but the prompt has 1 image token in its place"),
        ([9, 9, 9, 9, 1], "a has 1 x 2 tokens, but the prompt has 4 image tokens in its place"),
    ],
)
def test_images_without_their_tokens_are_refused(ids, reason):
    with pytest.raises(DataError, match=reason):
        place_images(ids, [b"a", b"b"], [TokenGrid(1, 2)] * 2, IMAGE, ["a", "b"])


def test_image_tokens_after_all_images_are_text():
    placed = place_images([1, 9, 9, 2, 9, 9, 3, 9, 9, 9], [b"a", b"b"], [TokenGrid(1, 2)] * 2, IMAGE, ["a", "b"])
    assert [(image.source, image.first_token, image.num_tokens) for image in placed] == [("a", 1, 2), ("b", 4, 2)]


def test_images_with_one_token_get_all_of_them():
    grids = [TokenGrid(1, 2), TokenGrid(2, 2)]
    whole = [1, 9, 9, 2, 9, 9, 9, 9, 3, 9, 4]
    placed = place_images(whole, [b"a", b"b"], grids, IMAGE, ["a", "b"])
    short = collapsed(whole, placed)
    assert short == [1, 9, 2, 9, 3, 9, 4]
    assert completed(short, grids, IMAGE) == completed(whole, grids, IMAGE) == whole
    assert completed([1, 2], grids, IMAGE) == [1, 2], "that an image has no token is the error of `place_images`"
