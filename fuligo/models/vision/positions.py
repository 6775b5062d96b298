"""Rotary positions of tokens with images (M-RoPE, arXiv 2409.12191, section 2.1): time, row and column of each token.

A text token has three equal positions. An image's tokens have their coordinates in the grid plus the next free position; text after the
image continues after the larger side of the grid.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fuligo.types import PromptImage


def rotary_positions(length: int, images: Sequence[PromptImage]) -> NDArray[np.int64]:
    """Return [3, T] positions of a sequence of `length` tokens, whose images are in the order of their tokens."""
    positions = np.empty((3, length), np.int64)
    at = shift = 0
    for image in images:
        positions[:, at : image.first_token] = np.arange(at, image.first_token) + shift
        start, end = image.first_token, image.first_token + image.num_tokens
        rows, columns = np.divmod(np.arange(image.num_tokens), image.num_columns)
        positions[:, start:end] = start + shift + np.stack([np.zeros_like(rows), rows, columns])
        at = end
        shift += max(image.num_rows, image.num_columns) - image.num_tokens
    positions[:, at:] = np.arange(at, length) + shift
    return positions


def row_positions(lengths: Sequence[int], images: Sequence[Sequence[PromptImage]]) -> NDArray[np.int64]:
    """Return [3, T] positions of sequences laid end to end, given the images of each sequence; [T] without images, where all are equal."""
    if not any(images):
        return np.concatenate([np.arange(length) for length in lengths])
    return np.concatenate([rotary_positions(length, of_one) for length, of_one in zip(lengths, images, strict=True)], axis=1)


def rotary_shift(images: Sequence[PromptImage]) -> int:
    """Return the difference between rotary position and index, for tokens after all images."""
    return sum(max(image.num_rows, image.num_columns) - image.num_tokens for image in images)
