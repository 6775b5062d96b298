"""A step of the Megatron trainer with shared prefixes equals its step without them, in every layout."""

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch.distributed as dist
from torch import Tensor

from fuligo.algorithms.estimators import ESTIMATORS
from fuligo.algorithms.off_policy import Correction
from fuligo.config.groups import OptimizerFlags, ParallelFlags
from fuligo.formats.adapter_config import AdapterConfig
from fuligo.layout.megatron import Layout
from fuligo.models.routing import RoutingShape
from fuligo.trainer.megatron_backend.settings import MegatronTrainerSettings
from fuligo.trainer.objective import KlLoss, LossSettings
from fuligo.trainer.packing import Capacity
from fuligo.trainer.ranks.settings import CriticSettings, LearningRateSchedule, LoraSettings, OptimizerSettings
from fuligo.trainer.ranks.world import World
from fuligo.types import TrainBatch, TrainSample
from tests import shares, tiny, train_batches
from tests.megatron.checkpoints import save_uneven
from tests.megatron.forced_routing import with_random_experts
from tests.megatron.policies import mtp_flags, recomputing, settings_of
from tests.megatron.prediction_fixture import PredictingModel
from tests.megatron.ranks import RankPool
from tests.prefix_trees import tree_samples

CAPACITY = Capacity(max_tokens=110)
LAYOUTS = {
    "one": Layout(),
    "tp2": Layout(tp=2, num_ranks=2),
    "tp2 sp": Layout(tp=2, sequence_parallel=True, num_ranks=2),
    "pp2": Layout(pp=2, num_ranks=2),
    "pp2 vpp2": Layout(pp=2, vpp=2, num_ranks=2),
    "cp2": Layout(cp=2, num_ranks=2),
    "dp2": Layout(num_ranks=2),
    "ep2": Layout(ep=2, num_ranks=2),
    "cp4": Layout(cp=4, num_ranks=4),
    "cp2 dp2": Layout(cp=2, num_ranks=4),
    "ep2 pp2": Layout(pp=2, ep=2, num_ranks=4),
    "tp2 sp cp2": Layout(tp=2, cp=2, sequence_parallel=True, num_ranks=4),
}
LOSSES = {
    **{name: LossSettings(estimator=name) for name in ESTIMATORS},
    "all terms": LossSettings(
        entropy_coef=0.01, kl_loss=KlLoss(0.1, "low_var_kl"), correction=Correction("truncate", 0.0, 2.0), opsm_delta=0.01
    ),
    "per token": LossSettings(per_token=True),
    "sft": LossSettings(loss_type="sft_loss"),
}
OPTIMIZER = OptimizerSettings(LearningRateSchedule(peak=1e-3), clip_grad=0.0)
SLOW = pytest.mark.slow


@dataclass(slots=True)
class Course:
    """Results of scoring samples and of the passes of a step."""

    scored: list[TrainSample]
    gradients: dict[str, Tensor]
    metrics: dict[str, float]


def course(world: World, settings: MegatronTrainerSettings, samples: list[TrainSample]) -> Course | None:
    """Score, compute gradients, then take a step; return the results on rank 0."""
    from fuligo.trainer.megatron_backend.worker import MegatronRankWorker

    worker = MegatronRankWorker(settings, world)
    everywhere: list[Any] = [shares.scored(worker, samples)]
    if world.size > 1:
        dist.broadcast_object_list(everywhere)  # as the driver does
    batch = batch_of(everywhere[0])
    worker.gradients(shares.to_train(worker, batch)[0])
    parameters = [parameter for chunk in worker.chunks for parameter in chunk.parameters()]
    kept = [parameter.data.clone() for parameter in parameters]
    for parameter in parameters:
        parameter.data.copy_(getattr(parameter, "main_grad", 0 * parameter.data))
    gradients = {name: tensor.clone() for name, tensor in worker.named_weights() if not name.endswith("e_score_correction_bias")}
    for parameter, data in zip(parameters, kept, strict=True):
        parameter.data.copy_(data)
    metrics = worker.train(shares.to_train(worker, batch)).metrics
    return Course(everywhere[0], gradients, metrics) if world.rank == 0 else None


