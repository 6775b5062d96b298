"""The value model of the Megatron trainer against the torch trainer's on the same weights, and its checkpoints across layouts."""

import shutil
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from transformers import AutoModelForTokenClassification

from fuligo.algorithms.assign import assign_advantages
from fuligo.algorithms.settings import AdvantageSettings
from fuligo.cli.convert import main as convert
from fuligo.config.groups import OptimizerFlags
from fuligo.errors import CheckpointError
from fuligo.layout.megatron import Layout
from fuligo.trainer.megatron_backend.settings import MegatronTrainerSettings
from fuligo.trainer.ranks.rank import build_worker
from fuligo.trainer.ranks.settings import CriticSettings, TrainerSettings
from fuligo.trainer.ranks.world import World
from fuligo.trainer.torch_backend.worker import TorchRankWorker
from fuligo.types import StepResult, TrainBatch, TrainSample
from tests import shares, tiny, train_batches
from tests.megatron.checkpoints import expert_by_expert, save_uneven
from tests.megatron.policies import settings_of
from tests.megatron.providers import EPSILON
from tests.megatron.ranks import RankPool
from tests.megatron.test_training import ADAM, CAPACITY, LAYOUTS, LENGTHS, OVERLAP, assert_equal_gradients, torch_settings

LIMITS: dict[str, Any] = {"capacity": CAPACITY, "score_capacity": CAPACITY}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a policy with tied embedding and output layer, unlike a value model."""
    return tiny.save_checkpoint(tmp_path_factory.mktemp("qwen3"), "qwen3", layers=4, tie_word_embeddings=True)


@pytest.fixture(scope="module")
def critic(tmp_path_factory: pytest.TempPathFactory) -> CriticSettings:
    """Save a value model whose head is not zero."""
    directory = tiny.save_value_model(tmp_path_factory.mktemp("values"), "qwen3", layers=4, seed=2, tie_word_embeddings=True)
    return CriticSettings(directory, ADAM)


@pytest.fixture(scope="module")
def batch(checkpoint: Path, critic: CriticSettings) -> TrainBatch:
    """Return a batch with values and returns on both sides of the clip."""
    samples = shares.scored(TorchRankWorker(torch_settings(checkpoint, critic=critic), World()), train_batches.samples(LENGTHS))
    assert samples is not None
    return train_batches.batch(train_batches.with_returns(samples, noise=0.2))


def weights_of(worker: Any) -> dict[str, Tensor]:
    """Return the value model's weights of either trainer by Hugging Face name, on all ranks."""
    if isinstance(worker, TorchRankWorker):
        assert worker.critic is not None
        return {name: tensor.clone() for name, tensor in worker.critic.value_model.model.state_dict().items()}
    from fuligo.trainer.megatron_backend.weights.export import named_weights

    critic = worker.critic
    return {name: tensor.clone() for name, tensor in named_weights(critic.learner.chunks, critic.names, dtype=torch.float32)}


def torch_gradients(settings: TrainerSettings, batch: TrainBatch) -> dict[str, Tensor]:
    worker = TorchRankWorker(settings, World())
    assert worker.critic is not None
    worker.critic.gradients(shares.to_train(worker, batch)[0])
    return {name: p.grad for name, p in worker.critic.value_model.model.named_parameters() if p.grad is not None}


def megatron_gradients(world: World, settings: MegatronTrainerSettings, batch: TrainBatch) -> dict[str, Tensor] | None:
    """Return the gradients of the whole value model by Hugging Face name on rank 0."""
    from fuligo.trainer.megatron_backend.worker import MegatronRankWorker

    worker = MegatronRankWorker(settings, world)
    assert worker.critic is not None
    worker.critic.gradients(shares.to_train(worker, batch)[0])
    for chunk in worker.critic.learner.chunks:
        for parameter in chunk.parameters():
            parameter.data.copy_(parameter.main_grad)
    gradients = weights_of(worker)
    return gradients if world.rank == 0 else None


@pytest.mark.parametrize(
    "layout",
    [
        "tp2 sp",
        "pp2 vpp2",
        # the two above split the head and the stages
        *(
            pytest.param(layout, marks=pytest.mark.slow)
            for layout in ("tp2 pp2", "one", "tp2", "cp2", "dp2", "cp2 dp2", "tp2 sp cp2", "pp3 uneven")
        ),
    ],
)
def test_gradients_are_those_of_the_torch_trainer(
    pool: RankPool, checkpoint: Path, critic: CriticSettings, batch: TrainBatch, layout: str
) -> None:
    place = OptimizerFlags(use_distributed_optimizer=False)
    settings = settings_of(checkpoint, LAYOUTS[layout], **LIMITS, critic=critic, optimizer_place=place)
    got, *_ = pool.run(LAYOUTS[layout].num_ranks, megatron_gradients, settings, batch)
    assert_equal_gradients(got, torch_gradients(torch_settings(checkpoint, critic=critic), batch))


