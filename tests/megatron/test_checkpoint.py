"""Checkpoints of the Megatron trainer, saved with one layout and loaded with another: the next step gives the same weights."""

import hashlib
import os
import shutil
from collections.abc import Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from fuligo.checkpoint.location import weights_directory
from fuligo.config.groups import OptimizerFlags
from fuligo.convert.hf_to_dist import hf_to_dist
from fuligo.convert.hf_view import HuggingFaceView
from fuligo.errors import CheckpointError
from fuligo.formats.hugging_face import read_config_json
from fuligo.layout.megatron import Layout
from fuligo.models.names import ModelNames
from fuligo.models.registry import names_of
from fuligo.trainer.megatron_backend.settings import MegatronTrainerSettings
from fuligo.trainer.ranks.settings import TrainedParameters
from fuligo.trainer.ranks.world import World
from fuligo.trainer.step import Progress
from tests.megatron.policies import settings_of
from tests.megatron.ranks import RankPool
from tests.tiny import save_checkpoint

NUM_STEPS = 2
"""Optimizer steps before a save."""


def train(
    world: World, settings: MegatronTrainerSettings, *, load: Path | None, save: Path | None, num_steps: int
) -> dict[str, Tensor] | None:
    """Take optimizer steps from the initial weights or a checkpoint; return the weights on rank 0."""
    from fuligo.trainer.megatron_backend.state import CheckpointWriter, restore_state
    from fuligo.trainer.megatron_backend.weights.export import named_weights

    state = build_state(world, settings)
    if load is not None:
        restore_state(load, state, world)
    for _ in range(num_steps):
        step(state, settings)
    if save is not None:
        CheckpointWriter(world).save({save: state}, model_files=settings.hf_checkpoint)
    weights = {name: tensor.clone() for name, tensor in named_weights(state.chunks, state.names, dtype=torch.float32)}
    return weights if world.rank == 0 else None


def step(state: Any, settings: MegatronTrainerSettings) -> None:
    from fuligo.trainer.megatron_backend.learner import apply_step, gradient_norm

    set_gradients(state.chunks, state.names, state.progress.num_optimizer_steps)
    norm = gradient_norm(state.optimizer)
    apply_step(state.optimizer, settings.optimizer, step=state.progress.num_optimizer_steps, grad_norm=norm)
    state.progress.num_optimizer_steps += 1


def build_state(world: World, settings: MegatronTrainerSettings) -> Any:
    from fuligo.trainer.megatron_backend.learner import build_optimizer, freeze_parameters, wrap
    from fuligo.trainer.megatron_backend.model import build_chunks
    from fuligo.trainer.megatron_backend.state import MegatronState
    from fuligo.trainer.megatron_backend.weights.load import load_hugging_face
    from fuligo.trainer.megatron_backend.worker import join_megatron

    join_megatron(settings.layout, world, settings.seed)
    chunks = build_chunks(settings, trained=True)
    load_hugging_face(chunks, settings.initial_weights)
    names = names_of(read_config_json(settings.hf_checkpoint))
    freeze_parameters(chunks, list(names.weights()), settings.trained)
    wrapped = wrap(chunks, settings)
    return MegatronState(wrapped, names, build_optimizer(wrapped, settings), settings.layout, Progress())