def batch_of(scored: list[TrainSample]) -> TrainBatch:
    """Return a batch with ratios and values on both sides of their clips."""
    if scored[0].old_logprobs is not None:
        scored = train_batches.with_old_logprobs(scored, noise=0.3, logprobs=[s.old_logprobs for s in scored if s.old_logprobs is not None])
    if scored[0].values is not None:
        scored = train_batches.with_returns(scored, noise=0.3)
    return train_batches.batch(scored)


def settings_for(directory: Path, layout: str, **overrides: Any) -> MegatronTrainerSettings:
    given = {
        "capacity": CAPACITY,
        "score_capacity": Capacity(max_tokens=150),
        "dispatcher": "alltoall",
        "optimizer_place": OptimizerFlags(use_distributed_optimizer=False),
        "needs_old_logprobs": True,
        "pad_multiple_tokens": 8,
        "optimizer": OPTIMIZER,
    }
    return settings_of(directory, LAYOUTS[layout], **{**given, **overrides})


def assert_the_same_course(
    pool: RankPool, settings: MegatronTrainerSettings, samples: Sequence[TrainSample] = (), *, noise: float = 2e-6
) -> tuple[Course, Course]:
    """Compare a step with and without shared prefixes; `noise` is that of float32 sums, relative to the largest gradient."""
    of = list(samples or tree_samples())
    shared, *_ = pool.run(settings.num_ranks, course, replace(settings, shares_prefixes=True), of)
    plain, *_ = pool.run(settings.num_ranks, course, settings, of)
    assert shared is not None and plain is not None
    for mine, reference in zip(shared.scored, plain.scored, strict=True):
        for name in ("old_logprobs", "ref_logprobs", "teacher_logprobs", "values"):
            got, want = getattr(mine, name), getattr(reference, name)
            assert (got is None) == (want is None)
            if want is not None:
                np.testing.assert_allclose(got, want, rtol=1e-6, atol=2e-6)
    assert shared.gradients.keys() == plain.gradients.keys()
    largest = max(gradient.abs().max() for gradient in plain.gradients.values())
    assert largest > 0
    differences = {name: float((shared.gradients[name] - plain.gradients[name]).abs().max() / largest) for name in plain.gradients}
    assert max(differences.values()) <= noise, {name: value for name, value in differences.items() if value > noise}
    assert shared.metrics.pop("train/shared_prefix_share") > 0.1
    own = {"train/tokens_per_s", "train/num_micro_batches"}
    assert shared.metrics.keys() == plain.metrics.keys()
    for name in plain.metrics.keys() - own:
        assert shared.metrics[name] == pytest.approx(plain.metrics[name], rel=1e-5, abs=1e-6), name
    return shared, plain


def num_layers(layout: str) -> int:
    """Return the layers of a model: two, or one for each of two chunks of two stages."""
    return 4 if "vpp2" in layout else 2


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, int], Path]:
    """Save each model once."""

    @functools.cache
    def save(family: str, layers: int) -> Path:
        save = tiny.save_checkpoint if family == "qwen3" else save_uneven
        return save(tmp_path_factory.mktemp(family), family, layers=layers)

    return save


@pytest.fixture
def layers(request: pytest.FixtureRequest) -> int:
    return num_layers(request.node.callspec.params.get("layout", "one") if hasattr(request.node, "callspec") else "one")


@pytest.fixture
def checkpoint(saved: Callable[[str, int], Path], layers: int) -> Path:
    return saved("qwen3", layers)


@pytest.fixture
def mixture(saved: Callable[[str, int], Path], layers: int) -> Callable[[str], Path]:
    return lambda family: saved(family, layers)


@pytest.mark.parametrize(
    ("layout", "loss"),
    [
        pytest.param("tp2 sp", "all terms", marks=SLOW),  # "tp2 sp cp2" below
        ("pp2 vpp2", "per token"),
        ("cp2", "all terms"),
        ("dp2", "gspo"),
        ("tp2 sp cp2", "per token"),
        *(pytest.param(layout, "all terms", marks=SLOW) for layout in ("one", "tp2", "pp2", "cp4", "cp2 dp2")),
        *(pytest.param("one", loss, marks=SLOW) for loss in LOSSES),  # the losses themselves do not know of rows: test_shared_gradients
    ],
)
def test_scores_gradients_and_metrics_are_those_of_the_samples_laid_end_to_end(
    pool: RankPool, checkpoint: Path, layers: int, tmp_path: Path, layout: str, loss: str
) -> None:
    reference = tiny.save_checkpoint(tmp_path, "qwen3", seed=5, layers=layers)
    assert_the_same_course(
        pool, settings_for(checkpoint, layout, loss=LOSSES[loss], reference_weights=reference, teacher_weights=reference)
    )


