"""The Megatron trainer against the torch trainer on the same checkpoint: gradients, steps, and errors."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fuligo.config.groups import OptimizerFlags
from fuligo.errors import TrainerError
from fuligo.layout.megatron import Layout
from fuligo.trainer.megatron_backend.settings import MegatronTrainerSettings
from fuligo.trainer.objective import KlLoss, LossSettings
from fuligo.trainer.packing import Capacity
from fuligo.trainer.ranks.rank import build_worker
from fuligo.trainer.ranks.settings import LearningRateSchedule, OptimizerSettings, TrainerSettings
from fuligo.trainer.ranks.world import World
from fuligo.trainer.shares import StepShare
from fuligo.trainer.torch_backend.settings import TorchTrainerSettings
from fuligo.trainer.torch_backend.worker import TorchRankWorker
from fuligo.types import StepResult, TrainBatch, TrainSample
from tests import shares, tiny, train_batches
from tests.megatron.policies import changed_by_a_step, settings_of
from tests.megatron.ranks import RankPool

LENGTHS = [(4, 9), (1, 3), (6, 9), (2, 1), (5, 14), (3, 9), (7, 6), (8, 2), (4, 30)]
"""(prompt, response) lengths; the last sample is packed alone."""
CAPACITY = Capacity(max_tokens=34)

LAYOUTS = {
    "one": Layout(),
    "tp2": Layout(tp=2, num_ranks=2),
    "tp2 sp": Layout(tp=2, sequence_parallel=True, num_ranks=2),
    "pp2": Layout(pp=2, num_ranks=2),
    "pp3 uneven": Layout(pp=3, num_layers_first_stage=1, num_layers_last_stage=1, num_ranks=3),
    "pp2 vpp2": Layout(pp=2, vpp=2, num_ranks=2),
    "cp2": Layout(cp=2, num_ranks=2),
    "dp2": Layout(num_ranks=2),
    "dp4": Layout(num_ranks=4),
    "cp2 dp2": Layout(cp=2, num_ranks=4),
    "pp2 dp2": Layout(pp=2, num_ranks=4),
    "tp2 pp2": Layout(tp=2, pp=2, num_ranks=4),
    "tp2 sp cp2": Layout(tp=2, cp=2, sequence_parallel=True, num_ranks=4),
}
LOSSES = {
    "entropy": LossSettings(entropy_coef=0.01),
    "gspo per token": LossSettings(estimator="gspo", per_token=True),
    "sequence masking": LossSettings(opsm_delta=0.01),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_checkpoint(tmp_path_factory.mktemp("qwen3"), "qwen3", layers=4)


@pytest.fixture(scope="module")
def batch(checkpoint: Path) -> TrainBatch:
    """Return a batch with old log-probabilities near the policy's, so that ratios differ from 1 and some are clipped."""
    samples = train_batches.samples(LENGTHS)
    worker = TorchRankWorker(torch_settings(checkpoint), World())
    logprobs = worker.logprobs(shares.to_score(worker, samples))
    assert logprobs is not None
    return train_batches.batch(train_batches.with_old_logprobs(samples, noise=0.2, logprobs=logprobs))


def torch_settings(directory: Path, **overrides: object) -> TorchTrainerSettings:
    megatron = settings_of(directory, Layout(), capacity=CAPACITY, score_capacity=CAPACITY)
    common = {name: getattr(megatron, name) for name in TrainerSettings.__dataclass_fields__}
    return TorchTrainerSettings(**{**common, **overrides})


def torch_gradients(directory: Path, batch: TrainBatch, loss: LossSettings) -> dict[str, Tensor]:
    worker = TorchRankWorker(torch_settings(directory, loss=loss), World())
    worker.gradients(shares.to_train(worker, batch)[0])
    return {name: parameter.grad for name, parameter in worker.policy.model.named_parameters() if parameter.grad is not None}


def megatron_gradients(world: World, settings: MegatronTrainerSettings, batch: TrainBatch) -> dict[str, Tensor] | None:
    """Return the gradients of the whole model by Hugging Face name on rank 0."""
    from fuligo.trainer.megatron_backend.worker import MegatronRankWorker

    worker = MegatronRankWorker(settings, world)
    worker.gradients(shares.to_train(worker, batch)[0])
    for chunk in worker.chunks:
        for parameter in chunk.parameters():
            parameter.data.copy_(parameter.main_grad)
    gradients = {name: tensor.clone() for name, tensor in worker.named_weights()}
    return gradients if world.rank == 0 else None


