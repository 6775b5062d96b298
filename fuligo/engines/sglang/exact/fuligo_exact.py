"""Plugin for SGLang 0.5.15 for --exact-on-policy: Llama and Qwen models compute with the trainer's kernels and its rounding.

SGLang loads it in each of its processes (`sglang.srt.plugins`). Their Python environment lacks fuligo, so the modules with the kernels are
loaded from their files. Prefill and decode run the same attention kernel, so a token's log-probability does not depend on the batch, prefix
caches, chunked prefill or retraction.
"""

import importlib.util
import sys
import traceback
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

MODELS = Path(__file__).parents[3] / "models"


def install() -> None:
    """Replace SGLang's operations. An error ends the process, since SGLang would only log it and sample with its own operations."""
    try:
        kernels = _load("invariant_kernels")
        _replace_layers(kernels)
        _replace_experts(kernels, _load("invariant_expert_kernels"))
        _replace_attention(kernels)
        _replace_logprobs(kernels)
    except Exception as error:
        traceback.print_exc()
        raise SystemExit(
            f"fuligo cannot replace SGLang's operations for --exact-on-policy: {error}; install the SGLang version that fuligo supports"
        ) from error


def _load(name: str) -> Any:
    spec = importlib.util.spec_from_file_location(f"fuligo_{name}", MODELS / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # triton looks kernels up by their module
    spec.loader.exec_module(module)
    return module


def _replace_layers(kernels: Any) -> None:
    from sglang.srt.layers.activation import SiluAndMul
    from sglang.srt.layers.layernorm import RMSNorm
    from sglang.srt.layers.quantization.unquant import UnquantizedLinearMethod
    from sglang.srt.layers.rotary_embedding.base import RotaryEmbedding
    from sglang.srt.models import utils

    def linear(self: Any, layer: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return kernels.linear(x, layer.weight, bias, x.dtype)

    def norm(self: Any, x: Tensor, residual: Tensor | None = None, post_residual_addition: Tensor | None = None) -> Any:
        if residual is None:
            return kernels.rms_norm(x, self.weight, self.variance_epsilon)[0]
        residual = residual + x  # rounded before the norm, as transformers does
        if post_residual_addition is not None:
            residual = residual + post_residual_addition
        return kernels.rms_norm(residual, self.weight, self.variance_epsilon)[0], residual

    def rotate(self: Any, positions: Tensor, query: Tensor, key: Tensor, offsets: Any = None, fused_set_kv_buffer_arg: Any = None) -> Any:
        assert offsets is None and fused_set_kv_buffer_arg is None and self.is_neox_style and self.rotary_dim == self.head_size
        cosines, sines = self.cos_sin_cache.chunk(2, -1)
        rotated = (kernels.rotate(x.unflatten(-1, (-1, self.head_size)), positions, cosines, sines) for x in (query, key))
        return tuple(each.flatten(1) for each in rotated)

    def swiglu(self: Any, x: Tensor) -> Tensor:
        return kernels.swiglu(*x.chunk(2, -1))

    inverse_frequencies = RotaryEmbedding._compute_inv_freq

    def on_cpu(self: Any, base: float) -> Tensor:
        """Compute the inverse frequencies on the CPU, as transformers does; on a GPU they differ in the last bit."""
        device = torch.get_default_device()
        with torch.device("cpu"):
            found = inverse_frequencies(self, base)
        return found.to(device)

    UnquantizedLinearMethod.apply = linear
    RMSNorm.forward_cuda = norm
    RotaryEmbedding.forward_cuda = rotate
    RotaryEmbedding._compute_inv_freq = on_cpu
    SiluAndMul.forward_cuda = swiglu
    utils.can_use_fused_inplace_qknorm = lambda *_, **__: False


def _replace_experts(kernels: Any, expert_kernels: Any) -> None:
    from sglang.srt.layers.moe import topk
    from sglang.srt.layers.moe.token_dispatcher import StandardCombineInput
    from sglang.srt.layers.quantization.unquant import UnquantizedFusedMoEMethod
    from sglang.srt.models import qwen3_moe

    def fused_topk(
        hidden_states: Tensor,
        gating_output: Tensor,
        topk: int,
        renormalize: bool,
        correction_bias: Tensor | None = None,
        scoring_func: str = "softmax",
        **_: Any,
    ) -> tuple[Tensor, Tensor]:
        assert correction_bias is None and scoring_func == "softmax"
        return expert_kernels.route(gating_output, topk, renormalize=renormalize)

    def experts(self: Any, layer: Any, dispatch_output: Any) -> Any:
        weights, chosen, _ = dispatch_output.topk_output
        found = expert_kernels.experts(
            dispatch_output.hidden_states, layer.w13_weight, layer.w2_weight, weights, chosen, swiglu=kernels.swiglu
        )
        return StandardCombineInput(hidden_states=found.out)

    assert callable(topk.fused_topk) and callable(qwen3_moe.enable_fused_set_kv_buffer)
    topk.fused_topk = fused_topk
    UnquantizedFusedMoEMethod.forward_cuda = experts
    qwen3_moe.enable_fused_set_kv_buffer = lambda _: False  # the fused rotary embedding would also write the KV cache
    qwen3_moe.can_use_fused_qk_norm_rope = lambda *_, **__: False


def _replace_attention(kernels: Any) -> None:
    from sglang.srt.layers.attention.triton_backend import TritonAttnBackend

    own_init = TritonAttnBackend.__init__

    def init(self: Any, *args: Any, **options: Any) -> None:
        own_init(self, *args, **options)
        assert self.page_size == 1 and not self.use_mla and self.dcp_size == 1
        self.enable_deterministic = True  # prefill: one kernel for cached and new tokens
        each = torch.arange(len(self.kv_indptr), dtype=torch.int32, device=self.device)

        def prefill(
            q: Tensor, o: Tensor, k: Tensor, v: Tensor, _k: float, _v: float, starts: Tensor, key_starts: Tensor, slots: Tensor,
            _prefix: Tensor, longest: int, *, sm_scale: float, is_causal: bool = True, custom_mask: Any = None, **_: Any,
        ) -> None:  # fmt: skip
            assert is_causal and custom_mask is None
            starts = starts[: len(key_starts)].to(torch.int32)
            kernels.attention(q, k, v, starts, key_starts, slots, longest=longest, scale=sm_scale, out=o)

        def decode(q: Tensor, k: Tensor, v: Tensor, o: Tensor, key_starts: Tensor, slots: Tensor, *rest: Any, **_: Any) -> None:
            scale = rest[4]
            kernels.attention(q, k, v, each[: len(q) + 1], key_starts, slots, longest=1, scale=scale, out=o)

        self.extend_attention_fwd_unified, self.decode_attention_fwd = prefill, decode

    TritonAttnBackend.__init__ = init


def _replace_logprobs(kernels: Any) -> None:
    from sglang.srt.layers.logits_processor import LogitsProcessor
    from sglang.srt.layers.sampler import Sampler

    def head(self: Any, hidden_states: Tensor, lm_head: Any, embedding_bias: Tensor | None = None) -> Tensor:
        return kernels.linear(hidden_states, lm_head.weight, embedding_bias, torch.float32)

    own_forward, own_attach = Sampler.forward, Sampler._attach_logprobs_to_output

    def forward(self: Any, logits_output: Any, sampling_info: Any, return_logprob: bool, *args: Any, **options: Any) -> Any:
        if return_logprob:
            logits = logits_output.next_token_logits / sampling_info.temperatures
            self.exact_logprobs = logits.sub_(kernels.log_sum_exp(logits)[:, None])
        return own_forward(self, logits_output, sampling_info, return_logprob, *args, **options)

    def attach(self: Any, logits_output: Any, logprobs: Tensor, *args: Any) -> None:
        exact, self.exact_logprobs = self.exact_logprobs, None
        own_attach(self, logits_output, exact, *args)

    LogitsProcessor._compute_lm_head = head
    Sampler.forward, Sampler._attach_logprobs_to_output = forward, attach
