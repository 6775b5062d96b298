"""Mixtures of experts on Megatron-Core: gradients against transformers for families, dispatchers and layouts; load balancing."""

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from fuligo.config.groups import OptimizerFlags
from fuligo.errors import ConfigError, TrainerError
from fuligo.layout.megatron import Layout
from fuligo.trainer.megatron_backend.model_config import transformer_config
from fuligo.trainer.megatron_backend.settings import MegatronTrainerSettings
from fuligo.trainer.objective import LossSettings
from fuligo.trainer.packing import Capacity
from fuligo.trainer.ranks.settings import LearningRateSchedule, OptimizerSettings
from fuligo.trainer.ranks.world import World
from fuligo.trainer.step import StepSamples
from fuligo.types import TrainBatch, TrainSample
from tests import shares, train_batches
from tests.megatron.checkpoints import expert_by_expert, save_uneven
from tests.megatron.gradients import assert_gradients_agree, megatron_gradients, torch_gradients
from tests.megatron.policies import recomputing, settings_of
from tests.megatron.ranks import RankPool

LENGTHS = [(4, 9), (1, 3), (6, 9), (2, 1), (5, 14), (3, 9)]
"""(prompt, response) lengths."""
CAPACITY = Capacity(max_tokens=34)
LOSS = LossSettings(loss_type="sft_loss")

LAYOUTS = {
    "one": Layout(),
    "ep2": Layout(ep=2, num_ranks=2),
    "cp2": Layout(cp=2, num_ranks=2),
    "pp2": Layout(pp=2, num_ranks=2),
    "tp2 sp": Layout(tp=2, sequence_parallel=True, num_ranks=2),
    "tp2 sp etp2": Layout(tp=2, etp=2, sequence_parallel=True, num_ranks=2),
    "tp2 sp ep2": Layout(tp=2, ep=2, sequence_parallel=True, num_ranks=4),
    "ep2 pp2": Layout(pp=2, ep=2, num_ranks=4),
    "cp2 ep2": Layout(cp=2, ep=2, num_ranks=2),
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory):
    made: dict[str, Path] = {}

    def checkpoint(family: str) -> Path:
        if family not in made:
            made[family] = save_uneven(tmp_path_factory.mktemp(family), family)
        return made[family]

    return checkpoint


def batch() -> TrainBatch:
    return train_batches.batch(train_batches.samples(LENGTHS))


def mixture_settings(directory: Path, layout: Layout, **overrides: Any) -> MegatronTrainerSettings:
    given = {
        "capacity": CAPACITY,
        "loss": LOSS,
        "dispatcher": "alltoall",
        "optimizer_place": OptimizerFlags(use_distributed_optimizer=False),
    }
    return settings_of(directory, layout, **{**given, **overrides})


SLOW = pytest.mark.slow


@pytest.mark.parametrize(
    ("family", "layout", "dispatcher"),
    [
        ("qwen3_moe", "ep2", "allgather"),
        ("qwen3_moe", "ep2", "alltoall"),
        ("glm4_moe", "tp2 sp", "alltoall"),
        ("glm4_moe", "ep2", "alltoall"),
        *(
            pytest.param(family, layout, dispatcher, marks=SLOW)
            for family in ("qwen3_moe", "glm4_moe")
            for layout in LAYOUTS
            for dispatcher in ("allgather", "alltoall")
        ),
    ],
)
def test_gradients_are_those_of_the_torch_trainer(pool: RankPool, checkpoints, family: str, layout: str, dispatcher: str) -> None:
    directory, shape = checkpoints(family), LAYOUTS[layout]
    got, *_ = pool.run(shape.num_ranks, megatron_gradients, mixture_settings(directory, shape, dispatcher=dispatcher), batch())
    assert_gradients_agree(got, torch_gradients(directory, batch(), LOSS))


def gate_logits(model: Any, samples: list[TrainSample]) -> Iterator[tuple[TrainSample, Tensor, dict[str, Tensor]]]:
    """Yield for each sample log-probabilities [T, V] of all tokens but the first, and router logits [T, experts] by name."""
    seen: dict[str, Tensor] = {}
    gates = {name: module for name, module in model.named_modules() if name.endswith(".mlp.gate")}
    for name, gate in gates.items():
        gate.register_forward_hook(lambda _, __, logits, name=name: seen.__setitem__(name, logits))
    for sample in samples:
        ids = torch.from_numpy(sample.tokens[:-1]).long()[None]
        yield sample, model(ids, use_cache=False).logits[0].log_softmax(-1), dict(seen)


