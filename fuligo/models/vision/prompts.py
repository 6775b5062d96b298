"""Placement of images in a run's prompts, with the image processor of its checkpoint."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from fuligo.config import Config
from fuligo.errors import ConfigError, DataError
from fuligo.formats.hugging_face import read_config_json
from fuligo.models.vision.placing import expanded, place_images
from fuligo.models.vision.processor import ImageProcessor, TokenGrid
from fuligo.models.vision.types import no_tower, sees_images
from fuligo.types import PlacedImages, PromptImage, RawImage


class PromptImages:
    """Implementation of `data.images.ImagePlacer`."""

    def __init__(self, directory: Path) -> None:
        """Read the settings of the checkpoint.

        Raises ConfigError if it is a text-only model, or has no settings of a known image processor.
        """
        config_json = read_config_json(directory)
        if not sees_images(config_json):
            raise ConfigError(no_tower(str(directory), config_json.get("model_type")))
        self._processor = ImageProcessor(directory)
        self.token_id = int(config_json["image_token_id"])

    def place(self, ids: Sequence[int], images: Sequence[RawImage]) -> PlacedImages:
        """Place the images by their sizes. They are not decoded until `decode`, because a rollout draws all its prompts at once.

        Raises DataError if an image is invalid, or the prompt does not have one image token for each image.
        """
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
    """Return the object that places images in a run's prompts; None without --multimodal-keys.

    Raises ConfigError if the model is text-only, or its image processor is unknown.
    """
    if not config.data.multimodal_keys:
        return None
    return PromptImages(config.hf_checkpoint_path)
