"""Where asked, pinned memory is plain memory: SGLang 0.5.15 keeps its record of experts in pinned memory, also where no GPU is."""

import os

if os.environ.get("FULIGO_TEST_PLAIN_MEMORY"):
    import torch

    _zeros = torch.zeros

    def _plain_zeros(*size, pin_memory=False, **options):
        return _zeros(*size, **options)

    torch.zeros = _plain_zeros
