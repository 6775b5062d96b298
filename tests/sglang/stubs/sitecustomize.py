"""Replacement of pinned memory by plain memory on request: SGLang 0.5.15 pins its record of experts and adapters, also without a GPU."""

import os

if os.environ.get("FULIGO_TEST_PLAIN_MEMORY"):
    import torch

    def _plain(make):
        def made(*arguments, pin_memory=False, **options):
            return make(*arguments, **options)

        return made

    for _name in ("zeros", "tensor", "arange", "empty"):
        setattr(torch, _name, _plain(getattr(torch, _name)))
    torch.Tensor.pin_memory = lambda self, *_: self
