"""Policies with adapters in the Megatron trainer and in PEFT, for tests."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM

from fuligo.config.groups import OptimizerFlags
from fuligo.formats.adapter_config import AdapterConfig
from fuligo.formats.weight_manifest import MergeRounding
from fuligo.layout.megatron import Layout
from fuligo.trainer.megatron_backend.settings import MegatronTrainerSettings
from fuligo.trainer.objective import LossSettings
from fuligo.trainer.packing import Capacity
from fuligo.trainer.ranks.settings import LearningRateSchedule, LoraSettings, OptimizerSettings
from fuligo.trainer.ranks.world import World
from fuligo.types import FloatArray, TrainSample
from tests import shares, tiny, train_batches
from tests.megatron.policies import recomputing, settings_of
from tests.megatron.ranks import RankPool

LENGTHS = [(4, 9), (1, 3), (6, 9), (2, 1), (5, 14), (3, 9), (7, 6), (8, 2), (4, 30)]
CAPACITY = Capacity(max_tokens=34)
SFT = LossSettings(loss_type="sft_loss", per_token=True)
FULL = recomputing("full", "uniform", 1)

LAYOUTS = {
    "one": Layout(),
    "tp2": Layout(tp=2, num_ranks=2),
    "tp2 sp": Layout(tp=2, sequence_parallel=True, num_ranks=2),
    "pp2": Layout(pp=2, num_ranks=2),
    "pp2 vpp2": Layout(pp=2, vpp=2, num_ranks=2),
    "cp2": Layout(cp=2, num_ranks=2),
    "dp2": Layout(num_ranks=2),
    "tp2 sp pp2": Layout(tp=2, pp=2, sequence_parallel=True, num_ranks=4),
    "ep2": Layout(ep=2, num_ranks=2),
    "tp2 sp ep2": Layout(tp=2, ep=2, sequence_parallel=True, num_ranks=2),
    "tp2 sp etp2": Layout(tp=2, etp=2, sequence_parallel=True, num_ranks=2),
    "tp2 sp ep2 etp2": Layout(tp=2, ep=2, etp=2, sequence_parallel=True, num_ranks=4),
    "pp2 ep2": Layout(pp=2, ep=2, num_ranks=4),
}


ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]
LATENT = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]


@dataclass(slots=True, frozen=True)
class Start:
    """Random model with a random adapter saved by PEFT."""

    checkpoint: Path
    adapter: Path

    def settings(self, layout: str, **overrides: object) -> MegatronTrainerSettings:
        lora = LoraSettings(AdapterConfig.read(self.adapter), initial_adapter=self.adapter)
        common = {"capacity": CAPACITY, "score_capacity": CAPACITY, "loss": SFT, "chunk_tokens": 7}
        place = OptimizerFlags(use_distributed_optimizer=False)
        return settings_of(self.checkpoint, LAYOUTS[layout], **{**common, "lora": lora, "optimizer_place": place, **overrides})


def start(directory: Path, family: str, targets: list[str], *, parameters: Sequence[str] = (), **shape: object) -> Start:
    checkpoint = tiny.save_checkpoint(directory / "model", family, **shape)
    config = LoraConfig(r=3, lora_alpha=7, target_modules=targets, target_parameters=list(parameters) or None)
    theirs = get_peft_model(AutoModelForCausalLM.from_pretrained(checkpoint), config)
    torch.manual_seed(1)
    for parameter in theirs.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.1)
    theirs.save_pretrained(directory / "adapter")
    return Start(checkpoint, directory / "adapter")


@dataclass(slots=True)
class Found:
    """Log-probabilities of policy and reference, and gradients by PEFT's names."""

    logprobs: list[FloatArray]
    reference: list[FloatArray]
    gradients: dict[str, Tensor]


def logprobs_of(model: torch.nn.Module, sample: TrainSample) -> Tensor:
    """Return [R] log-probabilities computed by the model's forward pass."""
    ids = torch.from_numpy(sample.tokens).long()
    logits = model(input_ids=ids[None]).logits[0, sample.prompt_length - 1 : -1]
    return logits.log_softmax(-1).gather(1, ids[sample.prompt_length :, None])[:, 0]


