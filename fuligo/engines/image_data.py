"""Images of a request in SGLang's format: `image_data`, a list of data URIs in the order of the images' tokens in `input_ids`."""

import base64
from collections.abc import Sequence
from typing import Any

from fuligo.types import PromptImage

MAX_IMAGES = 64
_PREFIX = "data:image;base64,"


def encoded_images(images: Sequence[PromptImage]) -> list[str]:
    """Return the images as base64 data URIs: the value of `image_data`."""
    return [_PREFIX + base64.b64encode(image.data).decode() for image in images]


def decoded_images(value: Any) -> list[bytes]:
    """Return the images' bytes. Paths and URLs, which SGLang would open, are rejected, so that clients cannot read files through an engine.

    Raises ValueError if the value is malformed.
    """
    given = [value] if isinstance(value, str) else value
    if not isinstance(given, list) or not all(isinstance(each, str) for each in given):
        raise ValueError("image_data must be a base64 string or data URI, or a list of them")
    if len(given) > MAX_IMAGES:
        raise ValueError(f"image_data has {len(given)} images, but a request may have at most {MAX_IMAGES}")
    return [_decoded(each, number) for number, each in enumerate(given)]


def _decoded(text: str, number: int) -> bytes:
    encoded = text.partition(",")[2] if text.startswith("data:") else text
    try:
        return base64.b64decode(encoded, validate=True)
    except ValueError as error:
        raise ValueError(
            f"image_data[{number}] is not base64 or a base64 data URI; send the image itself, since paths and URLs are not read"
        ) from error
