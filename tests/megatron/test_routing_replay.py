"""Routing replay: tokens go to the given experts under every layout and in recomputed layers, as in transformers."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from fuligo.config.groups import OptimizerFlags
from fuligo.errors import TrainerError
from fuligo.layout.megatron import Layout
from fuligo.models.routing import RoutingShape
from fuligo.trainer.batch import pack_tokens
from fuligo.trainer.megatron_backend.settings import MegatronTrainerSettings
from fuligo.trainer.objective import LossSettings
from fuligo.trainer.packing import Capacity
from fuligo.trainer.ranks.world import World
from fuligo.trainer.step import StepSamples
from fuligo.types import TrainBatch, TrainSample
from tests import shares, train_batches
from tests.megatron.checkpoints import expert_by_expert, save_uneven
from tests.megatron.forced_routing import ForcedModel, with_random_experts
from tests.megatron.gradients import assert_gradients_agree
from tests.megatron.policies import recomputing, settings_of
from tests.megatron.ranks import RankPool

LENGTHS = [(4, 9), (1, 3), (6, 9), (2, 1), (5, 14), (3, 9), (4, 26)]
"""(prompt, response) lengths."""
CAPACITY, SCORE_CAPACITY = Capacity(max_tokens=34), Capacity(max_tokens=50)
"""Capacities for training and scoring, which pack the samples differently."""
LOSS = LossSettings(loss_type="sft_loss")
LAYOUTS = {
    "one": Layout(),
    "tp2 sp": Layout(tp=2, sequence_parallel=True, num_ranks=2),
    "cp2": Layout(cp=2, num_ranks=2),
    "pp2": Layout(pp=2, num_ranks=2),
    "pp2 vpp2": Layout(pp=2, vpp=2, num_ranks=2),
    "ep2": Layout(ep=2, num_ranks=2),
    "tp2 sp cp2": Layout(tp=2, cp=2, sequence_parallel=True, num_ranks=4),
    "ep2 pp2": Layout(pp=2, ep=2, num_ranks=4),
}
RECOMPUTED = {
    "": recomputing(),
    "full": recomputing("full", "uniform", 1),
    "block": recomputing("full", "block", 1),
    "selective": recomputing("selective", modules=("moe",)),
}
SLOW = pytest.mark.slow


@pytest.fixture(scope="module")
def checkpoint_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """Save a model of four layers; the first of glm4_moe is dense."""
    made: dict[str, Path] = {}

    def checkpoint(family: str) -> Path:
        if family not in made:
            made[family] = save_uneven(tmp_path_factory.mktemp(family), family, layers=4)
        return made[family]

    return checkpoint


def replay_settings(directory: Path, layout: str, recomputed: str = "", **overrides: object) -> MegatronTrainerSettings:
    given = {
        "capacity": CAPACITY,
        "score_capacity": SCORE_CAPACITY,
        "loss": LOSS,
        "dispatcher": "alltoall",
        "optimizer_place": OptimizerFlags(use_distributed_optimizer=False),
        "parallel": RECOMPUTED[recomputed],
        "pad_multiple_tokens": 16,
        "needs_old_logprobs": True,
        "routing": RoutingShape.read(directory),
    }
    return settings_of(directory, LAYOUTS[layout], **{**given, **overrides})


@dataclass(slots=True)
class Course:
    """Results of a worker's course."""

    scored: list[TrainSample]
    gradients: dict[str, Tensor]
    metrics: dict[str, float]


def course(world: World, settings: MegatronTrainerSettings, samples: list[TrainSample]) -> Course | None:
    """Score, compute gradients, then take a step; on rank 0."""
    from fuligo.trainer.megatron_backend.worker import MegatronRankWorker

    worker = MegatronRankWorker(settings, world)
    everywhere = [shares.scored(worker, samples)]
    if world.size > 1:
        dist.broadcast_object_list(everywhere)  # as the driver does
    scored = everywhere[0]
    assert scored is not None
    batch = train_batches.batch(scored)
    worker.gradients(shares.to_train(worker, batch)[0])
    kept = [parameter.data.clone() for chunk in worker.chunks for parameter in chunk.parameters()]
    for chunk in worker.chunks:
        for parameter in chunk.parameters():
            parameter.data.copy_(getattr(parameter, "main_grad"))  # noqa: B009
    gradients = {name: tensor.clone() for name, tensor in worker.named_weights() if not name.endswith("e_score_correction_bias")}
    for parameter, data in zip((p for chunk in worker.chunks for p in chunk.parameters()), kept, strict=True):
        parameter.data.copy_(data)
    metrics = worker.train(shares.to_train(worker, batch)).metrics
    return Course(scored, gradients, metrics) if world.rank == 0 else None


