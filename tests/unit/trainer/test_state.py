"""Saving and restoring: a checkpoint is restored exactly and completely, or refused."""

import json
import shutil
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from fuligo.errors import CheckpointError
from fuligo.trainer.objective import KlLoss, LossSettings
from fuligo.trainer.ranks.settings import LearningRateSchedule, OptimizerSettings, TrainedParameters
from fuligo.trainer.ranks.world import World
from fuligo.trainer.torch_backend.settings import TorchTrainerSettings
from fuligo.trainer.torch_backend.worker import TorchRankWorker
from tests import shares, tiny, train_batches

LENGTHS = [(4, 9), (1, 3), (6, 9), (2, 4), (5, 14), (3, 9)]


@pytest.fixture
def settings(checkpoint) -> TorchTrainerSettings:
    schedule = LearningRateSchedule(peak=1e-3, style="cosine", warmup_steps=2, decay_steps=6)
    return TorchTrainerSettings(hf_checkpoint=checkpoint, initial_weights=checkpoint, optimizer=OptimizerSettings(schedule))


def worker_of(settings: TorchTrainerSettings) -> TorchRankWorker:
    return TorchRankWorker(settings, World())


def train(worker: TorchRankWorker, seed: int) -> dict[str, float]:
    samples = shares.scored(worker, train_batches.samples(LENGTHS, seed=seed))
    metrics = worker.train(shares.to_train(worker, train_batches.batch(samples, num_steps=2))).metrics
    return {name: value for name, value in metrics.items() if name != "train/tokens_per_s"}


@pytest.fixture
def saved(settings, tmp_path) -> Path:
    worker = worker_of(settings)
    train(worker, seed=0)
    worker.save(tmp_path / "saved")
    return tmp_path / "saved"


def test_a_background_save_holds_the_state_at_its_beginning(settings, tmp_path):
    worker = worker_of(settings)
    train(worker, seed=0)
    saving = worker.begin_save(tmp_path / "saved")
    next_step = train(worker, seed=1)
    saving.result(timeout=120)
    resumed = worker_of(settings)
    resumed.restore(tmp_path / "saved")
    assert train(resumed, seed=1) == next_step


def test_training_resumes_bit_for_bit(settings, saved):
    uninterrupted = worker_of(settings)
    train(uninterrupted, seed=0)
    resumed = worker_of(settings)
    resumed.restore(saved)
    resumed.offload()
    resumed.onload()
    for seed in (1, 2):
        assert train(resumed, seed) == train(uninterrupted, seed)
    for (name, ours), (_, theirs) in zip(resumed.named_weights(), uninterrupted.named_weights(), strict=True):
        assert torch.equal(ours, theirs), name


@pytest.mark.parametrize("num_trained", [0, 1])
def test_training_resumes_bit_for_bit_after_skipped_steps(settings, tmp_path, num_trained):
    """Skipped steps count for the learning rate but not for AdamW, which has no moments if all steps were skipped."""
    worker = worker_of(settings)
    for seed in range(num_trained):
        train(worker, seed)
    worker.train([None, None])
    worker.save(tmp_path / "saved")
    resumed = worker_of(settings)
    resumed.restore(tmp_path / "saved")
    assert resumed.progress == worker.progress and resumed.progress.num_skipped_steps == 2
    assert train(resumed, seed=2) == train(worker, seed=2)
    for (name, ours), (_, theirs) in zip(resumed.named_weights(), worker.named_weights(), strict=True):
        assert torch.equal(ours, theirs), name


def test_a_checkpoint_without_a_count_of_skipped_steps_has_none(settings, saved):
    fields = json.loads((saved / "trainer.json").read_text())
    del fields["num_skipped_steps"]
    (saved / "trainer.json").write_text(json.dumps(fields))
    worker = worker_of(settings)
    worker.restore(saved)
    assert (worker.progress.num_optimizer_steps, worker.progress.num_skipped_steps) == (2, 0)


def test_a_worker_that_stays_on_the_device_trains_as_one_that_leaves_it(settings, tmp_path):
    """Its moments exist before the first step, so that engines that start then find only the memory that stays free."""
    alone, stays = worker_of(settings), worker_of(replace(settings, stays_on_device=True))
    stays.offload()
    held = [tensor.data_ptr() for tensor in stays._kept_tensors()]
    stays.onload()
    assert len(held) >= 4 * len(list(stays.policy.model.parameters())), "weights, two moments, a step counter"
    for seed in (0, 1):
        assert train(stays, seed) == train(alone, seed)
        stays.offload()
        assert [tensor.data_ptr() for tensor in stays._kept_tensors()] == held
        stays.onload()
    stays.save(tmp_path)
    resumed = worker_of(replace(settings, stays_on_device=True))
    resumed.restore(tmp_path)
    assert train(resumed, 2) == train(alone, 2)


