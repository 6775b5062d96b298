"""Replacement of pinned memory by plain memory on request: SGLang 0.5.15 pins its record of experts, also without a GPU."""

import os

if os.environ.get("FULIGO_TEST_PLAIN_MEMORY"):
    import torch

    _zeros = torch.zeros

    def _plain_zeros(*size, pin_memory=False, **options):
        return _zeros(*size, **options)

    torch.zeros = _plain_zeros