@dataclass(slots=True)
class Expected:
    """Results of transformers for the same samples."""

    logprobs: list[Tensor]
    gradients: dict[str, Tensor]
    chosen: list[Tensor]
    """[T - 1, M, K] experts of each sample."""
    share_changed: float


def expected_of(directory: Path, samples: list[TrainSample]) -> Expected:
    forced, step = ForcedModel(directory), StepSamples.of(train_batches.batch(samples), 0, LOSS)
    logprobs, chosen = [], []
    for sample, weights in zip(step.samples, step.weights, strict=True):
        of_sample = forced.logprobs(sample)
        (-torch.from_numpy(weights) * of_sample).sum().backward()
        logprobs.append(of_sample.detach())
        chosen.append(torch.stack(forced.chosen, dim=1))
    gradients = {name: parameter.grad for name, parameter in forced.model.named_parameters() if parameter.grad is not None}
    num_named = sum(sample.routed_experts.size for sample in samples if sample.routed_experts is not None)
    return Expected(logprobs, expert_by_expert(gradients), chosen, forced.num_changed / max(num_named, 1))


def run(pool: RankPool, settings: MegatronTrainerSettings, samples: list[TrainSample]) -> Course:
    result, *_ = pool.run(settings.num_ranks, course, settings, samples)
    assert result is not None
    return result


@pytest.mark.parametrize(
    ("family", "layout", "recomputed"),
    [
        ("qwen3_moe", "one", "full"),
        ("qwen3_moe", "pp2 vpp2", "selective"),
        ("qwen3_moe", "ep2", ""),
        ("glm4_moe", "tp2 sp", ""),
        ("glm4_moe", "cp2", "full"),
        ("glm4_moe", "pp2", "block"),
        *(
            pytest.param(family, layout, recomputed, marks=SLOW)
            for family in ("qwen3_moe", "glm4_moe")
            for layout in LAYOUTS
            for recomputed in RECOMPUTED
        ),
    ],
)
def test_tokens_go_where_samples_say(pool: RankPool, checkpoint_of, family: str, layout: str, recomputed: str) -> None:
    """Checks old log-probabilities, gradients (including the routers') and the share of changed choices; the model routes other tokens."""
    directory = checkpoint_of(family)
    settings = replay_settings(directory, layout, recomputed)
    samples = with_random_experts(train_batches.samples(LENGTHS), RoutingShape.read(directory))
    got, expected = run(pool, settings, samples), expected_of(directory, samples)
    for sample, logprobs in zip(got.scored, expected.logprobs, strict=True):
        assert sample.old_logprobs is not None
        torch.testing.assert_close(torch.from_numpy(sample.old_logprobs), logprobs, atol=1e-4, rtol=0)
    assert_gradients_agree(got.gradients, expected.gradients)
    assert got.metrics["train/routing_replay_changed"] == pytest.approx(expected.share_changed)
    assert expected.share_changed > 0.3


@pytest.mark.parametrize(
    ("family", "layout", "recomputed"),
    [
        ("glm4_moe", "one", "full"),
        ("qwen3_moe", "tp2 sp", ""),
        ("glm4_moe", "pp2 vpp2", ""),
        *(pytest.param("glm4_moe", layout, "selective", marks=SLOW) for layout in LAYOUTS),
    ],
)
def test_a_replay_of_the_own_choice_changes_nothing(pool: RankPool, checkpoint_of, family: str, layout: str, recomputed: str) -> None:
    """`score` records the choice of transformers' routers for every token and layer; training then changes none."""
    directory, samples = checkpoint_of(family), train_batches.samples(LENGTHS)
    replayed = run(pool, replay_settings(directory, layout, recomputed, records_routing=True), samples)
    free = run(pool, replay_settings(directory, layout, recomputed, routing=None), samples)
    for sample, chosen in zip(replayed.scored, expected_of(directory, samples).chosen, strict=True):
        assert sample.routed_experts is not None and sample.routed_experts.dtype == np.uint8
        assert np.array_equal(np.sort(sample.routed_experts), chosen.sort().values.numpy())
    assert replayed.gradients.keys() == free.gradients.keys()
    for name, gradient in free.gradients.items():
        assert torch.equal(replayed.gradients[name], gradient), name
    assert replayed.metrics["train/routing_replay_changed"] == 0
    assert "train/routing_replay_changed" not in free.metrics