def test_moments_exist_after_a_restore_from_before_the_first_step(settings, tmp_path):
    """As after a run in which only the value model has learned so far: engines start next and take all memory that is free."""
    alone, stays = worker_of(settings), worker_of(replace(settings, stays_on_device=True))
    alone.save(tmp_path)
    stays.restore(tmp_path)
    stays.offload()
    assert len(list(stays._kept_tensors())) >= 4 * len(list(stays.policy.model.parameters()))
    stays.onload()
    assert train(stays, 0) == train(alone, 0)


def test_random_numbers_resume(settings, tmp_path):
    worker = worker_of(settings)
    torch.rand(3)
    worker.save(tmp_path)
    expected = torch.rand(5)
    torch.manual_seed(0)
    worker_of(settings).restore(tmp_path)
    assert torch.equal(torch.rand(5), expected)


def test_the_weights_are_a_hugging_face_export(settings, checkpoint, saved):
    worker = worker_of(settings)
    worker.restore(saved)
    exported = AutoModelForCausalLM.from_pretrained(saved / "hf").state_dict()
    for name, tensor in worker.named_weights():
        assert torch.equal(exported[name], tensor), name
    assert AutoTokenizer.from_pretrained(saved / "hf").get_vocab() == AutoTokenizer.from_pretrained(checkpoint).get_vocab()


def test_no_file_is_a_pickle(saved):
    assert {file.suffix for file in saved.rglob("*") if file.is_file()} <= {".safetensors", ".json", ".jinja"}


def test_a_reference_that_moves_is_saved_with_it(settings, checkpoint, tmp_path):
    settings = replace(settings, reference_weights=checkpoint, ref_update_interval=1, loss=LossSettings(kl_loss=KlLoss(0.1, "k2")))
    worker = worker_of(settings)
    train(worker, seed=0)
    worker.save(tmp_path)
    resumed = worker_of(settings)
    resumed.restore(tmp_path)
    assert train(resumed, seed=1) == train(worker, seed=1)


def test_before_the_first_optimizer_step_there_is_nothing_of_the_optimizer_to_save(settings, tmp_path):
    worker_of(settings).save(tmp_path)
    resumed, fresh = worker_of(settings), worker_of(settings)
    resumed.restore(tmp_path)
    assert train(resumed, seed=0) == train(fresh, seed=0)


@pytest.mark.parametrize("changes", [{"hidden": 32}, {"layers": 1}, {"layers": 3}])
def test_another_architecture_is_refused_before_anything_changes(settings, saved, tmp_path, changes):
    other = tiny.save_checkpoint(tmp_path / "other", "qwen3", tie_word_embeddings=True, **changes)
    worker = worker_of(replace(settings, hf_checkpoint=other, initial_weights=other))
    before = {name: tensor.clone() for name, tensor in worker.named_weights()}
    with pytest.raises(CheckpointError, match=r"saved/hf.*belongs to another architecture: model\."):
        worker.restore(saved)
    assert all(torch.equal(before[name], tensor) for name, tensor in worker.named_weights())


def test_other_trained_parameters_are_refused(settings, saved):
    worker = worker_of(replace(settings, trained=TrainedParameters(only=("mlp",))))
    with pytest.raises(CheckpointError, match=r"saved/optimizer/optimizer-00000\.safetensors.*but absent in this run"):
        worker.restore(saved)


@pytest.mark.parametrize(
    "file", ["hf/model-00000.safetensors", "optimizer/optimizer-00000.safetensors", "rng/rank_00000.safetensors", "trainer.json"]
)
@pytest.mark.parametrize("damage", ["truncated", "missing"])
def test_damaged_files_are_named_before_anything_changes(settings, saved, file, damage):
    path = saved / file
    if damage == "missing":
        path.unlink()
    else:
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    worker = worker_of(settings)
    if file.startswith("rng") and damage == "missing":
        worker.restore(saved)  # saved by fewer ranks: this one keeps its own random numbers
        return
    with pytest.raises(CheckpointError, match=path.name):
        worker.restore(saved)
    assert worker.progress.num_optimizer_steps == 0


def test_a_later_format_is_refused(settings, saved):
    fields = json.loads((saved / "trainer.json").read_text())
    (saved / "trainer.json").write_text(json.dumps({**fields, "format": 99}))
    with pytest.raises(CheckpointError, match="format 99"):
        worker_of(settings).restore(saved)


def test_an_empty_directory_is_refused(settings, saved):
    shutil.rmtree(saved / "hf")
    with pytest.raises(CheckpointError, match=r"model\.safetensors\.index\.json"):
        worker_of(settings).restore(saved)


@pytest.mark.parametrize("content", ["[]", "1", '{"format": null}', "{}"])
def test_a_file_of_other_json_is_refused(settings, saved, content):
    (saved / "trainer.json").write_text(content)
    with pytest.raises(CheckpointError, match=r"trainer\.json"):
        worker_of(settings).restore(saved)