def by_peft(given: Start, samples: list[TrainSample]) -> Found:
    base = AutoModelForCausalLM.from_pretrained(
        given.checkpoint, dtype=torch.float64, attn_implementation="eager", experts_implementation="eager"
    )
    reference = [logprobs_of(base, sample).detach().numpy() for sample in samples]
    theirs = PeftModel.from_pretrained(base, given.adapter, is_trainable=True, autocast_adapter_dtype=False).double()
    logprobs = [logprobs_of(theirs, sample) for sample in samples]
    masks = [torch.from_numpy(sample.loss_mask).float() for sample in samples]
    (-sum((own * mask).sum() for own, mask in zip(logprobs, masks)) / sum(mask.sum() for mask in masks)).backward()
    gradients = {name.replace(".default.", "."): p.grad for name, p in theirs.named_parameters() if p.requires_grad}
    return Found([own.detach().numpy() for own in logprobs], reference, gradients)


def by_megatron(world: World, settings: MegatronTrainerSettings, samples: list[TrainSample]) -> Found | None:
    """Score, and compute one gradient; return both on rank 0."""
    from fuligo.trainer.megatron_backend.weights.export import named_weights
    from fuligo.trainer.megatron_backend.worker import MegatronRankWorker

    worker = MegatronRankWorker(replace(settings, reference_weights=settings.initial_weights), world)
    scored = shares.scored(worker, samples)
    logprobs = worker.logprobs(shares.to_score(worker, samples))
    worker.gradients(shares.to_train(worker, train_batches.batch(samples))[0])
    for chunk in worker.chunks:
        for name, parameter in chunk.named_parameters():
            assert parameter.requires_grad == (".adapter." in name), name
            assert hasattr(parameter, "main_grad") == parameter.requires_grad, name
            if parameter.requires_grad:
                parameter.data.copy_(parameter.main_grad)
    gradients = {name: tensor.clone() for name, tensor in named_weights(worker.chunks, worker._saved_adapter.names, dtype=torch.float32)}
    return None if logprobs is None else Found(logprobs, [sample.ref_logprobs for sample in scored], gradients)


def assert_as_peft(got: Found | None, want: Found) -> None:
    assert got is not None
    for ours, theirs in zip((*got.logprobs, *got.reference), (*want.logprobs, *want.reference), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-5)
    assert got.gradients.keys() == want.gradients.keys()
    largest = max(gradient.abs().max() for gradient in want.gradients.values())
    for name, gradient in want.gradients.items():
        assert (got.gradients[name] - gradient).abs().max() <= 1e-5 * largest, name


ADAM = OptimizerSettings(LearningRateSchedule(peak=3e-3, warmup_steps=2), eps=1e-3, weight_decay=0.1, clip_grad=0.5)
"""Optimizer with a large epsilon, so that steps depend smoothly on the gradients."""


@dataclass(slots=True)
class Trained:
    """Results of `course`."""

    metrics: dict[str, float]
    merged: dict[str, Tensor]
    rounding: MergeRounding


def course(
    world: World,
    settings: MegatronTrainerSettings,
    samples: list[TrainSample],
    *,
    load: Path | None = None,
    save: Path | None = None,
    beside: bool = False,
    num_rollouts: int = 1,
) -> Trained | None:
    """Train rollouts of two optimizer steps each, from initial weights or a checkpoint, and save."""
    from fuligo.trainer.megatron_backend.worker import MegatronRankWorker

    worker = MegatronRankWorker(settings, world)
    if load is not None:
        worker.restore(load)
    metrics: dict[str, float] = {}
    for _ in range(num_rollouts):
        metrics = worker.train(shares.to_train(worker, train_batches.batch(samples, num_steps=2))).metrics
    if save is not None and beside:
        saving = worker.begin_save(save)
        worker.train(shares.to_train(worker, train_batches.batch(samples)))
        saving.result(timeout=120)
    elif save is not None:
        worker.save(save)
    weights = {name: tensor.clone() for name, tensor in worker._adapted.merged()}
    metrics.pop("train/tokens_per_s", None)
    return Trained(metrics, weights, worker._adapted.rounding) if world.rank == 0 else None


def run_course(pool: RankPool, settings: MegatronTrainerSettings, samples: list[TrainSample], **options: object) -> Trained:
    trained = pool.run(settings.num_ranks, course, settings, samples, **options)[0]
    assert trained is not None
    return trained
