"""Passes over made-up samples, which compile a step's kernels while engines start, before there is a rollout."""

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch

from fuligo.models.transformers_types import text_config
from fuligo.trainer.batch import PackedTokens, pack_tokens
from fuligo.trainer.torch_backend.model import Policy
from fuligo.types import TrainSample

MAX_ROW_TOKENS = 8192
"""Tokens of the row, at most. The compiler tunes kernels for the size of their first input, so a short row would give slow ones."""
SAMPLE_TOKENS, PROMPT_TOKENS = 512, 64


def made_up_row(policy: Policy, max_tokens: int | None, device: torch.device, *, shares_prefixes: bool) -> PackedTokens:
    """Return a row of random samples as the trainer packs them.

    Args:
        max_tokens: limit of a training row; None: no limit.
        shares_prefixes: rows store a prompt that several samples share once; all samples of this one have the same prompt.
    """
    num_samples = max(2, min(max_tokens or MAX_ROW_TOKENS, MAX_ROW_TOKENS) // SAMPLE_TOKENS)
    generator = np.random.default_rng(0)
    ids = generator.integers(text_config(policy.model.config).vocab_size, size=(num_samples, SAMPLE_TOKENS), dtype=np.int32)
    ids[:, :PROMPT_TOKENS] = ids[0, :PROMPT_TOKENS]
    shared = [0, *[PROMPT_TOKENS] * (num_samples - 1)] if shares_prefixes else []
    return pack_tokens([_sample(of_sample) for of_sample in ids], device, shared=shared)


def rehearse_training(policy: Policy, row: PackedTokens, *, uses_entropy: bool) -> None:
    """Run the forward and backward pass, and discard the gradients.

    `uses_entropy`: the loss has an entropy term, so the entropies have gradients too.
    """
    with _random_state_kept(row.input_ids.device):
        outputs = policy(row)
        loss = outputs.logprobs.mean()
        (loss + outputs.entropy.mean() if uses_entropy else loss).backward()
    for parameter in policy.parameters():
        parameter.grad = None


@torch.no_grad()
def rehearse_scoring(policy: Policy, row: PackedTokens) -> None:
    """Run the pass without gradients that computes old or reference log-probabilities."""
    with _random_state_kept(row.input_ids.device):
        policy(row)
    policy.release_gathered()


@contextmanager
def _random_state_kept(device: torch.device) -> Iterator[None]:
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):
        yield


def _sample(ids: np.ndarray) -> TrainSample:
    num_response = len(ids) - PROMPT_TOKENS
    return TrainSample(
        index=0,
        group_index=0,
        tokens=ids,
        prompt_length=PROMPT_TOKENS,
        loss_mask=np.ones(num_response, np.int8),
        reward=0.0,
        engine_logprobs=np.zeros(num_response, np.float32),
        versions=np.zeros(num_response, np.int32),
        mask_sum=float(num_response),
    )