@torch.no_grad()
def set_gradients(chunks: Sequence[Any], names: ModelNames, step: int) -> None:
    """Set gradients that depend only on the weight's name and the step, so that they are the same under every layout."""
    from fuligo.trainer.megatron_backend.parts import held_weights

    for held in held_weights(chunks, names):
        if not held.tensor.requires_grad:
            continue
        seed = int.from_bytes(hashlib.blake2b(f"{held.weight.megatron}/{step}".encode(), digest_size=7).digest())
        whole = torch.randn(held.weight.shape, generator=torch.Generator().manual_seed(seed))
        gradient = torch.zeros_like(held.tensor, dtype=torch.float32)
        for part in held.parts:
            place = tuple(slice(o, o + size) for o, size in zip(part.shard.offset, part.shard.data.shape, strict=True))
            values = whole[place]
            if values.numel() == gradient.numel():
                gradient.copy_(values.view_as(gradient))
            else:
                gradient.view(-1)[part.start : part.start + values.numel()] = values.reshape(-1)
        held.tensor.main_grad.copy_(gradient)


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Save a dense model, and one with experts, a shared expert, router corrections and latent attention."""
    return {
        "dense": save_checkpoint(tmp_path_factory.mktemp("dense"), "qwen3", layers=4),
        "moe": save_checkpoint(tmp_path_factory.mktemp("moe"), "glm4_moe_lite", layers=3),
    }


LAYOUTS = {
    "one": Layout(),
    "tp2": Layout(tp=2, sequence_parallel=True, num_ranks=2),
    "pp2": Layout(pp=2, num_ranks=2),
    "pp2 uneven": Layout(pp=2, num_layers_first_stage=1, num_ranks=2),
    "dp2": Layout(num_ranks=2),
    "cp2": Layout(cp=2, num_ranks=2),
    "vpp2": Layout(pp=2, vpp=2, num_ranks=2),
    "tp2 pp2": Layout(tp=2, pp=2, num_ranks=4),
    "ep2": Layout(ep=2, num_ranks=2),
    "tp2 ep2": Layout(tp=2, ep=2, sequence_parallel=True, num_ranks=2),
    "pp2 ep2": Layout(pp=2, ep=2, num_layers_first_stage=1, num_ranks=4),
    "etp2": Layout(tp=2, etp=2, sequence_parallel=True, num_ranks=2),
}
DENSE = ("one", "tp2", "pp2", "pp2 uneven", "dp2", "cp2", "vpp2", "tp2 pp2")
EXPERTS = ("one", "pp2 uneven", "ep2", "tp2 ep2", "pp2 ep2", "etp2")
PAIRS = [
    *(("dense", *pair) for pair in [("tp2", "pp2"), ("pp2", "dp2"), ("dp2", "vpp2"), ("vpp2", "one"), ("one", "cp2")]),
    *(("dense", *pair) for pair in [("cp2", "tp2 pp2"), ("tp2 pp2", "pp2 uneven"), ("pp2 uneven", "tp2")]),
    *(("moe", *pair) for pair in [("one", "tp2 ep2"), ("tp2 ep2", "pp2 uneven"), ("pp2 uneven", "ep2")]),
    *(("moe", *pair) for pair in [("ep2", "etp2"), ("etp2", "pp2 ep2"), ("pp2 ep2", "one")]),
]
"""Pairs of layouts; each layout saves once and loads once."""
REPEATED = {("dense", "vpp2", "one"), ("dense", "tp2 pp2", "pp2 uneven")}
"""Pairs whose layouts other pairs cover; test_lora.py covers virtual stages."""
ALL = [(model, *pair) for model, names in (("dense", DENSE), ("moe", EXPERTS)) for pair in product(names, names)]


@pytest.fixture(scope="module")
def straight(pool: RankPool, models: dict[str, Path]) -> dict[str, dict[str, Tensor]]:
    """Return the weights one step after the save, from a run that does not save."""
    found: dict[str, dict[str, Tensor]] = {}
    for name, model in models.items():
        (weights,) = pool.run(1, train, settings_of(model, Layout()), load=None, save=None, num_steps=NUM_STEPS + 1)
        assert weights is not None
        found[name] = weights
    return found


@pytest.mark.parametrize(
    ("model", "saved", "loaded"),
    [case if case in PAIRS and case not in REPEATED else pytest.param(*case, marks=pytest.mark.slow) for case in ALL],
)
def test_the_next_step_is_the_same_under_another_layout(pool, models, straight, tmp_path: Path, model: str, saved: str, loaded: str):
    ours, theirs = settings_of(models[model], LAYOUTS[saved]), settings_of(models[model], LAYOUTS[loaded])
    pool.run(ours.num_ranks, train, ours, load=None, save=tmp_path, num_steps=NUM_STEPS)
    resumed = pool.run(theirs.num_ranks, train, theirs, load=tmp_path, save=None, num_steps=1)[0]
    assert resumed is not None
    assert_equal(resumed, straight[model], rtol=1e-6, atol=1e-7)


def assert_equal(ours: dict[str, Tensor], theirs: dict[str, Tensor], *, rtol: float = 0.0, atol: float = 0.0) -> None:
    assert ours.keys() == theirs.keys()
    for name, tensor in theirs.items():
        torch.testing.assert_close(ours[name], tensor, rtol=rtol, atol=atol, msg=lambda text, name=name: f"{name}: {text}")


@pytest.mark.parametrize(
    "options", [{}, {"optimizer_place": OptimizerFlags(use_distributed_optimizer=False)}, {"precision": "bf16"}], ids=str
)
def test_under_the_same_layout_it_is_exact(pool: RankPool, models, tmp_path: Path, options: dict[str, Any]):
    """Covers half precision with float32 master weights, and an optimizer that is replicated on every rank."""
    settings = settings_of(models["dense"], LAYOUTS["dp2"], **options)
    pool.run(2, train, settings, load=None, save=tmp_path, num_steps=NUM_STEPS)
    resumed = pool.run(2, train, settings, load=tmp_path, save=None, num_steps=2)[0]
    uninterrupted = pool.run(2, train, settings, load=None, save=None, num_steps=NUM_STEPS + 2)[0]
    assert resumed is not None and uninterrupted is not None
    assert_equal(resumed, uninterrupted)


def draw_after_restore(world: World, settings: MegatronTrainerSettings, *, load: Path | None, save: Path | None) -> list[Tensor]:
    """Return the next number of each random generator."""
    from megatron.core import tensor_parallel

    from fuligo.trainer.megatron_backend.state import CheckpointWriter, restore_state

    state = build_state(world, settings)
    if save is not None:
        torch.rand(world.rank + 3)
        CheckpointWriter(world).save({save: state}, model_files=settings.hf_checkpoint)
    if load is not None:
        restore_state(load, state, world)
    with tensor_parallel.get_cuda_rng_tracker().fork():
        of_region = torch.rand(4)
    return [torch.rand(4), of_region]


def test_random_numbers_continue_only_under_the_same_layout(pool: RankPool, models, tmp_path: Path):
    settings = settings_of(models["dense"], LAYOUTS["tp2"])
    saved = pool.run(2, draw_after_restore, settings, load=None, save=tmp_path)
    resumed = pool.run(2, draw_after_restore, settings, load=tmp_path, save=None)
    assert all(torch.equal(one, other) for ours, theirs in zip(saved, resumed) for one, other in zip(ours, theirs))
    elsewhere = settings_of(models["dense"], LAYOUTS["dp2"])
    own, kept = (pool.run(2, draw_after_restore, elsewhere, load=load, save=None) for load in (None, tmp_path))
    assert torch.equal(own[0][1], kept[0][1])


def kept_after_a_restore(world: World, settings: MegatronTrainerSettings, *, directory: Path) -> tuple[int, int]:
    """Return the number of tensors kept by a worker, and after the restore of a checkpoint from before the first step and an offload."""
    from fuligo.trainer.megatron_backend.worker import MegatronRankWorker

    worker = MegatronRankWorker(settings, world)
    worker.save(directory)
    held = len(worker._kept_tensors())
    worker.restore(directory)
    worker.offload()
    return held, len(worker._kept_tensors())


def test_moments_exist_after_a_restore_from_before_the_first_step(pool: RankPool, models, tmp_path: Path):
    """As after a run in which only the value model has learned so far: engines start next and take all memory that is free."""
    settings = settings_of(models["dense"], Layout())
    (stayed,) = pool.run(1, kept_after_a_restore, replace(settings, stays_on_device=True), directory=tmp_path / "stays")
    (left,) = pool.run(1, kept_after_a_restore, settings, directory=tmp_path / "leaves")
    assert left[0] == left[1] == stayed[0] < stayed[1]


@pytest.mark.parametrize("on_gpu", [True, False])
def test_moments_of_the_part_that_is_not_on_the_cpu_are_allocated(on_gpu: bool):
    """Stands in for Megatron's optimizer with --optimizer-offload-fraction, which needs a GPU."""
    from megatron.core.optimizer.cpu_offloading import HybridDeviceOptimizer

    from fuligo.trainer.megatron_backend.parts import allocate_state

    adam = torch.optim.AdamW([torch.nn.Parameter(torch.ones(3))])
    hybrid = HybridDeviceOptimizer.__new__(HybridDeviceOptimizer)
    hybrid.gpu_optimizer = adam if on_gpu else None
    allocate_state(SimpleNamespace(chained_optimizers=[SimpleNamespace(optimizer=hybrid)]))
    assert [state["exp_avg"].numel() for state in adam.state.values()] == ([3] if on_gpu else [])