def second_step(world: World, settings: MegatronTrainerSettings, samples: list[TrainSample]) -> list[float] | None:
    """Return the share of changed choices in each of two steps on rank 0; the first step moves the weights far."""
    from fuligo.trainer.megatron_backend.worker import MegatronRankWorker

    worker = MegatronRankWorker(settings, world)
    scored = shares.scored(worker, samples)
    assert scored is not None
    steps = shares.to_train(worker, train_batches.batch(scored))
    return [worker.train(steps).metrics["train/routing_replay_changed"] for _ in range(2)]


def test_later_steps_keep_to_what_was_chosen_before_the_first(pool: RankPool, checkpoint_of) -> None:
    directory = checkpoint_of("qwen3_moe")
    optimizer = settings_of(directory, Layout()).optimizer
    fast = replace(optimizer, schedule=replace(optimizer.schedule, peak=0.1))
    settings = replay_settings(directory, "one", records_routing=True, optimizer=fast)
    (changed,) = pool.run(1, second_step, settings, train_batches.samples(LENGTHS))
    assert changed is not None and changed[0] == 0 and changed[1] > 0.05


def reference_alone(world: World, settings: MegatronTrainerSettings, samples: list[TrainSample]) -> list[TrainSample] | None:
    from fuligo.trainer.megatron_backend.worker import MegatronRankWorker

    return shares.scored(MegatronRankWorker(settings, world), samples)


def test_nothing_is_recorded_where_the_old_log_probabilities_are_the_steps_own(pool: RankPool, checkpoint_of) -> None:
    directory = checkpoint_of("qwen3_moe")
    settings = replay_settings(directory, "one", records_routing=True, needs_old_logprobs=False, reference_weights=directory)
    (scored,) = pool.run(1, reference_alone, settings, train_batches.samples(LENGTHS))
    assert scored is not None
    assert all(sample.ref_logprobs is not None for sample in scored)
    assert all(sample.old_logprobs is sample.routed_experts is None for sample in scored)


def wrong_shape(world: World, settings: MegatronTrainerSettings, batch: TrainBatch) -> str:
    from fuligo.trainer.megatron_backend.worker import MegatronRankWorker

    worker = MegatronRankWorker(settings, world)
    with pytest.raises(TrainerError) as raised:
        worker.gradients(shares.to_train(worker, batch)[0])
    return str(raised.value)


def test_experts_of_another_model_are_refused(pool: RankPool, checkpoint_of) -> None:
    directory = checkpoint_of("glm4_moe")
    samples = train_batches.samples(LENGTHS)
    samples[0] = replace(samples[0], routed_experts=np.zeros((12, 4, 3), np.uint8))
    (message,) = pool.run(1, wrong_shape, replay_settings(directory, "one"), train_batches.batch(samples))
    assert "sample 0: routed_experts has the shape [12, 4, 3]; it must be [at most 12 tokens, 3 layers, 3 experts per token]" in message


def test_padding_and_a_repetition_are_sent_nowhere(checkpoint_of) -> None:
    """Otherwise a repetition would count as changed choices, although it is not trained on."""
    from fuligo.trainer.megatron_backend.packed import pack_row
    from fuligo.trainer.megatron_backend.routing_replay import UNKNOWN, row_choices

    shape = RoutingShape.read(checkpoint_of("glm4_moe"))
    samples = with_random_experts(train_batches.samples(LENGTHS), shape)[2:5]
    tokens, layers = pack_tokens(samples, torch.device("cpu")), [0, 2]
    for counts in (True, False):
        row = pack_row(tokens, Layout(), 0, pad_multiple=64, counts=counts)
        choices, is_told = row_choices(row, tokens, samples, layers, shape), (row.source >= 0) & counts
        assert row.num_tokens > tokens.num_tokens
        expected = np.concatenate([sample.routed_experts[:, layers] for sample in samples if sample.routed_experts is not None])
        assert np.array_equal(choices[is_told].numpy(), expected[: int(is_told.sum())])
        assert (choices[~is_told] == UNKNOWN).all()