def assert_equal_gradients(got: dict[str, Tensor] | None, want: dict[str, Tensor]) -> None:
    assert got is not None and got.keys() == want.keys()
    largest = max(gradient.abs().max() for gradient in want.values())
    for name, gradient in want.items():
        assert (got[name] - gradient).abs().max() <= 1e-5 * largest, name


@pytest.mark.parametrize(
    ("layout", "loss"),
    [
        ("tp2 sp", "entropy"),
        ("pp3 uneven", "gspo per token"),
        ("pp2 vpp2", "entropy"),
        ("cp2", "gspo per token"),
        ("cp2", "sequence masking"),
        ("dp2", "gspo per token"),
        ("cp2 dp2", "gspo per token"),
        ("tp2 pp2", "entropy"),
        *(
            pytest.param(layout, "entropy", marks=pytest.mark.slow)
            for layout in ("one", "tp2", "pp2", "cp2", "dp2", "dp4", "cp2 dp2", "pp2 dp2", "tp2 sp cp2")
        ),
    ],
)
def test_gradients_are_those_of_the_torch_trainer(pool: RankPool, checkpoint: Path, batch: TrainBatch, layout: str, loss: str) -> None:
    settings = settings_of(
        checkpoint,
        LAYOUTS[layout],
        capacity=CAPACITY,
        loss=LOSSES[loss],
        chunk_tokens=7,
        optimizer_place=OptimizerFlags(use_distributed_optimizer=False),
    )
    got, *_ = pool.run(LAYOUTS[layout].num_ranks, megatron_gradients, settings, batch)
    assert_equal_gradients(got, torch_gradients(checkpoint, batch, LOSSES[loss]))


REPEATED = [(4, 26), (5, 25), (6, 24)]
"""Lengths that fill three micro-batches; with two data-parallel ranks or interleaved stages, a fourth one is needed."""


@pytest.mark.parametrize("layout", ["dp2", pytest.param("pp2 vpp2", marks=pytest.mark.slow)])
def test_a_repeated_micro_batch_weighs_nothing(pool: RankPool, checkpoint: Path, layout: str) -> None:
    batch = train_batches.batch(train_batches.samples(REPEATED))
    settings = settings_of(checkpoint, LAYOUTS[layout], capacity=CAPACITY, optimizer_place=OptimizerFlags(use_distributed_optimizer=False))
    got, *_ = pool.run(LAYOUTS[layout].num_ranks, megatron_gradients, settings, batch)
    assert_equal_gradients(got, torch_gradients(checkpoint, batch, LossSettings()))


@dataclass(slots=True)
class Course:
    """Results of a worker's course."""

    scored: list[TrainSample]
    result: StepResult
    weights: dict[str, Tensor]
    scored_after: list[TrainSample]


def course(world: World, settings: TrainerSettings, samples: list[TrainSample], build: Callable[..., Any] = build_worker) -> Course | None:
    """Score, train for five optimizer steps, score again; return the results on rank 0."""
    worker = build(settings, world)
    scored = shares.scored(worker, samples)
    everywhere: list[Any] = [scored]
    if world.size > 1:
        dist.broadcast_object_list(everywhere)  # as the driver does
    result = worker.train(shares.to_train(worker, train_batches.batch(everywhere[0], num_steps=5)))
    weights = {name: tensor.clone() for name, tensor in worker.named_weights()}
    scored_after = shares.scored(worker, samples)
    return None if scored is None or scored_after is None else Course(scored, result, weights, scored_after)


ADAM = OptimizerSettings(LearningRateSchedule(peak=3e-3, warmup_steps=2), eps=1e-3, weight_decay=0.1, clip_grad=0.5)
"""Optimizer with a large epsilon, so that steps depend smoothly on the gradients; usual steps are close to their signs."""
OVERLAP = {"overlap_grad_reduce": True, "overlap_param_gather": True}


