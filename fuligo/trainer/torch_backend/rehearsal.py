"""Passes over made-up samples, which compile a step's kernels while engines start, before there is a rollout."""

import numpy as np
import torch
from torch import Tensor

from fuligo.models.transformers_types import text_config
from fuligo.trainer.batch import PackedTokens, pack_tokens
from fuligo.trainer.mtp import MTPTraining, later_tokens
from fuligo.trainer.torch_backend.model import Policy, unscored_sample

MAX_ROW_TOKENS = 8192
"""Maximum length of the row in tokens. The compiler tunes kernels for the size of their first input, so a short row gives slow kernels."""
SAMPLE_TOKENS = 512
"""Maximum length of a sample in tokens."""


def made_up_row(policy: Policy, max_tokens: int, device: torch.device, *, shares_prefixes: bool) -> PackedTokens:
    """Return a row of at least two random samples with the same prompt, packed as in training.

    Args:
        max_tokens: length of the longest row of the run, which the row does not exceed. Samples do not exceed the model's positions.
        shares_prefixes: store the prompt only once.
    """
    config = text_config(policy.model.config)
    row_tokens = min(max_tokens, MAX_ROW_TOKENS)
    num_tokens = max(2, min(SAMPLE_TOKENS, row_tokens // 2, getattr(config, "max_position_embeddings", SAMPLE_TOKENS)))
    num_samples, num_prompt = max(2, row_tokens // num_tokens), max(1, num_tokens // 8)
    ids = np.random.default_rng(0).integers(config.vocab_size, size=(num_samples, num_tokens), dtype=np.int32)
    ids[:, :num_prompt] = ids[0, :num_prompt]
    shared = [0, *[num_prompt] * (num_samples - 1)] if shares_prefixes else []
    return pack_tokens([unscored_sample(of_sample, num_prompt) for of_sample in ids], device, shared=shared)


def policy_loss(policy: Policy, row: PackedTokens, *, uses_entropy: bool, mtp: MTPTraining | None) -> Tensor:
    """Return a loss with the gradients of a training step's.

    Args:
        uses_entropy: the loss has an entropy term, so the entropies have gradients too.
        mtp: training of the MTP layer, which then has gradients too; None: the layer is not run.
    """
    if mtp is None:
        outputs, further = policy(row), None
    else:
        outputs, further = policy.with_mtp(row, later_tokens(row, 1), is_joint=mtp.is_joint)
    loss = outputs.logprobs.mean() if further is None else outputs.logprobs.mean() + further.mean()
    return loss + outputs.entropy.mean() if uses_entropy else loss
