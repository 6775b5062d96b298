"""LoRA on the Megatron trainer: in every layout the gradients, log-probabilities and files of PEFT's own model on one process."""

from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from torch import Tensor
from transformers import AutoModelForCausalLM

from fuligo.checkpoint.location import weights_of
from fuligo.errors import CheckpointError, ConfigError
from fuligo.formats.adapter_config import ADAPTER, AdapterConfig
from fuligo.formats.dist_tensors import DistributedTensors
from fuligo.formats.hugging_face import read_config_json
from fuligo.formats.weight_manifest import MergeRounding
from fuligo.layout.megatron import Layout
from fuligo.models.adapter_names import AdapterNames
from fuligo.models.registry import names_of
from fuligo.trainer.megatron_backend.settings import MegatronTrainerSettings, OptimizerPlace, Recomputation
from fuligo.trainer.objective import LossSettings
from fuligo.trainer.packing import Capacity
from fuligo.trainer.ranks.settings import LearningRateSchedule, LoraSettings, OptimizerSettings
from fuligo.trainer.ranks.world import World
from fuligo.types import FloatArray, TrainSample
from tests import shares, tiny, train_batches
from tests.megatron.policies import settings_of
from tests.megatron.ranks import RankPool

LENGTHS = [(4, 9), (1, 3), (6, 9), (2, 1), (5, 14), (3, 9), (7, 6), (8, 2), (4, 30)]
CAPACITY = Capacity(max_tokens=34)
SFT = LossSettings(loss_type="sft_loss", per_token=True)
FULL = Recomputation("full", "uniform", 1)

LAYOUTS = {
    "one": Layout(),
    "tp2": Layout(tp=2, num_ranks=2),
    "tp2 sp": Layout(tp=2, sequence_parallel=True, num_ranks=2),
    "pp2": Layout(pp=2, num_ranks=2),
    "pp2 vpp2": Layout(pp=2, vpp=2, num_ranks=2),
    "cp2": Layout(cp=2, num_ranks=2),
    "dp2": Layout(num_ranks=2),
    "tp2 sp pp2": Layout(tp=2, pp=2, sequence_parallel=True, num_ranks=4),
    "tp2 sp ep2": Layout(tp=2, ep=2, sequence_parallel=True, num_ranks=2),
}


ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]
LATENT = ["q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"]


@dataclass(slots=True, frozen=True)
class Start:
    """Model with an adapter that PEFT saved, both random."""

    checkpoint: Path
    adapter: Path

    def settings(self, layout: str, **overrides: object) -> MegatronTrainerSettings:
        lora = LoraSettings(AdapterConfig.read(self.adapter), initial_adapter=self.adapter)
        common = {"capacity": CAPACITY, "score_capacity": CAPACITY, "loss": SFT, "chunk_tokens": 7}
        place = OptimizerPlace(distributed=False)
        return settings_of(self.checkpoint, LAYOUTS[layout], **{**common, "lora": lora, "optimizer_place": place, **overrides})


def start(directory: Path, family: str, targets: list[str], **shape: object) -> Start:
    checkpoint = tiny.save_checkpoint(directory / "model", family, **shape)
    config = LoraConfig(r=3, lora_alpha=7, target_modules=targets)
    theirs = get_peft_model(AutoModelForCausalLM.from_pretrained(checkpoint), config)
    torch.manual_seed(1)
    for parameter in theirs.parameters():
        if parameter.requires_grad:
            torch.nn.init.normal_(parameter, std=0.1)
    theirs.save_pretrained(directory / "adapter")
    return Start(checkpoint, directory / "adapter")


@pytest.fixture(scope="module")
def dense(tmp_path_factory: pytest.TempPathFactory) -> Start:
    return start(tmp_path_factory.mktemp("dense"), "qwen3", ATTENTION + MLP, layers=4)


@dataclass(slots=True)
class Found:
    """Log-probabilities of the samples, of the reference, and gradients by PEFT's names."""

    logprobs: list[FloatArray]
    reference: list[FloatArray]
    gradients: dict[str, Tensor]


def logprobs_of(model: torch.nn.Module, sample: TrainSample) -> Tensor:
    """Return [R] log-probabilities by a model's own forward pass."""
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


@pytest.fixture(scope="module")
def samples() -> list[TrainSample]:
    return train_batches.samples(LENGTHS)


@pytest.fixture(scope="module")
def of_dense(dense: Start, samples: list[TrainSample]) -> Found:
    return by_peft(dense, samples)


