"""Log-probabilities by transformers, to compare engines with."""

import asyncio
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from fuligo.engines.client import EngineClient
from fuligo.engines.generation import Generation, SamplingParams
from fuligo.engines.group import EngineGroup

PROMPTS = [list(range(20 + n, 40 + 2 * n)) for n in range(4)]
TOLERANCE = 1e-4
"""Nats, float32 on both sides."""


def load(checkpoint: Path) -> PreTrainedModel:
    return AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)


def perturbed(model: PreTrainedModel, *, seed: int) -> PreTrainedModel:
    """Change every weight by about a tenth of itself, so that an engine that misses one shows."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1 + 0.1 * torch.randn(parameter.shape, generator=generator))
    return model


@torch.no_grad()
def logprobs(model: PreTrainedModel, prompt: Sequence[int], response: np.ndarray, *, temperature: float = 1.0) -> np.ndarray:
    """Return [R] log softmax(logits / T) of each response token over the full vocabulary."""
    ids = torch.tensor([[*prompt, *response.tolist()]])
    scores = (model(ids).logits[0, len(prompt) - 1 : -1] / temperature).log_softmax(-1)
    return scores.gather(1, ids[0, len(prompt) :, None])[:, 0].numpy()


async def sample(engine: EngineClient | EngineGroup, *, temperature: float = 1.0, num_tokens: int = 24) -> list[Generation]:
    params = SamplingParams(max_new_tokens=num_tokens, temperature=temperature, ignore_eos=True)
    return await asyncio.gather(*(engine.generate(prompt, params, rid=f"oracle-{n}") for n, prompt in enumerate(PROMPTS)))


def largest_difference(model: PreTrainedModel, generations: Sequence[Generation], *, temperature: float = 1.0) -> float:
    """Return the largest difference between the engine's log-probabilities and transformers'."""
    return max(
        float(np.abs(generation.logprobs - logprobs(model, prompt, generation.output_ids, temperature=temperature)).max())
        for prompt, generation in zip(PROMPTS, generations, strict=True)
    )