def balanced_torch_gradients(directory: Path, coefficient: float) -> tuple[dict[str, Tensor], float]:
    """Return the gradients of the likelihood plus DeepSeek-V3's sequence balance loss, a mean over tokens, and that loss."""
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    step = StepSamples.of(batch(), 0, LOSS)
    num_tokens, balance = sum(len(sample.tokens) - 1 for sample in step.samples), 0.0
    for (sample, log_softmax, gates), weights in zip(gate_logits(model, step.samples), step.weights):
        rows = torch.arange(len(weights)) + sample.prompt_length - 1
        targets = torch.from_numpy(sample.tokens).long()[sample.prompt_length :]
        loss = -(torch.from_numpy(weights) * log_softmax[rows, targets]).sum()
        for logits in gates.values():
            scores = logits.sigmoid() / logits.sigmoid().sum(-1, keepdim=True)
            top_k = model.config.num_experts_per_tok
            chosen = torch.zeros_like(scores).scatter(1, scores.topk(top_k).indices, 1.0)
            frequency = chosen.mean(0) * scores.size(1) / top_k
            share = coefficient * (frequency * scores.mean(0)).sum() * len(scores) / num_tokens
            loss, balance = loss + share, balance + float(share)
        loss.backward()
    gradients = {name: parameter.grad for name, parameter in model.named_parameters()}
    return expert_by_expert({name: gradient for name, gradient in gradients.items() if gradient is not None}), balance


def metrics(world: World, settings: MegatronTrainerSettings, of: TrainBatch) -> dict[str, float]:
    """Return the metrics of the only step of `of` on rank 0."""
    from fuligo.trainer.megatron_backend.worker import MegatronRankWorker

    worker = MegatronRankWorker(settings, world)
    return worker.train(shares.to_train(worker, of)).metrics


@pytest.mark.parametrize("layout", ["ep2", *(pytest.param(layout, marks=SLOW) for layout in ("tp2 sp", "cp2", "pp2", "tp2 sp ep2"))])
def test_a_balance_loss_of_sequences_does_not_see_packing_padding_or_layout(pool: RankPool, checkpoints, layout: str) -> None:
    directory = checkpoints("glm4_moe")
    flags = {"moe_router_load_balancing_type": "seq_aux_loss", "moe_aux_loss_coeff": 0.3}
    settings = mixture_settings(directory, LAYOUTS[layout], flags=flags, pad_multiple_tokens=32)
    expected, balance_loss = balanced_torch_gradients(directory, 0.3)
    got, *_ = pool.run(settings.num_ranks, megatron_gradients, settings, batch())
    assert_gradients_agree(got, expected)
    of_step, *_ = pool.run(settings.num_ranks, metrics, settings, batch())
    assert of_step["train/moe_balance_loss"] == pytest.approx(balance_loss, rel=1e-5)


@pytest.mark.parametrize("layout", ["tp2 sp", *(pytest.param(layout, marks=SLOW) for layout in ("ep2", "tp2 sp etp2", "ep2 pp2"))])
def test_the_norm_counts_every_weight_once(pool: RankPool, checkpoints, layout: str) -> None:
    directory = checkpoints("glm4_moe")
    settings = mixture_settings(directory, LAYOUTS[layout], optimizer_place=OptimizerFlags(use_distributed_optimizer=True))
    of_step, *_ = pool.run(settings.num_ranks, metrics, settings, batch())
    norms = torch.stack([gradient.norm() for gradient in torch_gradients(directory, batch(), LOSS).values()])
    assert of_step["train/grad_norm"] == pytest.approx(float(norms.norm()), rel=1e-5)


def corrections_after_a_step(world: World, settings: MegatronTrainerSettings, of: TrainBatch) -> dict[str, Tensor]:
    from fuligo.trainer.megatron_backend.worker import MegatronRankWorker

    worker = MegatronRankWorker(settings, world)
    worker.train(shares.to_train(worker, of))
    return {name: tensor.clone() for name, tensor in worker.named_weights() if name.endswith("e_score_correction_bias")}


