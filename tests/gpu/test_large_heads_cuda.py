"""Heads that torch's flash kernel does not take (Gemma 4 has some of 512) are attended to by other kernels on a GPU."""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F

from fuligo.models.attention import LARGEST_FLASH_HEAD, fits_flash_kernel, packed_attention

STARTS = (0, 70, 71, 200, 329)


@pytest.mark.parametrize("window", [None, 33])
@pytest.mark.parametrize("size", [LARGEST_FLASH_HEAD, 2 * LARGEST_FLASH_HEAD])
def test_packed_attention_equals_attention_of_each_sequence(size: int, window: int | None) -> None:
    torch.manual_seed(0)
    query, key, value = (torch.randn(STARTS[-1], heads, size, device="cuda") for heads in (8, 2, 2))
    half = [x.bfloat16() for x in (query, key, value)]
    assert fits_flash_kernel(half[0], half[2]) == (size <= LARGEST_FLASH_HEAD)
    found = packed_attention(*half, STARTS, scale=size**-0.5, window=window)
    for start, end in pairwise(STARTS):
        q, k, v = (x.float()[start:end].transpose(0, 1) for x in half)
        k, v = (x.repeat_interleave(4, 0) for x in (k, v))
        mask = torch.ones(end - start, end - start, dtype=torch.bool, device="cuda").tril()
        mask = mask if window is None else mask.triu(1 - window)
        expected = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=size**-0.5).transpose(0, 1)
        torch.testing.assert_close(found[start:end].float(), expected, atol=2e-2, rtol=2e-2)
