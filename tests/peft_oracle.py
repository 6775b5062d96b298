"""PEFT as the oracle of adapters in the torch trainer: random adapters, log-probabilities and gradients."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from peft import LoraConfig, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM

from fuligo.models.adapter import adapter_tensors
from fuligo.trainer.torch_backend.worker import TorchRankWorker
from fuligo.types import TrainSample
from tests import shares, train_batches


def save_random_adapter(base: Path, config: LoraConfig, directory: Path) -> Path:
    """Save an adapter with random A and B, in PEFT's format, and return its directory."""
    torch.manual_seed(3)
    model = get_peft_model(AutoModelForCausalLM.from_pretrained(base), config)
    for parameter in model.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.1)
    model.save_pretrained(directory)
    return directory


def logprobs_of(model: Any, sample: TrainSample) -> Tensor:
    """Return [R] log-probabilities by a model's own forward pass."""
    ids = torch.from_numpy(sample.tokens).long()
    logits = model(input_ids=ids[None]).logits[0, sample.prompt_length - 1 : -1]
    return logits.log_softmax(-1).gather(1, ids[sample.prompt_length :, None])[:, 0]


def require_same_as_peft(worker: TorchRankWorker, theirs: Any, lengths: Sequence[tuple[int, int]], *, gradient_bound: float) -> None:
    """Compare log-probabilities, and the adapter's gradients of the mean negative log-likelihood.

    Args:
        theirs: PEFT's model, whose adapter is trainable.
        lengths: prompt and response tokens of the samples.
        gradient_bound: largest difference, as a share of the largest gradient.
    """
    samples = train_batches.samples(lengths, seed=1)
    for ours, sample in zip(worker.logprobs(shares.to_score(worker, samples)), samples, strict=True):
        np.testing.assert_allclose(ours, logprobs_of(theirs, sample).detach().numpy(), atol=1e-5)
    worker.gradients(shares.to_train(worker, train_batches.batch(samples))[0])
    masks = [torch.from_numpy(sample.loss_mask).float() for sample in samples]
    (-sum((logprobs_of(theirs, sample) * mask).sum() for sample, mask in zip(samples, masks)) / sum(m.sum() for m in masks)).backward()
    expected = {name.replace(".default.", "."): p.grad for name, p in theirs.named_parameters() if p.requires_grad}
    gradients = {name: p.grad for name, p in adapter_tensors(worker.policy.model).items()}
    assert gradients.keys() == expected.keys()
    largest = max(gradient.abs().max() for gradient in expected.values())
    for name, gradient in gradients.items():
        assert (gradient - expected[name]).abs().max() <= gradient_bound * largest, name