def corrections_and_counts(directory: Path) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return by name the router corrections of transformers' model and the number of the batch's tokens per expert."""
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    corrections = {name: buffer for name, buffer in model.named_buffers() if name.endswith("e_score_correction_bias")}
    counts = {name: torch.zeros_like(correction) for name, correction in corrections.items()}
    for _, _, gates in gate_logits(model, batch().samples):
        for gate, logits in gates.items():
            name = f"{gate}.e_score_correction_bias"
            chosen = (logits.sigmoid() + corrections[name]).topk(model.config.num_experts_per_tok).indices
            counts[name] += chosen.flatten().bincount(minlength=len(counts[name]))
    return corrections, counts


def tokens_of_experts(world: World, settings: MegatronTrainerSettings, of: TrainBatch) -> dict[str, Tensor]:
    """Return this rank's token counts per expert in the second of two equal steps, after scoring the same samples."""
    from fuligo.trainer.megatron_backend.router import routers
    from fuligo.trainer.megatron_backend.worker import MegatronRankWorker

    worker = MegatronRankWorker(settings, world)
    shares.scored(worker, of.samples)
    worker.train(shares.to_train(worker, of))
    worker.train(shares.to_train(worker, of))
    counts: dict[str, Tensor] = {}
    for router in routers(worker.chunks):
        assert router.layer_number is not None and router.local_tokens_per_expert is not None
        counts[f"model.layers.{router.layer_number - 1}.mlp.gate.e_score_correction_bias"] = router.local_tokens_per_expert.clone()
    return counts


@pytest.mark.parametrize("layout", ["ep2", *(pytest.param(layout, marks=SLOW) for layout in ("tp2 sp", "cp2", "ep2 pp2"))])
def test_each_real_token_counts_once_for_its_experts_and_padding_never(pool: RankPool, checkpoints, layout: str) -> None:
    directory = checkpoints("glm4_moe")
    recomputed = recomputing("full", "uniform", 1)
    settings = mixture_settings(
        directory,
        LAYOUTS[layout],
        flags={"moe_router_bias_update_rate": 0.0},
        optimizer=OptimizerSettings(LearningRateSchedule(peak=0.0)),  # the second step's choices are the first's
        pad_multiple_tokens=32,
        parallel=recomputed,
        needs_old_logprobs=True,
    )
    _, expected = corrections_and_counts(directory)
    counted = {name: torch.zeros_like(count) for name, count in expected.items()}
    for of_rank in pool.run(settings.num_ranks, tokens_of_experts, settings, batch()):
        for name, count in of_rank.items():
            counted[name] += count
    assert all(torch.equal(counted[name], count) for name, count in expected.items())


@pytest.mark.parametrize(("layout", "rate"), [("ep2", 0.1), ("ep2", 0.0), pytest.param("tp2 sp", 0.1, marks=SLOW)])
def test_corrections_move_towards_experts_that_got_few_real_tokens(pool: RankPool, checkpoints, layout: str, rate: float) -> None:
    directory = checkpoints("glm4_moe")
    settings = mixture_settings(directory, LAYOUTS[layout], flags={"moe_router_bias_update_rate": rate}, pad_multiple_tokens=32)
    results = pool.run(settings.num_ranks, corrections_after_a_step, settings, batch())
    corrections, counts = corrections_and_counts(directory)
    for got in results:
        assert got.keys() == corrections.keys()
        for name, correction in corrections.items():
            expected = correction + rate * (counts[name].mean() - counts[name]).sign()
            torch.testing.assert_close(got[name], expected)


def corrections_around_a_failed_step(
    world: World, settings: MegatronTrainerSettings, failing: TrainBatch, of: TrainBatch
) -> list[dict[str, Tensor]]:
    """Return the corrections before and after a failed step, and after a successful one."""
    from fuligo.trainer.megatron_backend.worker import MegatronRankWorker

    def corrections() -> dict[str, Tensor]:
        return {name: tensor.clone() for name, tensor in worker.named_weights() if name.endswith("e_score_correction_bias")}

    worker = MegatronRankWorker(settings, world)
    found = [corrections()]
    with pytest.raises(TrainerError, match="is not finite"):
        worker.train(shares.to_train(worker, failing))
    found.append(corrections())
    worker.train(shares.to_train(worker, of))
    return [*found, corrections()]


