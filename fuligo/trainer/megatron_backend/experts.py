"""Modules of mixture-of-experts layers, and the transports that send tokens to their experts."""

from importlib.util import find_spec

from megatron.core.models.backends import BackendSpecProvider
from megatron.core.models.gpt.moe_module_specs import get_moe_module_spec_for_backend
from megatron.core.transformer.moe.moe_layer import MoELayer, MoESubmodules
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from torch import nn

from fuligo.errors import ConfigError
from fuligo.trainer.megatron_backend.router import PackedRouter
from fuligo.trainer.megatron_backend.settings import MegatronTrainerSettings


def mixture(config: TransformerConfig, modules: BackendSpecProvider) -> ModuleSpec:
    """Return router, routed experts (one grouped product for all with TransformerEngine, else one after the other), and shared experts."""
    spec = get_moe_module_spec_for_backend(modules, config.num_moe_experts, moe_grouped_gemm=config.moe_grouped_gemm)
    assert isinstance(spec.submodules, MoESubmodules)
    spec.submodules.router = PackedRouter
    return spec


def sum_expert_gradients_over_copies(model: nn.Module) -> None:
    """Sum the gradients of routed experts over the ranks that hold copies of them.

    Megatron does so only if experts are distributed (EP > 1). Else it sums them like those of other weights, over the data-parallel ranks,
    and leaves out the TP ranks that have copies of the experts where ETP < TP.
    """
    for module in model.modules():
        if isinstance(module, MoELayer):
            assert isinstance(module.experts, nn.Module)
            for parameter in module.experts.parameters():
                parameter.allreduce = False  # pyright: ignore[reportAttributeAccessIssue]


def is_moe_layer(config: TransformerConfig, number: int) -> bool:
    """Return whether the layer, counted from 0 over all stages, has experts."""
    if config.num_moe_experts is None:
        return False
    frequency = config.moe_layer_freq
    return number % frequency == 0 if isinstance(frequency, int) else bool(frequency[number])


def refuse_missing_transport(settings: MegatronTrainerSettings) -> None:
    """Check that the dispatcher can run on this machine.

    Raises:
        ConfigError: its kernels are not installed here.
    """
    if settings.dispatcher != "flex" and not settings.deepep:
        return
    if settings.device != "cuda":
        raise ConfigError(f"--moe-token-dispatcher-type {settings.dispatcher} runs on CUDA only; use alltoall")
    if find_spec("deep_ep") is None:
        raise ConfigError(
            f"--moe-token-dispatcher-type {settings.dispatcher} with DeepEP: the package deep_ep is not installed on this machine; "
            "install it (https://github.com/deepseek-ai/DeepEP) on every trainer node, or use --moe-token-dispatcher-type alltoall"
        )