@pytest.mark.parametrize(
    ("layout", "flags"),
    [
        ("dp2", OVERLAP),
        ("tp2 sp", {}),
        pytest.param("one", {}, marks=pytest.mark.slow),
        pytest.param("tp2 pp2", OVERLAP, marks=pytest.mark.slow),
        pytest.param("pp2 vpp2", OVERLAP, marks=pytest.mark.slow),
        pytest.param("tp2 sp cp2", {}, marks=pytest.mark.slow),
    ],
)
def test_scores_and_steps_are_those_of_the_torch_trainer(
    pool: RankPool, checkpoint: Path, tmp_path: Path, layout: str, flags: dict
) -> None:
    """Covers the distributed optimizer, warm-up, weight decay, clipping, a teacher, and updates of the reference."""
    common = {
        "reference_weights": tiny.save_checkpoint(tmp_path / "reference", "qwen3", seed=5, layers=4),
        "teacher_weights": tiny.save_checkpoint(tmp_path / "teacher", "qwen3", seed=6, layers=4),
        "ref_update_interval": 1,
        "needs_old_logprobs": True,
        "loss": LossSettings(entropy_coef=0.01, kl_loss=KlLoss(0.1, "k3")),
        "optimizer": ADAM,
        "balance_data": True,
    }
    samples = train_batches.samples(LENGTHS * 2)
    settings = settings_of(checkpoint, LAYOUTS[layout], flags=flags, capacity=CAPACITY, score_capacity=CAPACITY, **common)
    got, *_ = pool.run(LAYOUTS[layout].num_ranks, course, settings, samples)
    want = course(World(), torch_settings(checkpoint, **common), samples)
    assert got is not None and want is not None

    for before, expected in ((got.scored, want.scored), (got.scored_after, want.scored_after)):
        for ours, theirs in zip(before, expected, strict=True):
            np.testing.assert_allclose(ours.old_logprobs, theirs.old_logprobs, atol=1e-4)
            np.testing.assert_allclose(ours.ref_logprobs, theirs.ref_logprobs, atol=1e-4)
            np.testing.assert_allclose(ours.teacher_logprobs, theirs.teacher_logprobs, atol=1e-4)
    assert got.result.num_tokens == want.result.num_tokens
    assert got.result.scores.keys() == want.result.scores.keys()
    for position, scores in want.result.scores.items():
        np.testing.assert_allclose(got.result.scores[position].logprobs, scores.logprobs, atol=1e-4)
        np.testing.assert_allclose(got.result.scores[position].entropy, scores.entropy, atol=1e-4)
    own = {"train/tokens_per_s", "train/num_micro_batches"}
    assert got.result.metrics.keys() == want.result.metrics.keys()
    for name in want.result.metrics.keys() - own:
        assert got.result.metrics[name] == pytest.approx(want.result.metrics[name], rel=1e-4, abs=1e-6), name
    for name, weight in want.weights.items():
        torch.testing.assert_close(got.weights[name], weight, atol=2e-5, rtol=0, msg=name)


def sharing(world: World, settings: TrainerSettings, samples: list[TrainSample]) -> Course | None:
    """Run `course` with an offload before training and one in the middle."""
    from fuligo.trainer.megatron_backend.worker import MegatronRankWorker

    class Sharing(MegatronRankWorker):
        def train(self, steps: Sequence[StepShare]) -> StepResult:
            self.offload()
            weights = [parameter for chunk in self.chunks for parameter in chunk.parameters()]
            assert all(bool(tensor.untyped_storage().nbytes()) == settings.stays_on_device for tensor in weights)
            assert not any(tensor.untyped_storage().nbytes() for tensor in self._dropped_tensors())
            held = [tensor.data_ptr() for tensor in self._kept_tensors()]
            self.onload()
            super().train(steps[:2])
            self.offload()
            self.onload()
            if settings.stays_on_device:
                assert len(held) > 1.5 * len(weights), "two moments of this rank's share exist before the first step"
                assert [tensor.data_ptr() for tensor in self._kept_tensors()] == held
            return super().train(steps[2:])

    return course(world, settings, samples, Sharing)


