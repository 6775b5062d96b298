"""Placement of images in the token ids of a prompt, where every token of an image has the id of the image token."""

from collections.abc import Iterable, Sequence

from fuligo.errors import DataError
from fuligo.models.vision.processor import TokenGrid, image_digest
from fuligo.quantities import count
from fuligo.types import PromptImage


def place_images(
    ids: Sequence[int], images: Sequence[bytes], grids: Sequence[TokenGrid], image_token_id: int, sources: Sequence[str]
) -> tuple[PromptImage, ...]:
    """Return the images with the positions of their tokens.

    Args:
        ids: [P] prompt, possibly followed by sampled tokens; ids of the image token after the last image are text.
        images: encoded images, in the order of their tokens.
        grids: grid of each image's tokens.
        sources: origin of each image, for error messages.

    Raises:
        DataError: the tokens of an image are not in the prompt, or nothing follows them.
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


def collapsed(ids: Iterable[int], images: Sequence[PromptImage]) -> list[int]:
    """Return the ids with one token per image, as the chat template writes them and SGLang expects them.

    Args:
        ids: [P] as in `place_images`.
    """
    dropped = {at for image in images for at in range(image.first_token + 1, image.first_token + image.num_tokens)}
    return [int(token) for at, token in enumerate(ids) if at not in dropped]


def completed(ids: Sequence[int], grids: Sequence[TokenGrid], image_token_id: int) -> list[int]:
    """Return the ids with all tokens of each image.

    Args:
        ids: [P] with one token per image, as `collapsed` returns them, or already with all tokens.
    """
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
    """Repeat the one image token that the chat template writes for each image.

    Args:
        ids: token ids as the template writes them.
        grids: grid of each image's tokens.

    Returns:
        The ids with all tokens of the images, and for each of these ids its index in the given ids.

    Raises:
        DataError: the numbers of image tokens and images differ.
    """
    found = sum(token == image_token_id for token in ids)
    if found != len(grids):
        raise DataError(
            f"the chat template writes {count(found, 'image token')} for {count(len(grids), 'image')}; it must write one for each image"
        )
    sizes = iter([grid.num_rows * grid.num_columns for grid in grids])
    origins = [at for at, token in enumerate(ids) for _ in range(next(sizes) if token == image_token_id else 1)]
    return [ids[at] for at in origins], origins