@pytest.mark.parametrize(
    ("layout", "overrides"),
    [
        ("one", {}),
        ("tp2", {}),
        ("tp2 sp", {"recomputation": FULL}),
        ("pp2 vpp2", {}),
        ("cp2", {"recomputation": Recomputation("selective", modules=("mlp",))}),
        ("dp2", {}),
        ("tp2 sp pp2", {"recomputation": FULL}),
    ],
)
def test_gradients_and_log_probabilities_are_those_of_peft(
    pool: RankPool, dense: Start, of_dense: Found, samples: list[TrainSample], layout: str, overrides: dict
) -> None:
    got, *_ = pool.run(LAYOUTS[layout].num_ranks, by_megatron, dense.settings(layout, **overrides), samples)
    assert_as_peft(got, of_dense)


@pytest.mark.parametrize(
    ("family", "targets", "shape", "layout", "overrides"),
    [
        ("qwen2", ["k_proj", "o_proj"], {}, "tp2", {}),  # biases; a part of a fused matrix; tied embeddings below
        (
            "glm4",
            ["gate_up_proj", "down_proj", "q_proj"],
            {"tie_word_embeddings": True},
            "pp2",
            {},
        ),  # gate and up are one matrix in PEFT, too
        ("qwen3_moe", ATTENTION, {}, "tp2 sp ep2", {"dispatcher": "alltoall"}),
        ("deepseek_v3", LATENT, {}, "tp2 sp ep2", {"recomputation": FULL}),
    ],
)
def test_families_are_adapted_as_by_peft(
    pool: RankPool, tmp_path: Path, family: str, targets: list[str], shape: dict, layout: str, overrides: dict
) -> None:
    given, samples = start(tmp_path, family, targets, **shape), train_batches.samples(LENGTHS)
    got, *_ = pool.run(LAYOUTS[layout].num_ranks, by_megatron, given.settings(layout, **overrides), samples)
    assert_as_peft(got, by_peft(given, samples))


ADAM = OptimizerSettings(LearningRateSchedule(peak=3e-3, warmup_steps=2), eps=1e-3, weight_decay=0.1, clip_grad=0.5)
"""Optimizer with a large epsilon, so that steps are smooth in the gradients."""


@dataclass(slots=True)
class Trained:
    """Results of a course."""

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
    """Train rollouts of two optimizer steps from the beginning or a checkpoint; save."""
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
    merged = worker._adapted.merged()
    weights = {name: tensor.clone() for name, tensor in merged.named()}
    metrics.pop("train/tokens_per_s", None)
    return Trained(metrics, weights, merged.rounding) if world.rank == 0 else None


def run_course(pool: RankPool, settings: MegatronTrainerSettings, samples: list[TrainSample], **options: object) -> Trained:
    trained = pool.run(settings.num_ranks, course, settings, samples, **options)[0]
    assert trained is not None
    return trained


RANDOM = LoraSettings(AdapterConfig(4, 8.0, ("down_proj", "q_proj", "up_proj", "v_proj"), rank_stabilised=True))
DISTRIBUTED = {"lora": RANDOM, "optimizer": ADAM, "optimizer_place": OptimizerPlace()}


@pytest.mark.parametrize(("saved", "loaded", "beside"), [("tp2 sp", "pp2", True), ("pp2 vpp2", "dp2", False), ("dp2", "tp2", False)])
def test_the_next_steps_are_the_same_under_another_layout(
    pool: RankPool, dense: Start, samples: list[TrainSample], tmp_path: Path, saved: str, loaded: str, beside: bool
) -> None:
    """A begins the same in every layout; the checkpoint holds the adapter and its optimizer state alone."""
    run_course(pool, dense.settings(saved, **DISTRIBUTED), samples, save=tmp_path, beside=beside)
    resumed = run_course(pool, dense.settings(loaded, **DISTRIBUTED), samples, load=tmp_path)
    straight = run_course(pool, dense.settings("one", **DISTRIBUTED), samples, num_rollouts=2)
    for name, weight in straight.merged.items():
        torch.testing.assert_close(resumed.merged[name], weight, atol=2e-6, rtol=0, msg=name)
    names = DistributedTensors(tmp_path).shapes
    assert names and all(".adapter." in name for name in names)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_a_resume_under_the_same_layout_is_exact(
    pool: RankPool, dense: Start, samples: list[TrainSample], tmp_path: Path, precision: str
) -> None:
    settings = dense.settings("tp2 sp", **DISTRIBUTED, precision=precision)
    run_course(pool, settings, samples, save=tmp_path)
    resumed = run_course(pool, settings, samples, load=tmp_path)
    uninterrupted = run_course(pool, settings, samples, num_rollouts=2)
    assert resumed.metrics == uninterrupted.metrics
    assert all(torch.equal(weight, resumed.merged[name]) for name, weight in uninterrupted.merged.items())