@pytest.mark.parametrize("layout", ["cp2", pytest.param("tp2 sp", marks=SLOW)])
def test_values_are_those_of_the_samples_laid_end_to_end(pool: RankPool, checkpoint: Path, layout: str) -> None:
    critic = CriticSettings(checkpoint, OPTIMIZER)
    assert_the_same_course(pool, settings_for(checkpoint, layout, loss=LOSSES["ppo"], critic=critic))


@pytest.mark.parametrize("recomputation", [recomputing("full", "uniform", 1), recomputing("selective", modules=("core_attn",))], ids=str)
def test_recomputed_layers_see_the_tree_again(pool: RankPool, checkpoint: Path, recomputation: ParallelFlags) -> None:
    assert_the_same_course(pool, settings_for(checkpoint, "one", parallel=recomputation))


@pytest.mark.parametrize("layout", ["cp2", pytest.param("tp2 sp", marks=SLOW), pytest.param("one", marks=SLOW)])
def test_latent_attention_rotates_by_the_positions_of_samples(pool: RankPool, mixture, layout: str) -> None:
    assert_the_same_course(pool, settings_for(mixture("glm4_moe_lite"), layout), noise=1e-5)


@pytest.mark.parametrize("layout", ["cp2", pytest.param("pp2", marks=SLOW), pytest.param("tp2 sp", marks=SLOW)])
def test_mtp_layers_see_the_followers_of_each_sample(pool: RankPool, layers: int, tmp_path: Path, layout: str) -> None:
    directory = PredictingModel.random("mimo", num_predictions=2, layers=layers).save(tmp_path)
    settings = settings_for(directory, layout, loss=LOSSES["sft"], mtp=mtp_flags(2, trained=True, loss_scale=0.3, joint=True))
    shared, _ = assert_the_same_course(pool, settings)
    assert shared.metrics["train/mtp_loss"] > 0


def test_an_adapter_learns_what_it_would_have(pool: RankPool, checkpoint: Path) -> None:
    lora = LoraSettings(AdapterConfig(rank=4, alpha=8.0), is_merged=True)
    settings = settings_for(checkpoint, "tp2 sp", lora=lora, reference_weights=checkpoint, loss=LOSSES["all terms"])
    (mine, _), (reference, _) = (
        pool.run(2, trained, replace(settings, shares_prefixes=shares_prefixes), tree_samples()) for shares_prefixes in (True, False)
    )
    for name in ("train/loss", "train/kl", "train/grad_norm"):
        assert mine[0][name] == pytest.approx(reference[0][name], rel=1e-5, abs=1e-6), name
    for name, weight in reference[1].items():
        assert (mine[1][name] - weight).abs().max() <= 1e-6, name
    for got, want in zip(mine[2], reference[2], strict=True):
        np.testing.assert_allclose(got, want, rtol=1e-6, atol=2e-6)


def trained(
    world: World, settings: MegatronTrainerSettings, samples: list[TrainSample]
) -> tuple[dict[str, float], dict[str, Tensor], list[Any]]:
    """Return the metrics of two steps, the weights after them, and the reference's log-probabilities."""
    from fuligo.trainer.megatron_backend.worker import MegatronRankWorker

    smooth = replace(settings, optimizer=replace(OPTIMIZER, eps=1e-3))  # with a usual epsilon, steps are little more than signs
    worker = MegatronRankWorker(smooth, world)
    everywhere: list[Any] = [shares.scored(worker, samples)]
    dist.broadcast_object_list(everywhere)
    metrics = worker.train(shares.to_train(worker, train_batches.batch(everywhere[0], num_steps=2))).metrics
    weights = {name: tensor.clone() for name, tensor in worker.named_weights()}
    return metrics, weights, [sample.ref_logprobs for sample in everywhere[0]]