@pytest.mark.parametrize("stays", [False, True])
def test_nothing_is_lost_while_engines_have_the_memory(pool: RankPool, checkpoint: Path, stays: bool) -> None:
    samples = train_batches.samples(LENGTHS * 2)
    limits = {"capacity": CAPACITY, "score_capacity": CAPACITY}
    settings = settings_of(checkpoint, LAYOUTS["dp2"], **limits, needs_old_logprobs=True, optimizer=ADAM, precision="bf16")
    (alone, _), (shared, _) = (
        pool.run(2, course, settings, samples),
        pool.run(2, sharing, replace(settings, stays_on_device=stays), samples),
    )
    assert alone is not None and shared is not None
    assert all(torch.equal(weight, shared.weights[name]) for name, weight in alone.weights.items())


def failed_step(world: World, settings: MegatronTrainerSettings, batch: TrainBatch) -> tuple[str, bool]:
    """Return the error of a step, and whether all weights of this rank are unchanged."""
    from fuligo.trainer.megatron_backend.worker import MegatronRankWorker

    worker = MegatronRankWorker(settings, world)
    before = [parameter.detach().clone() for chunk in worker.chunks for parameter in chunk.parameters()]
    with pytest.raises(TrainerError) as failure:
        worker.train(shares.to_train(worker, batch))
    after = [parameter for chunk in worker.chunks for parameter in chunk.parameters()]
    return str(failure.value), all(torch.equal(old, new) for old, new in zip(before, after, strict=True))


def test_a_loss_that_is_not_finite_leaves_the_weights_and_ends_the_step_on_all_ranks(pool: RankPool, checkpoint: Path) -> None:
    samples = train_batches.samples(LENGTHS)
    samples[3].advantages[:] = np.inf
    settings = settings_of(checkpoint, LAYOUTS["pp2"])
    errors = pool.run(2, failed_step, settings, train_batches.batch(samples))
    assert errors == [(errors[0][0], True)] * 2
    assert "optimizer step 0: the loss of micro-batch 0 on rank 1 is not finite; the weights were left as they are" in errors[0][0]


def weights_after_steps(world: World, settings: MegatronTrainerSettings, samples: list[TrainSample]) -> dict[str, Tensor] | None:
    """Return the weights after two optimizer steps on rank 0."""
    from fuligo.trainer.megatron_backend.worker import MegatronRankWorker

    worker = MegatronRankWorker(settings, world)
    worker.train(shares.to_train(worker, train_batches.batch(samples, num_steps=2)))
    weights = {name: tensor.clone() for name, tensor in worker.named_weights()}
    return weights if world.rank == 0 else None


@pytest.fixture(scope="module")
def plainly_trained(pool: RankPool, checkpoint: Path) -> dict[str, Tensor]:
    settings = settings_of(checkpoint, LAYOUTS["dp2"], capacity=CAPACITY, optimizer=ADAM)
    weights, _ = pool.run(2, weights_after_steps, settings, train_batches.samples(LENGTHS * 2))
    assert weights is not None
    return weights


@pytest.mark.parametrize(
    ("place", "flags"),
    [
        (OptimizerFlags(use_distributed_optimizer=False), {"overlap_grad_reduce": True}),
        (OptimizerFlags(), {**OVERLAP, "ddp_bucket_size": 5_000}),
        (OptimizerFlags(), {"ddp_bucket_size": 5_000, "pad_buckets_for_high_nccl_busbw": True}),
        (OptimizerFlags(optimizer_cpu_offload=True, overlap_cpu_optimizer_d2h_h2d=True, use_precision_aware_optimizer=True), OVERLAP),
    ],
    ids=["whole on each rank", "small buckets, overlapped", "small buckets, padded", "on the CPU"],
)
def test_where_and_when_the_optimizer_works_changes_no_step(
    pool: RankPool, checkpoint: Path, plainly_trained: dict[str, Tensor], place: OptimizerFlags, flags: dict[str, Any]
) -> None:
    settings = settings_of(checkpoint, LAYOUTS["dp2"], capacity=CAPACITY, optimizer=ADAM, optimizer_place=place, flags=flags)
    weights, _ = pool.run(2, weights_after_steps, settings, train_batches.samples(LENGTHS * 2))
    assert weights is not None
    for name, weight in plainly_trained.items():
        torch.testing.assert_close(weights[name], weight, atol=1e-6, rtol=0, msg=name)


