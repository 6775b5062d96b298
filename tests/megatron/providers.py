"""Model providers for the tests of `--custom-model-provider-path`."""

from typing import Any

import torch.nn.functional as F
from torch import Tensor, nn

from fuligo.trainer.megatron_backend.provider import default_model

EPSILON = 0.5


class WideNorm(nn.Module):
    """RMSNorm with another epsilon and the weight of the norm that it replaces."""

    def __init__(self, norm: Any) -> None:
        super().__init__()
        self.weight = norm.weight

    def forward(self, hidden: Tensor) -> Tensor:
        return F.rms_norm(hidden, self.weight.shape, self.weight, EPSILON)


def with_wide_norm(pre_process: bool, post_process: bool, vp_stage: int | None = None) -> Any:
    model: Any = default_model(pre_process, post_process, vp_stage)
    if post_process:
        model.decoder.final_layernorm = WideNorm(model.decoder.final_layernorm)
    return model


def bare_module(pre_process: bool, post_process: bool, vp_stage: int | None = None) -> nn.Module:
    return nn.Linear(2, 2)


def whole_model(pre_process: bool, post_process: bool, vp_stage: int | None = None) -> Any:
    return default_model(True, True)


def with_gate(pre_process: bool, post_process: bool, vp_stage: int | None = None) -> Any:
    model: Any = default_model(pre_process, post_process, vp_stage)
    model.decoder.layers[0].mlp.gate = nn.Linear(64, 1, bias=False)
    return model


def without_last_layer(pre_process: bool, post_process: bool, vp_stage: int | None = None) -> Any:
    model: Any = default_model(pre_process, post_process, vp_stage)
    if post_process:
        del model.decoder.layers[-1]
    return model