def train_beside_the_save(world: World, settings: MegatronTrainerSettings, *, save: Path) -> None:
    """Take a step, begin a save, take another step before the save ends."""
    from fuligo.trainer.megatron_backend.state import CheckpointWriter

    state = build_state(world, settings)
    step(state, settings)
    saving = CheckpointWriter(world).begin({save: state}, model_files=settings.hf_checkpoint)
    step(state, settings)
    saving.result(timeout=120)


def test_what_is_saved_beside_training_is_what_was_there_when_it_began(pool: RankPool, models, tmp_path: Path):
    settings = settings_of(models["dense"], LAYOUTS["tp2"])
    pool.run(2, train_beside_the_save, settings, save=tmp_path)
    resumed = pool.run(2, train, settings, load=tmp_path, save=None, num_steps=1)[0]
    uninterrupted = pool.run(2, train, settings, load=None, save=None, num_steps=2)[0]
    assert resumed is not None and uninterrupted is not None
    assert_equal(resumed, uninterrupted)


def refused(world: World, settings: MegatronTrainerSettings, load: Path) -> tuple[str, bool]:
    """Return the error, and whether the weights are unchanged."""
    from fuligo.trainer.megatron_backend.state import restore_state
    from fuligo.trainer.megatron_backend.weights.local import local_weights

    state = build_state(world, settings)
    before = {name: tensor.detach().clone() for name, tensor in local_weights(state.chunks).items()}
    with pytest.raises(CheckpointError) as error:
        restore_state(load, state, world)
    return str(error.value), all(torch.equal(before[name], tensor) for name, tensor in local_weights(state.chunks).items())


