"""Replacement for the compiled module of flash-attn 2.8 that calls torch's own FlashAttention 2 kernels, for verl in `race.py`.

verl packs samples into rows with flash-attn 2, for which package indexes hold no wheel. Where it cannot be compiled, put this folder and
the Python files of flash-attn's source archive on PYTHONPATH: this module implements the two functions that `flash_attn_varlen_func` calls.
The kernels are those of flash-attn; the only extra work is a copy of three gradients in each layer.

Options that verl does not use (dropout, softcap, ALiBi, block tables, deterministic gradients) raise NotImplementedError.
"""

import torch


def varlen_fwd(
    q,
    k,
    v,
    out,
    cu_seqlens_q,
    cu_seqlens_k,
    seqused_k,
    leftpad_k,
    block_table,
    alibi_slopes,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p,
    softmax_scale,
    zero_tensors,
    causal,
    window_left,
    window_right,
    softcap,
    return_softmax,
    generator,
):
    """Return attention [T, H, D] and its log-sum-exp of queries [T, H, D], keys and values [T, Hkv, D], then an empty softmax and state."""
    _refuse(out, seqused_k, leftpad_k, block_table, alibi_slopes, dropout_p, softcap, return_softmax)
    attention, log_sum_exp, *_ = torch.ops.aten._flash_attention_forward(
        q,
        k,
        v,
        cu_seqlens_q,
        cu_seqlens_k,
        int(max_seqlen_q),
        int(max_seqlen_k),
        0.0,
        causal,
        False,
        scale=softmax_scale,
        **_window(window_left, window_right),
    )
    return attention, log_sum_exp, q.new_empty(0), torch.zeros(2, dtype=torch.uint64, device=q.device)


def varlen_bwd(
    dout,
    q,
    k,
    v,
    out,
    softmax_lse,
    dq,
    dk,
    dv,
    cu_seqlens_q,
    cu_seqlens_k,
    alibi_slopes,
    max_seqlen_q,
    max_seqlen_k,
    dropout_p,
    softmax_scale,
    zero_tensors,
    causal,
    window_left,
    window_right,
    softcap,
    deterministic,
    generator,
    rng_state,
):
    """Write the gradients of queries, keys and values into dq, dk and dv."""
    _refuse(alibi_slopes, dropout_p, softcap, deterministic)
    unused = torch.empty(0, device=q.device)
    gradients = torch.ops.aten._flash_attention_backward(
        dout,
        q,
        k,
        v,
        out,
        softmax_lse,
        cu_seqlens_q,
        cu_seqlens_k,
        int(max_seqlen_q),
        int(max_seqlen_k),
        0.0,
        causal,
        rng_state,
        unused,
        scale=softmax_scale,
        **_window(window_left, window_right),
    )
    for target, gradient in zip((dq, dk, dv), gradients, strict=True):
        target.copy_(gradient)
    return dq, dk, dv, torch.empty_like(softmax_lse)


def _refuse(*options) -> None:
    """Refuse options other than None, False and 0."""
    if any(option is not None and (isinstance(option, torch.Tensor) or option) for option in options):
        raise NotImplementedError("cannot compute this attention: only plain causal attention is supported; unset the other options")


def _window(left: int, right: int) -> dict[str, int]:
    """Return torch's arguments for a window; flash-attn's -1 means none."""
    return {} if left < 0 and right < 0 else {"window_size_left": left, "window_size_right": right}