@pytest.mark.parametrize("layout", ["dp2", "pp2 vpp2"])
def test_skipped_samples_would_have_changed_nothing(pool: RankPool, checkpoint: Path, layout: str) -> None:
    """Skip three of the five samples of each step, which leaves fewer samples than rows."""
    samples = [replace(s, advantages=s.advantages * (s.index % 5 < 2)) for s in train_batches.samples([*LENGTHS, (5, 5)])]
    settings = settings_of(checkpoint, LAYOUTS[layout], capacity=CAPACITY, optimizer=ADAM)
    settings = [replace(settings, skips_zero_advantages=skips) for skips in (False, True)]
    (whole, _), (skipped, _) = (pool.run(2, weights_after_steps, each, samples) for each in settings)
    assert whole is not None and skipped is not None
    for name, weight in whole.items():
        torch.testing.assert_close(skipped[name], weight, atol=2e-6, rtol=0, msg=name)


def test_a_rollout_without_advantages_leaves_the_weights_as_they_are(pool: RankPool, checkpoint: Path) -> None:
    samples = [replace(s, advantages=np.zeros_like(s.advantages)) for s in train_batches.samples(LENGTHS)]
    settings = settings_of(checkpoint, LAYOUTS["dp2"], capacity=CAPACITY, optimizer=ADAM)
    changed, _ = pool.run(2, changed_by_a_step, settings, train_batches.batch(samples))
    assert changed, "weight decay moves them"
    changed, _ = pool.run(2, changed_by_a_step, replace(settings, skips_zero_advantages=True), train_batches.batch(samples))
    assert changed == []


def weights_after_skipped_steps(
    world: World, settings: MegatronTrainerSettings, samples: list[TrainSample], directory: Path, num_trained: int | None
) -> dict[str, Tensor]:
    """Take `num_trained` optimizer steps, skip two and save, or restore if it is None; then take one more step and return the weights."""
    from fuligo.trainer.megatron_backend.worker import MegatronRankWorker

    worker = MegatronRankWorker(settings, world)
    steps = shares.to_train(worker, train_batches.batch(samples))
    if num_trained is None:
        worker.restore(directory)
    else:
        worker.train([*steps * num_trained, None, None])
        worker.save(directory)
    worker.train(steps)
    return {name: tensor.clone() for name, tensor in worker.named_weights()}


@pytest.mark.parametrize(("num_trained", "is_distributed"), [(0, True), (2, False)])
def test_training_resumes_after_skipped_steps(
    pool: RankPool, checkpoint: Path, tmp_path: Path, num_trained: int, is_distributed: bool
) -> None:
    """Skipped steps count for the learning rate but not for Adam, which has no moments if all steps were skipped."""
    place = OptimizerFlags(use_distributed_optimizer=is_distributed)
    settings = settings_of(checkpoint, LAYOUTS["dp2"], capacity=CAPACITY, optimizer=ADAM, optimizer_place=place)
    given = settings, train_batches.samples(LENGTHS), tmp_path / "saved"
    uninterrupted, _ = pool.run(2, weights_after_skipped_steps, *given, num_trained)
    resumed, _ = pool.run(2, weights_after_skipped_steps, *given, None)
    assert all(torch.equal(resumed[name], weight) for name, weight in uninterrupted.items())


def norm_of_gradients(world: World, settings: MegatronTrainerSettings, samples: list[TrainSample]) -> float | None:
    """Return the gradient norm on rank 0."""
    from fuligo.trainer.megatron_backend.worker import MegatronRankWorker

    worker = MegatronRankWorker(settings, world)
    return worker.train(shares.to_train(worker, train_batches.batch(samples))).metrics.get("train/grad_norm")


def test_gradients_that_are_summed_in_bf16_are_near_those_in_float32(pool: RankPool, checkpoint: Path) -> None:
    samples = train_batches.samples(LENGTHS)
    settings = settings_of(checkpoint, LAYOUTS["dp2"], capacity=CAPACITY, precision="bf16", optimizer=ADAM)
    precise, _ = pool.run(2, norm_of_gradients, settings, samples)
    rounded, _ = pool.run(2, norm_of_gradients, replace(settings, gradients_in_fp32=False), samples)
    assert rounded != precise
    assert rounded == pytest.approx(precise, rel=0.02)