def test_a_step_that_fails_moves_no_correction_and_is_forgotten(pool: RankPool, checkpoints) -> None:
    failing = batch()
    failing.samples[2].advantages[:] = np.inf
    flags = {"moe_router_bias_update_rate": 0.1}
    settings = mixture_settings(checkpoints("glm4_moe"), LAYOUTS["ep2"], flags=flags, loss=LossSettings())
    (before, failed, after), _ = pool.run(2, corrections_around_a_failed_step, settings, failing, batch())
    alone, _ = pool.run(2, corrections_after_a_step, settings, batch())
    assert before and all(torch.equal(failed[name], correction) for name, correction in before.items())
    assert all(torch.equal(after[name], correction) for name, correction in alone.items())
    assert any(not torch.equal(after[name], correction) for name, correction in before.items())


def weights_after_a_step(world: World, settings: MegatronTrainerSettings, of: TrainBatch) -> dict[str, Tensor]:
    from fuligo.trainer.megatron_backend.worker import MegatronRankWorker

    worker = MegatronRankWorker(settings, world)
    worker.train(shares.to_train(worker, of))
    return {name: tensor.clone() for name, tensor in worker.named_weights()}


def test_hidden_communication_changes_nothing_of_a_step(pool: RankPool, checkpoints) -> None:
    """Experts have separate gradient buffers, which are not reduced over the same ranks as those of the other weights."""
    layout = Layout(ep=2, num_ranks=4)
    adam = OptimizerSettings(LearningRateSchedule(peak=1e-3), eps=1e-3)  # with a usual epsilon, steps are little more than signs
    settings = mixture_settings(
        checkpoints("glm4_moe"), layout, optimizer=adam, optimizer_place=OptimizerFlags(use_distributed_optimizer=True)
    )
    hidden = replace(settings, model_flags={**settings.model_flags, "overlap_grad_reduce": True, "overlap_param_gather": True})
    expected, *_ = pool.run(4, weights_after_a_step, settings, batch())
    got, *_ = pool.run(4, weights_after_a_step, hidden, batch())
    assert got.keys() == expected.keys()
    for name, weight in expected.items():
        torch.testing.assert_close(got[name], weight, atol=1e-6, rtol=0, msg=name)


def router_types(world: World, settings: MegatronTrainerSettings) -> set[torch.dtype]:
    from fuligo.trainer.megatron_backend.model import build_chunks
    from fuligo.trainer.megatron_backend.router import routers
    from fuligo.trainer.megatron_backend.worker import join_megatron

    join_megatron(settings.layout, world, settings.seed)
    chunks = [chunk.bfloat16() for chunk in build_chunks(settings, trained=True)]
    return {buffer.dtype for router in routers(chunks) for buffer in router.buffers()}


def test_corrections_and_counts_stay_in_float32(pool: RankPool, checkpoints) -> None:
    assert pool.run(1, router_types, mixture_settings(checkpoints("glm4_moe"), Layout())) == [{torch.float32}]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"moe_router_load_balancing_type": "sinkhorn"}, "sinkhorn"),
        ({"moe_router_load_balancing_type": "global_aux_loss"}, "seq_aux_loss"),
        ({"moe_expert_capacity_factor": 1.5}, "--moe-expert-capacity-factor 1.5"),
        ({"moe_z_loss_coeff": 0.1}, "--moe-z-loss-coeff 0.1"),
        ({"moe_router_num_groups": 4, "moe_router_group_topk": 1}, "topk_group 1"),
        ({"moe_router_topk": 1}, "num_experts_per_tok 1"),
    ],
)
def test_what_would_not_be_the_model_is_refused(checkpoints, flags: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        transformer_config(mixture_settings(checkpoints("glm4_moe"), Layout(), flags=flags))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"layout": Layout(tp=2, num_ranks=2)}, "needs --sequence-parallel"),
        (
            {"parallel": recomputing("full", "block", 1), "model_flags": {"moe_router_bias_update_rate": 0.1}},
            "--recompute-method block with balanced experts",
        ),
        ({"dispatcher": "flex"}, "CUDA only; use --moe-token-dispatcher-type alltoall"),
        ({"dispatcher": "flex", "deepep": True, "device": "cuda"}, "deep_ep is not installed.*alltoall without --moe-enable-deepep"),
    ],
)
def test_ways_that_cannot_work_are_refused(checkpoints, changes: dict[str, Any], message: str) -> None:
    settings = mixture_settings(checkpoints("glm4_moe"), Layout())
    changes = {**changes, "model_flags": {**settings.model_flags, **changes.get("model_flags", {})}}
    with pytest.raises(ConfigError, match=message):
        transformer_config(replace(settings, **changes))
