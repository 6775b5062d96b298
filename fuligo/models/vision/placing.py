"""Placement of images in the token ids of a prompt, where every token of an image has the id of the image token."""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import SupportsInt

import numpy as np

from fuligo.config import Config
from fuligo.errors import ConfigError, DataError
from fuligo.formats.hugging_face import read_config_json
from fuligo.models.registry import VISION_TYPES
from fuligo.models.vision.processor import ImageProcessor, TokenGrid, image_digest
from fuligo.quantities import count
from fuligo.types import PlacedImages, PromptImage, RawImage


def place_images(
    ids: Sequence[int], images: Sequence[bytes], grids: Sequence[TokenGrid], image_token_id: int, sources: Sequence[str]
) -> tuple[PromptImage, ...]:
    """Return the images with their tokens' positions. Raises DataError if the prompt lacks the tokens, or nothing follows them.

    Args:
        ids: [P] prompt, possibly followed by sampled tokens; ids of the image token after the last image are text.
        images: encoded images, in the order of their tokens.
        sources: origin of each image, for error messages.
    """
    ids = list(ids)
    placed: list[PromptImage] = []
    at = 0
    for data, grid, source in zip(images, grids, sources, strict=True):
        try:
            start = ids.index(image_token_id, at)
        except ValueError:
            raise DataError(f"{source} has no tokens in the prompt; each image needs {image_token_id} (the image token)") from None
        at = start + grid.num_rows * grid.num_columns
        run = next((i for i in range(start, len(ids)) if ids[i] != image_token_id), len(ids)) - start
        if run != at - start:
            raise DataError(
                f"{source} has {grid.num_rows} x {grid.num_columns} tokens, but the prompt has {count(run, 'image token')} in its place"
            )
        if at == len(ids):
            raise DataError(f"the prompt ends with {source}; text must follow it")
        placed.append(PromptImage(source, data, image_digest(data), start, grid.num_rows, grid.num_columns))
    return tuple(placed)


def collapsed(ids: Iterable[SupportsInt], images: Sequence[PromptImage]) -> list[int]:
    """Return the ids [P] of `place_images` with one token per image, as the chat template writes them and SGLang expects them."""
    dropped = {at for image in images for at in range(image.first_token + 1, image.first_token + image.num_tokens)}
    return [int(token) for at, token in enumerate(ids) if at not in dropped]


def completed(ids: Sequence[int], grids: Sequence[TokenGrid], image_token_id: int) -> list[int]:
    """Return the ids with all tokens of each image, given ids [P] with one token per image (`collapsed`) or already with all."""
    whole, at = list(ids), 0
    for grid in grids:
        if image_token_id not in whole[at:]:
            break  # `place_images` reports it
        start, size = whole.index(image_token_id, at), grid.num_rows * grid.num_columns
        at = start + size
        if whole[start + 1 : start + 2] != [image_token_id]:
            whole[start : start + 1] = [image_token_id] * size
    return whole


def expanded(ids: Sequence[int], grids: Sequence[TokenGrid], image_token_id: int) -> tuple[list[int], list[int]]:
    """Repeat the one image token that the chat template writes for each image; return the ids, and each one's index in the given ids.

    Raises DataError if the numbers of image tokens and images differ.
    """
    found = sum(token == image_token_id for token in ids)
    if found != len(grids):
        raise DataError(
            f"the chat template writes {count(found, 'image token')} for {count(len(grids), 'image')}; it must write one for each image"
        )
    sizes = iter([grid.num_rows * grid.num_columns for grid in grids])
    origins = [at for at, token in enumerate(ids) for _ in range(next(sizes) if token == image_token_id else 1)]
    return [ids[at] for at in origins], origins


def no_tower(directory: Path, model_type: object) -> str:
    """Return the error message for images in the prompts of a model without a supported vision tower."""
    known = ", ".join(sorted(VISION_TYPES))
    return f"--multimodal-keys: {directory} is a {model_type} model; images in prompts need one of the type {known}"


class PromptImages:
    """Implementation of `data.images.ImagePlacer`."""

    def __init__(self, directory: Path) -> None:
        """Read the settings of the checkpoint. Raises ConfigError if it is text-only, or its image processor is unknown."""
        config_json = read_config_json(directory)
        if config_json.get("model_type") not in VISION_TYPES:
            raise ConfigError(no_tower(directory, config_json.get("model_type")))
        self._processor = ImageProcessor(directory)
        self.token_id = int(config_json["image_token_id"])

    def place(self, ids: Sequence[int], images: Sequence[RawImage]) -> PlacedImages:
        """Place the images by their sizes. They are not decoded until `decode`, because a rollout draws all its prompts at once."""
        grids: list[TokenGrid] = []
        for image in images:
            try:
                grids.append(self._processor.grid(image.data))
            except DataError as error:
                raise DataError(f"cannot process {image.source}: {error}") from error
        whole, origins = expanded(ids, grids, self.token_id)
        sources, contents = [image.source for image in images], [image.data for image in images]
        placed = place_images(whole, contents, grids, self.token_id, sources)
        return PlacedImages(np.asarray(whole, np.int32), np.asarray(origins, np.int64), placed)

    def decode(self, images: Sequence[PromptImage]) -> None:
        """Decode the images into the processor's cache. Raises DataError if an image cannot be decoded."""
        for image in images:
            try:
                self._processor.patches(image.data, image.digest)
            except DataError as error:
                raise DataError(f"cannot process {image.source}: {error}") from error


def prompt_images(config: Config) -> PromptImages | None:
    """Return the object that places images in a run's prompts; None without --multimodal-keys."""
    if not config.data.multimodal_keys:
        return None
    return PromptImages(config.hf_checkpoint_path)