def test_what_does_not_fit_is_refused_on_every_rank_before_anything_changes(pool: RankPool, models, tmp_path: Path):
    settings = settings_of(models["dense"], LAYOUTS["pp2"])
    whole = tmp_path / "whole"
    whole.mkdir()
    pool.run(2, train, settings, load=None, save=whole, num_steps=1)
    largest = max(whole.glob("*.distcp"), key=lambda file: file.stat().st_size).name
    for case, (damaged, message) in enumerate(
        [
            (lambda directory: (directory / largest).unlink(), f"{largest} is missing"),
            (lambda directory: os.truncate(directory / largest, 1000), "has 1000 bytes"),
            (lambda directory: os.truncate(directory / ".metadata", 1000), "cannot read"),
            (lambda directory: (directory / "rng" / "rank_00001.safetensors").unlink(), "rank_00001.safetensors: No such file"),
            (lambda directory: (directory / "trainer.json").unlink(), "trainer.json: FileNotFoundError"),
        ]
    ):
        copy = Path(shutil.copytree(whole, tmp_path / str(case)))
        damaged(copy)
        for text, is_unchanged in pool.run(2, refused, settings, copy):
            assert message in text and is_unchanged
    frozen = replace(settings, trained=TrainedParameters(frozen=("embed",)))
    others = [
        (settings_of(save_checkpoint(tmp_path / "other", "qwen3", layers=2), LAYOUTS["pp2"]), "belongs to another architecture"),
        (frozen, "was trained in the run that saved it but is frozen in this one"),
    ]
    for other, message in others:
        for text, is_unchanged in pool.run(2, refused, other, whole):
            assert message in text and is_unchanged


def first_weights(world: World, settings: MegatronTrainerSettings) -> dict[str, Tensor]:
    """Return the weights of a model that starts from a distributed checkpoint."""
    from fuligo.trainer.megatron_backend.model import build_chunks
    from fuligo.trainer.megatron_backend.state import load_weights
    from fuligo.trainer.megatron_backend.weights.export import named_weights
    from fuligo.trainer.megatron_backend.worker import join_megatron

    join_megatron(settings.layout, world, settings.seed)
    chunks = build_chunks(settings, trained=False)
    names = names_of(read_config_json(settings.hf_checkpoint))
    load_weights(settings.initial_weights, chunks, names, world)
    return {name: tensor.clone() for name, tensor in named_weights(chunks, names, dtype=torch.float32)}


@pytest.mark.parametrize(("model", "layout"), [("dense", "tp2 pp2"), ("moe", "tp2 ep2")])
def test_a_converted_checkpoint_is_loaded_under_any_layout(pool: RankPool, models, tmp_path: Path, model: str, layout: str):
    hf_to_dist(models[model], tmp_path, World())
    settings = settings_of(models[model], LAYOUTS[layout], initial_weights=weights_directory(tmp_path))
    weights = pool.run(settings.num_ranks, first_weights, settings)
    view = HuggingFaceView(tmp_path / "release")
    for rank_weights in weights:
        assert_equal(rank_weights, {name: view.read(name) for name in view.shapes})


def refused_weights(world: World, settings: MegatronTrainerSettings) -> str:
    """Return the error of loading a checkpoint's weights."""
    from fuligo.trainer.megatron_backend.model import build_chunks
    from fuligo.trainer.megatron_backend.weights.load import load_hugging_face
    from fuligo.trainer.megatron_backend.worker import join_megatron

    try:
        if (settings.initial_weights / ".metadata").exists():
            first_weights(world, settings)
        else:
            join_megatron(settings.layout, world, settings.seed)
            load_hugging_face(build_chunks(settings, trained=False), settings.initial_weights)
    except CheckpointError as error:
        return str(error)
    return "loaded"


@pytest.mark.parametrize("form", ["Hugging Face", "distributed"])
def test_weights_that_are_not_finite_are_named(pool: RankPool, models, tmp_path: Path, form: str):
    damaged = Path(shutil.copytree(models["dense"], tmp_path / "damaged"))
    (file,) = damaged.glob("*.safetensors")
    weights = load_file(file)
    weights["model.norm.weight"][3] = float("nan")
    save_file(weights, file, metadata={"format": "pt"})
    given = damaged
    if form == "distributed":
        hf_to_dist(damaged, tmp_path / "converted", World())
        given = weights_directory(tmp_path / "converted")
    (said,) = pool.run(1, refused_weights, settings_of(models["dense"], LAYOUTS["one"], initial_weights=given))
    assert said.startswith(f"cannot load {given}: ") and "norm.weight has values that are NaN or infinite (1 of 64)" in said