def mixture_gradients(world: World, settings: MegatronTrainerSettings, batch: TrainBatch) -> dict[str, Tensor] | None:
    gradients = megatron_gradients(world, settings, batch)
    return gradients and {name: tensor for name, tensor in gradients.items() if not name.endswith("e_score_correction_bias")}


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("glm4_moe", Layout(ep=2, num_ranks=2)),
        pytest.param("qwen3_moe", Layout(tp=2, ep=2, sequence_parallel=True, num_ranks=4), marks=pytest.mark.slow),
        pytest.param("glm4_moe", Layout(pp=2, ep=2, num_ranks=4), marks=pytest.mark.slow),
        pytest.param("glm4_moe_lite", Layout(tp=2, sequence_parallel=True, num_ranks=2), marks=pytest.mark.slow),
    ],
)
def test_values_of_a_mixture_begin_where_the_torch_trainer_stopped(pool: RankPool, tmp_path: Path, family: str, layout: Layout) -> None:
    """Megatron reads and trains the torch trainer's value model, whose experts are in one tensor."""
    directory = save_uneven(tmp_path / "model", family)
    tiny.tokenizer().save_pretrained(directory)
    begun = TorchRankWorker(torch_settings(directory, critic=CriticSettings(directory, ADAM)), World())
    samples = shares.scored(begun, train_batches.samples(LENGTHS))
    assert samples is not None
    begun.train(shares.to_train(begun, train_batches.batch(train_batches.with_returns(samples, noise=0.2))))
    begun.save(tmp_path / "saved")
    critic = CriticSettings(tmp_path / "saved" / "critic", ADAM)
    batch = train_batches.batch(train_batches.with_returns(shares.scored(begun, samples) or [], noise=0.2))
    settings = settings_of(
        directory, layout, **LIMITS, critic=critic, dispatcher="alltoall", optimizer_place=OptimizerFlags(use_distributed_optimizer=False)
    )
    got, *_ = pool.run(layout.num_ranks, mixture_gradients, settings, batch)
    assert_equal_gradients(got, expert_by_expert(torch_gradients(torch_settings(directory, critic=critic), batch)))


@dataclass(slots=True)
class Course:
    """Results of a worker's course."""

    scored: list[TrainSample]
    result: StepResult
    weights: dict[str, Tensor]
    scored_after: list[TrainSample]


def course(
    world: World, settings: TrainerSettings, load: Path | None = None, save: Path | None = None, build: Callable[..., Any] = build_worker
) -> Course | None:
    """Score, train for three optimizer steps of PPO, score again; return the results on rank 0."""
    worker = build(settings, world)
    if load is not None:
        worker.restore(load)
    samples = train_batches.samples(LENGTHS)
    everywhere: list[Any] = [shares.scored(worker, samples)]
    if world.size > 1:
        dist.broadcast_object_list(everywhere)  # as the driver does
    scored = [replace(sample) for sample in everywhere[0]]
    batch = assign_advantages(everywhere[0], AdvantageSettings(samples_per_step=3, num_steps=3, estimator="ppo", lambd=0.9))
    result = worker.train(shares.to_train(worker, batch))
    if save is not None:
        worker.begin_save(save).result(timeout=120)
    weights, scored_after = weights_of(worker), shares.scored(worker, samples)
    return None if scored_after is None else Course(scored, result, weights, scored_after)


def assert_equal_courses(got: Course | None, want: Course | None) -> None:
    assert got is not None and want is not None
    for before, expected in ((got.scored, want.scored), (got.scored_after, want.scored_after)):
        for ours, theirs in zip(before, expected, strict=True):
            assert ours.values is not None and theirs.values is not None
            np.testing.assert_allclose(ours.values, theirs.values, atol=1e-4)
    assert got.result.num_tokens == want.result.num_tokens
    assert got.result.scores.keys() == want.result.scores.keys()
    assert got.result.metrics.keys() == want.result.metrics.keys()
    for name in want.result.metrics.keys() - {"train/tokens_per_s", "train/num_micro_batches"}:
        assert got.result.metrics[name] == pytest.approx(want.result.metrics[name], rel=1e-4, abs=1e-6), name
    assert got.weights.keys() == want.weights.keys()
    for name, weight in want.weights.items():
        torch.testing.assert_close(got.weights[name], weight, atol=2e-5, rtol=0, msg=name)


