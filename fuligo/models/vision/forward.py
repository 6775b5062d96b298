"""Forward pass of a vision-language model over packed rows: the tower, then the language model on embeddings of text and images.

transformers finds image tokens by their id; here they are given by position, because a model may also sample that id as text.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from fuligo.errors import DataError
from fuligo.models.vision.processor import PROCESSOR_FILE, ImageProcessor, Patches
from fuligo.types import PromptImage


@dataclass(slots=True, frozen=True)
class RowImages:
    """Images of a row of T tokens, and the positions of their M tokens."""

    distinct: tuple[PromptImage, ...]
    """Images with distinct contents; the tower runs once for each. Their `first_token` is that of one sample: use `positions` instead."""
    positions: Tensor
    """[M] int64 positions of the image tokens in the row, ascending."""
    features: Tensor
    """[M] int64 index of each image token's feature in the concatenated features of all distinct images."""


def row_images(starts: Sequence[int], images: Sequence[Sequence[PromptImage]], device: torch.device) -> RowImages | None:
    """Return the images of sequences that begin at `starts` in a row, given the images of each sequence; None if there are no images."""
    placed = [(start, image) for start, of_one in zip(starts, images) for image in of_one]
    if not placed:
        return None
    distinct = {image.digest: image for _, image in placed}
    first = dict(zip(distinct, accumulate((image.num_tokens for image in distinct.values()), initial=0)))
    positions = [start + image.first_token + np.arange(image.num_tokens) for start, image in placed]
    features = [first[image.digest] + np.arange(image.num_tokens) for _, image in placed]
    at, of = (torch.from_numpy(np.concatenate(each)).to(device) for each in (positions, features))
    return RowImages(tuple(distinct.values()), at, of)


class Features(NamedTuple):
    """Output of the vision tower for M tokens."""

    merged: Tensor
    """[M, E] embeddings of the image tokens."""
    deepstack: tuple[Tensor, ...]
    """[M, E] each: added to the hidden states after the first layers (arXiv 2406.04334); empty for a tower without them."""

    def select(self, index: Tensor) -> "Features":
        return Features(self.merged.index_select(0, index), tuple(each.index_select(0, index) for each in self.deepstack))


class VisionTower:
    """Tower of `base`, transformers' model without its output layer, with the image processor of its checkpoint."""

    def __init__(self, base: Any, processor: ImageProcessor) -> None:
        self.base = base
        self.processor = processor
        self.is_frozen = False
        """True if the tower has no gradients, so its activations are not kept for a backward pass."""
        self.runs_always = False
        """True if the tower also runs for rows without images, on an empty image, since all ranks must take part in gathering sharded
        weights."""

    def hidden_states(self, input_ids: Tensor, positions: Tensor, images: RowImages | None, **kwargs: Any) -> Tensor:
        """Run tower and language model on a row; return [1, T, E] last hidden states.

        Args:
            input_ids: [T]
            positions: [3, T] rotary positions, or [T] for a row without images.
            images: images of the row; None if it has none.
            kwargs: arguments for the language model's attention.

        Raises:
            DataError: an image cannot be read, or its grid of tokens differs from the one in its sample.
        """
        language = self.base.language_model
        embeddings, features = language.embed_tokens(input_ids), self._features(images, input_ids.device)
        if images is not None and features is not None:
            placed = features.select(images.features)
            embeddings = embeddings.index_copy(0, images.positions, placed.merged.to(embeddings.dtype))
            if placed.deepstack:
                is_image = torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device).index_fill(0, images.positions, True)
                kwargs |= {"visual_pos_masks": is_image[None], "deepstack_visual_embeds": list(placed.deepstack)}
        elif features is not None:  # features of an empty image, which add zero: every rank must run the tower
            total = torch.stack([each.sum() for each in (features.merged, *features.deepstack)]).sum()
            embeddings = embeddings + 0.0 * total.to(embeddings.dtype)
        rotary = positions[:, None] if positions.dim() == 2 else positions[None]
        return language(inputs_embeds=embeddings[None], position_ids=rotary, use_cache=False, **kwargs).last_hidden_state

    def _features(self, images: RowImages | None, device: torch.device) -> Features | None:
        """Run the tower once over all distinct images, which do not attend to each other, or over an empty one if it must run."""
        if images is None and not self.runs_always:
            return None
        tower, side = self.base.visual, self.base.visual.spatial_merge_size
        if images is None:  # patches that make up one token
            width = tower.config.in_channels * tower.config.temporal_patch_size * tower.config.patch_size**2
            patches = [Patches(np.zeros((side * side, width), np.float32), side, side)]
        else:
            patches = [self._patches(image) for image in images.distinct]
        values = torch.cat([torch.from_numpy(each.values) for each in patches]).to(device)
        grids = torch.tensor([[1, each.num_rows, each.num_columns] for each in patches], device=device)
        with torch.set_grad_enabled(torch.is_grad_enabled() and not self.is_frozen):
            outputs = tower(values.to(tower.dtype), grid_thw=grids, return_dict=True)
        return Features(outputs.pooler_output, tuple(getattr(outputs, "deepstack_features", ())))

    def _patches(self, image: PromptImage) -> Patches:
        try:
            patches = self.processor.patches(image.data, image.digest)
        except DataError as error:
            raise DataError(f"cannot process {image.source}: {error}") from error
        side = self.processor.merge_size
        rows, columns = patches.num_rows // side, patches.num_columns // side
        if (rows, columns) != (image.num_rows, image.num_columns):
            text = f"{image.source} has {image.num_rows} x {image.num_columns} tokens in its sample, but the image processor makes"
            raise DataError(f"{text} {rows} x {columns}; use the {PROCESSOR_FILE} that the samples were made with")
        return patches
