"""Plugin for SGLang 0.5.15 that draws tokens in one pass over the logits.

SGLang's sampler makes about twenty passes over the logits, [R, V] in float32, for temperature, softmax, checks, noise and the
log-probabilities of all tokens. Here, `fuligo_draw` reads them once. SGLang's own sampler remains for batches with a request that has
top-p, top-k or min-p or wants log-probabilities of other tokens, and for engines with deterministic inference.
"""

import os
from collections.abc import Callable
from typing import Any

SWITCH = "FULIGO_SAMPLER"
"""Environment variable; 0 leaves sampling to SGLang."""
SAMPLER = "sglang.srt.layers.sampler.Sampler.forward"


def install() -> None:
    """Replace SGLang's sampler where all requests of a batch sample from the whole vocabulary."""
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    if os.environ.get(SWITCH) != "0":
        HookRegistry.register(SAMPLER, sample, HookType.AROUND)


def sample(
    own_sample: Callable[..., Any],
    sampler: Any,
    output: Any,
    requests: Any,
    return_logprob: bool,
    top_logprobs_nums: list[int] | None,
    token_ids_logprobs: list[list[int] | None] | None,
    positions: Any,
) -> Any:
    """Return a token per request, int32 [R], and write its log-probability, float32 [R], to `output` if `return_logprob`.

    `top_logprobs_nums` and `token_ids_logprobs` say of which other tokens requests want log-probabilities; None if no request wants any.
    """
    logits = output.next_token_logits
    wants_others = any(top_logprobs_nums or ()) or any(ids is not None for ids in token_ids_logprobs or ())
    if wants_others or not draws_from_all(sampler, logits, requests):
        return own_sample(sampler, output, requests, return_logprob, top_logprobs_nums, token_ids_logprobs, positions)
    from fuligo_draw import draw
    from sglang.srt.layers.dp_attention import get_attention_dp_rank

    # SGLang gives all attention replicas of an engine the same seed. Replicas that have drawn equally often would draw the same tokens for
    # samples of the same prompt. (SGLang's own sampler takes more random numbers for a larger batch, so its replicas soon differ.)
    tokens, logprobs = draw(sampler._preprocess_logits(logits, requests), requests.temperatures, get_attention_dp_rank())
    if return_logprob:
        output.next_token_logprobs = logprobs
    sampler._sync_token_ids_across_tp(tokens, requests)
    return tokens


def draws_from_all(sampler: Any, logits: Any, requests: Any) -> bool:
    """Return whether every request samples from the softmax of its logits, divided by its temperature, with the engine's random numbers."""
    from sglang.srt.layers.sampler import SGLANG_RETURN_ORIGINAL_LOGPROB

    return (
        logits.is_cuda
        and logits.stride(-1) == 1
        and len(logits) > 0
        and not (requests.is_all_greedy or requests.need_top_p_sampling or requests.need_top_k_sampling or requests.need_min_p_sampling)
        and requests.sampling_seed is None
        and sampler.rl_on_policy_target is None
        and not SGLANG_RETURN_ORIGINAL_LOGPROB
    )