@pytest.mark.parametrize(
    ("layout", "flags"),
    [
        ("cp2 dp2", OVERLAP),
        pytest.param("tp2 sp cp2", {}, marks=pytest.mark.slow),
        pytest.param("pp2 dp2", OVERLAP, marks=pytest.mark.slow),
    ],
)
def test_scores_and_steps_are_those_of_the_torch_trainer(
    pool: RankPool, checkpoint: Path, critic: CriticSettings, layout: str, flags: dict[str, Any]
) -> None:
    settings = settings_of(checkpoint, LAYOUTS[layout], flags=flags, **LIMITS, critic=critic, optimizer=ADAM)
    got, *_ = pool.run(LAYOUTS[layout].num_ranks, course, settings)
    assert_equal_courses(got, course(World(), torch_settings(checkpoint, critic=critic, optimizer=ADAM)))


def test_it_starts_as_the_policy_with_a_zero_head_and_at_first_only_it_learns(pool: RankPool, checkpoint: Path) -> None:
    critic = CriticSettings(checkpoint, ADAM, num_only_rollouts=1)
    got, *_ = pool.run(2, course, settings_of(checkpoint, LAYOUTS["tp2"], **LIMITS, critic=critic, optimizer=ADAM))
    assert_equal_courses(got, course(World(), torch_settings(checkpoint, critic=critic, optimizer=ADAM)))
    assert got is not None
    assert not any(sample.values is None or sample.values.any() for sample in got.scored)
    assert "train/value_loss" in got.result.metrics and "train/loss" not in got.result.metrics