def test_peft_reads_what_is_saved_and_merges_it_likewise(pool: RankPool, dense: Start, samples: list[TrainSample], tmp_path: Path) -> None:
    trained = run_course(pool, dense.settings("tp2 sp pp2", **DISTRIBUTED), samples, save=tmp_path)
    assert weights_of(tmp_path) == tmp_path / ADAPTER
    assert AdapterConfig.read(tmp_path / ADAPTER) == RANDOM.adapter
    theirs = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(dense.checkpoint), tmp_path / ADAPTER).merge_and_unload()
    state = theirs.state_dict()
    for name, tensor in trained.merged.items():
        torch.testing.assert_close(tensor, state[name], rtol=1e-6, atol=1e-7, msg=name)
    unchanged = AutoModelForCausalLM.from_pretrained(dense.checkpoint).state_dict()
    changed = {name.split(".")[-2] for name, tensor in trained.merged.items() if not torch.equal(tensor, unchanged[name])}
    assert changed == set(RANDOM.adapter.target_modules)


def test_what_rounding_leaves_of_a_merge_is_counted_once_in_every_layout(pool: RankPool, dense: Start, samples: list[TrainSample]) -> None:
    in_bf16 = {"sync_dtype": "bf16"}
    one, two = (run_course(pool, dense.settings(layout, **in_bf16), samples) for layout in ("one", "tp2 sp"))
    every = AdapterConfig.read(dense.adapter)
    config = read_config_json(dense.checkpoint)
    whole = sum(matrix.rows * matrix.weight.shape[1] for matrix in AdapterNames.of(names_of(config), every).matrices)
    assert one.rounding.num_elements == two.rounding.num_elements == whole
    assert one.rounding.num_changed == pytest.approx(two.rounding.num_changed, rel=1e-3)


def refusal(world: World, settings: MegatronTrainerSettings, load: Path) -> str:
    from fuligo.trainer.megatron_backend.worker import MegatronRankWorker

    with pytest.raises((CheckpointError, ConfigError)) as failure:
        MegatronRankWorker(settings, world).restore(load)
    return str(failure.value)


def test_what_does_not_fit_is_refused(pool: RankPool, dense: Start, samples: list[TrainSample], tmp_path: Path) -> None:
    settings = dense.settings("one", **DISTRIBUTED)
    run_course(pool, settings, samples, save=tmp_path / "saved")
    other = tiny.save_checkpoint(tmp_path / "other", "qwen3", layers=4, seed=7)
    wider = LoraSettings(AdapterConfig(5, 8.0, RANDOM.adapter.target_modules))
    stronger = replace(RANDOM, adapter=replace(RANDOM.adapter, alpha=16.0))
    for changed, message in (
        (replace(settings, initial_weights=other), "trained on other weights"),
        (replace(settings, lora=None), "it holds an adapter"),
        (replace(settings, lora=wider), "and [5, "),
        (replace(settings, lora=stronger), "with the scale 4, and this run has 8; use --lora-alpha 8 --lora-use-rslora"),
        (replace(settings, lora=LoraSettings(AdapterConfig(4, 8.0, ("q_prj",)))), "did you mean q_proj?"),
        (replace(settings, lora=replace(RANDOM, initial_adapter=dense.adapter)), "use the model that the adapter was trained on"),
    ):
        (text,) = pool.run(1, refusal, changed, tmp_path / "saved")
        assert message in text


def test_a_stage_without_adapted_layers_takes_part(pool: RankPool, dense: Start, samples: list[TrainSample], tmp_path: Path) -> None:
    lora = LoraSettings(AdapterConfig(4, 8.0, ("layers.3.self_attn.q_proj",)))
    settings = {**DISTRIBUTED, "lora": lora}
    two = run_course(pool, dense.settings("pp2", **settings), samples, save=tmp_path)
    one = run_course(pool, dense.settings("one", **settings), samples)
    assert two.metrics["train/grad_norm"] == pytest.approx(one.metrics["train/grad_norm"], rel=1e-4)
    for name, weight in one.merged.items():
        torch.testing.assert_close(two.merged[name], weight, atol=2e-6, rtol=0, msg=name)
    run_course(pool, dense.settings("pp2", **settings), samples, load=tmp_path)