@pytest.mark.parametrize(
    ("kind", "layout", "dispatcher"),
    [
        ("seq_aux_loss", "ep2 pp2", "allgather"),
        ("seq_aux_loss", "cp2", "alltoall"),
        ("aux_loss", "tp2 sp", "alltoall"),  # one row in either way: this loss is that of a row
        *(pytest.param("seq_aux_loss", layout, "alltoall", marks=SLOW) for layout in ("one", "tp2 sp cp2", "pp2 vpp2", "ep2")),
    ],
)
def test_balancing_counts_a_shared_token_once_for_each_sample(pool: RankPool, mixture, kind: str, layout: str, dispatcher: str) -> None:
    settings = settings_for(mixture("glm4_moe"), layout, dispatcher=dispatcher, capacity=Capacity())
    flags = {"moe_router_load_balancing_type": kind, "moe_aux_loss_coeff": 0.3}
    shared, _ = assert_the_same_course(pool, replace(settings, model_flags={**settings.model_flags, **flags}), noise=1e-5)
    assert shared.metrics["train/moe_balance_loss"] > 0


@pytest.mark.parametrize("layout", ["tp2 sp", pytest.param("ep2", marks=SLOW), pytest.param("cp2", marks=SLOW)])
def test_corrections_move_as_if_every_sample_had_its_own_prefix(pool: RankPool, mixture, layout: str) -> None:
    settings = settings_for(mixture("glm4_moe"), layout)
    settings = replace(settings, model_flags={**settings.model_flags, "moe_router_bias_update_rate": 0.1})
    samples = tree_samples()
    counts = [
        pool.run(settings.num_ranks, expert_counts, replace(settings, shares_prefixes=shares_prefixes), train_batches.batch(samples))
        for shares_prefixes in (True, False)
    ]
    assert counts[0] == counts[1]


def expert_counts(world: World, settings: MegatronTrainerSettings, batch: TrainBatch) -> list[list[float]]:
    """Return the tokens of each expert, layer by layer, of all ranks."""
    from fuligo.trainer.megatron_backend.router import routers
    from fuligo.trainer.megatron_backend.worker import MegatronRankWorker

    worker = MegatronRankWorker(settings, world)
    worker.gradients(shares.to_train(worker, batch)[0])
    found: list[Any] = [router.local_tokens_per_expert for router in routers(worker.chunks)]
    for counts in found:
        dist.all_reduce(counts)
    return [counts.tolist() for counts in found]


@pytest.mark.parametrize("layout", ["tp2 sp", "cp2", pytest.param("ep2 pp2", marks=SLOW)])
def test_replayed_experts_are_shared_where_samples_name_the_same(pool: RankPool, mixture, layout: str) -> None:
    directory = mixture("glm4_moe")
    shape = RoutingShape.read(directory)
    named = with_random_experts(tree_samples(), shape)
    for i, (like, num_same) in {3: (2, 22), 5: (4, 40), 6: (4, 40), 7: (4, 30)}.items():  # of the same prompt
        first, own = named[like].routed_experts, named[i].routed_experts
        assert first is not None and own is not None
        named[i] = replace(named[i], routed_experts=np.concatenate([first[:num_same], own[num_same:]]))
    settings = settings_for(directory, layout, routing=shape, loss=LOSSES["sft"])
    found = replace(settings, shares_prefixes=True).shared_prefixes(named)
    assert found is not None and any(found.shared)
    for (before, i), shared in zip(zip([found.order[0], *found.order], found.order), found.shared):
        first, own = named[before].routed_experts, named[i].routed_experts
        if shared and first is not None and own is not None:
            num = min(len(first), len(own), shared)
            assert (first[:num] == own[:num]).all()
    shared, plain = assert_the_same_course(pool, settings, named, noise=1e-5)
    assert plain.metrics["train/routing_replay_changed"] > 0.3
    assert shared.metrics["train/routing_replay_changed"] == pytest.approx(plain.metrics["train/routing_replay_changed"])


@pytest.mark.parametrize("layout", ["tp2 sp cp2", pytest.param("pp2 vpp2", marks=SLOW)])
def test_recorded_experts_are_those_of_each_sample(pool: RankPool, mixture, layout: str) -> None:
    directory = mixture("qwen3_moe")
    settings = settings_for(directory, layout, routing=RoutingShape.read(directory), records_routing=True)
    shared, plain = assert_the_same_course(pool, settings, noise=1e-5)
    for mine, reference in zip(shared.scored, plain.scored, strict=True):
        assert mine.routed_experts is not None and reference.routed_experts is not None
        assert np.array_equal(np.sort(mine.routed_experts), np.sort(reference.routed_experts))
    assert shared.metrics["train/routing_replay_changed"] == 0