@pytest.fixture(scope="module")
def saved(pool: RankPool, checkpoint: Path, critic: CriticSettings, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a checkpoint after a rollout on one rank."""
    save = tmp_path_factory.mktemp("saved") / "iter_0000001"
    pool.run(1, course, settings_of(checkpoint, Layout(), **LIMITS, critic=critic, optimizer=ADAM), save=save)
    return save


@pytest.mark.parametrize(
    "layout", ["tp2 pp2", pytest.param("pp2 vpp2", marks=pytest.mark.slow), pytest.param("dp2", marks=pytest.mark.slow)]
)
def test_it_resumes_under_another_layout(pool: RankPool, checkpoint: Path, critic: CriticSettings, saved: Path, layout: str) -> None:
    settings = settings_of(checkpoint, Layout(), **LIMITS, critic=critic, optimizer=ADAM)
    (want,) = pool.run(1, course, settings, load=saved)
    other = settings_of(checkpoint, LAYOUTS[layout], **LIMITS, critic=critic, optimizer=ADAM)
    got, *_ = pool.run(LAYOUTS[layout].num_ranks, course, other, load=saved)
    assert_equal_courses(got, want)


def first_values(world: World, settings: MegatronTrainerSettings, load: Path | None = None) -> list[np.ndarray] | str | None:
    """Return the values of some samples on rank 0, or the error."""
    worker: Any = build_worker(settings, world)
    try:
        if load is not None:
            worker.restore(load)
    except CheckpointError as error:
        return str(error)
    scored = shares.scored(worker, train_batches.samples(LENGTHS))
    return None if scored is None else [sample.values for sample in scored if sample.values is not None]


def test_a_saved_value_model_is_where_another_begins(pool: RankPool, checkpoint: Path, critic: CriticSettings, saved: Path) -> None:
    settings = settings_of(checkpoint, LAYOUTS["tp2"], **LIMITS, critic=critic, optimizer=ADAM)
    resumed, _ = pool.run(2, first_values, settings, load=saved)
    begun, _ = pool.run(2, first_values, replace(settings, critic=replace(critic, initial_weights=saved / "critic")))
    as_policy, _ = pool.run(2, first_values, replace(settings, critic=replace(critic, initial_weights=saved)))
    assert isinstance(resumed, list) and isinstance(begun, list) and isinstance(as_policy, list)
    for ours, theirs, without_head in zip(begun, resumed, as_policy, strict=True):
        np.testing.assert_array_equal(ours, theirs)
        assert ours.any() and not without_head.any()


def test_transformers_and_the_torch_trainer_take_what_was_saved(
    pool: RankPool, checkpoint: Path, critic: CriticSettings, saved: Path, tmp_path: Path
) -> None:
    """transformers loads it as a token classifier, the torch trainer as its value model."""
    (want,) = pool.run(1, first_values, settings_of(checkpoint, Layout(), **LIMITS, critic=critic, optimizer=ADAM), load=saved)
    classifier, own = tmp_path / "classifier", tmp_path / "own"
    assert convert(["value-to-hf", str(saved), "--save", str(classifier)]) == 0
    assert convert(["dist-to-hf", str(saved / "critic"), "--save", str(own)]) == 0
    assert convert(["compare", str(saved / "critic"), str(own)]) == 0
    model, loading = AutoModelForTokenClassification.from_pretrained(classifier, output_loading_info=True)
    assert not any(loading[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    samples = train_batches.samples(LENGTHS)
    scored = shares.scored(TorchRankWorker(torch_settings(checkpoint, critic=replace(critic, initial_weights=own)), World()), samples)
    assert isinstance(want, list) and scored is not None
    for sample, theirs, values in zip(samples, scored, want, strict=True):
        with torch.no_grad():
            logits = model(torch.from_numpy(sample.tokens.astype(np.int64))[None]).logits[0, sample.prompt_length - 1 : -1, 0]
        assert values.any()
        np.testing.assert_allclose(logits, values, atol=1e-4)
        np.testing.assert_allclose(theirs.values, values, atol=1e-4)


def test_checkpoints_are_compared_with_their_value_models(saved: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The comparison includes the optimizers."""
    shutil.copytree(saved, tmp_path / "without")
    shutil.rmtree(tmp_path / "without" / "critic")
    assert convert(["compare", str(saved), str(saved), "--all"]) == 0
    assert {"critic/output_layer.weight: equal", "critic/optimizer.state.exp_avg.output_layer.weight: equal"} <= set(
        capsys.readouterr().out.splitlines()
    )
    assert convert(["compare", str(saved), str(tmp_path / "without")]) == 1
    assert capsys.readouterr().out.splitlines()[0] == f"critic: a value model is only in {saved}"


def test_a_checkpoint_without_a_value_model_is_refused_unless_one_is_to_begin_there(
    pool: RankPool, checkpoint: Path, critic: CriticSettings, tmp_path: Path
) -> None:
    settings = settings_of(checkpoint, Layout(), **LIMITS, critic=critic)
    pool.run(1, saved_policy, replace(settings, critic=None), tmp_path / "saved")
    (refused,) = pool.run(1, first_values, settings, load=tmp_path / "saved")
    assert isinstance(refused, str) and "has no value model" in refused
    told = replace(settings, critic=replace(critic, may_begin_at_resume=True))
    (begun,), (fresh,) = pool.run(1, first_values, told, load=tmp_path / "saved"), pool.run(1, first_values, settings)
    assert isinstance(begun, list) and isinstance(fresh, list)
    assert all(np.array_equal(ours, theirs) for ours, theirs in zip(begun, fresh, strict=True))


def test_a_model_of_the_users_own_is_its_value_model_too(pool: RankPool, checkpoint: Path, critic: CriticSettings) -> None:
    """Covers a policy with tied embedding and output layer."""
    provider = "tests.megatron.providers.with_wide_norm"
    got, *_ = pool.run(2, first_values, settings_of(checkpoint, LAYOUTS["pp2"], **LIMITS, critic=critic, model_provider=provider))
    worker: Any = TorchRankWorker(torch_settings(checkpoint, critic=critic), World())
    worker.critic.value_model.model.model.norm.variance_epsilon = EPSILON
    want = shares.scored(worker, train_batches.samples(LENGTHS))
    assert isinstance(got, list) and want is not None
    for ours, theirs in zip(got, want, strict=True):
        np.testing.assert_allclose(ours, theirs.values, atol=1e-4)


def saved_policy(world: World, settings: MegatronTrainerSettings, directory: Path) -> None:
    build_worker(settings, world).save(directory)


def away(world: World, settings: TrainerSettings) -> Course | None:
    """Run `course` with everything offloaded to host memory before training."""
    from fuligo.trainer.megatron_backend.worker import MegatronRankWorker

    class Sharing(MegatronRankWorker):
        def train(self, steps: Any) -> StepResult:
            self.offload()
            assert self.critic is not None
            chunks = [*self.chunks, *self.critic.learner.chunks]
            assert not any(parameter.untyped_storage().nbytes() for chunk in chunks for parameter in chunk.parameters())
            self.onload()
            return super().train(steps)

    return course(world, settings, build=Sharing)


def test_nothing_is_lost_while_engines_have_the_memory(pool: RankPool, checkpoint: Path, critic: CriticSettings) -> None:
    settings = settings_of(checkpoint, LAYOUTS["dp2"], **LIMITS, critic=critic, optimizer=ADAM, precision="bf16")
    (stayed, _), (went, _) = pool.run(2, course, settings), pool.run(2, away, settings)
    assert stayed is not None and went is not None
    assert all(torch.equal(weight, went.weights[name]) for name, weight in stayed.weights.items())
