"""Qwen3.5 and Gemma 4 as published: the torch trainer trains the language model on text, and saves and sends the whole of it."""

import json
import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForImageTextToText

from fuligo.convert.export import export
from fuligo.formats.adapter_config import TOWER_MODULES, AdapterConfig
from fuligo.formats.checkpoint_files import checkpoint_weights
from fuligo.formats.stored_experts import StoredExperts
from fuligo.models.registry import experts_in
from fuligo.trainer.objective import LossSettings
from fuligo.trainer.ranks.settings import LearningRateSchedule, LoraSettings, OptimizerSettings
from fuligo.trainer.ranks.trainer import LocalTrainer
from fuligo.trainer.ranks.world import World
from fuligo.trainer.torch_backend.settings import TorchTrainerSettings
from fuligo.trainer.torch_backend.worker import TorchRankWorker
from tests import shares, tiny_vision, train_batches

LENGTHS = [(4, 9), (1, 3), (6, 9), (2, 5)]
MTP = "mtp."


@pytest.fixture(scope="module", params=["qwen3_5", "qwen3_5_moe", "gemma4"])
def published(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    if request.param == "gemma4":
        return tiny_vision.save_gemma4_as_published(tmp_path_factory.mktemp(request.param))
    return tiny_vision.save_as_published(tmp_path_factory.mktemp(request.param), request.param, tied=request.param == "qwen3_5")


def settings_of(checkpoint: Path, **changes) -> TorchTrainerSettings:
    settings = TorchTrainerSettings(
        hf_checkpoint=checkpoint,
        initial_weights=checkpoint,
        optimizer=OptimizerSettings(LearningRateSchedule(peak=1e-2), weight_decay=0.1),
        loss=LossSettings(loss_type="sft_loss"),
        takes_images=False,
    )
    return replace(settings, **changes)


def exported(worker: TorchRankWorker, directory: Path) -> Path:
    """Save a checkpoint and export it as --save-hf does."""
    (directory / "iter_0000001").mkdir(parents=True)
    worker.save(directory / "iter_0000001")
    export(directory / "iter_0000001", directory / "exported")
    return directory / "exported"


def tensors_of(directory: Path) -> dict[str, Tensor]:
    return {name: tensor for file in directory.glob("*.safetensors") for name, tensor in load_file(file).items()}


def is_of_tower(name: str) -> bool:
    return re.match(TOWER_MODULES, name) is not None


def is_same(one: Tensor, other: Tensor) -> bool:
    return one.dtype == other.dtype and torch.equal(*(tensor.reshape(-1).view(torch.uint8) for tensor in (one, other)))


def test_an_untrained_model_is_saved_byte_for_byte(published: Path, tmp_path: Path) -> None:
    whole = exported(TorchRankWorker(settings_of(published), World()), tmp_path)
    before, after = tensors_of(published), tensors_of(whole)
    assert after.keys() == before.keys()
    assert all(is_same(before[name], tensor) for name, tensor in after.items())
    given, kept = (json.loads((directory / "config.json").read_text()) for directory in (published, whole))
    for part in ("text_config", "vision_config"):
        assert {key: kept[part].get(key) for key in given[part]} == given[part], part
    assert kept["model_type"] == given["model_type"]


def test_training_on_text_leaves_the_tower_as_it_is(published: Path, tmp_path: Path) -> None:
    """Weight decay would change weights whose gradient is zero."""
    worker = TorchRankWorker(settings_of(published), World())
    for _ in range(2):
        worker.train(shares.to_train(worker, train_batches.batch(train_batches.samples(LENGTHS))))
    whole = exported(worker, tmp_path)
    before, after = tensors_of(published), tensors_of(whole)
    changed = {name for name, tensor in after.items() if not is_same(before[name], tensor)}
    assert any(is_of_tower(name) for name in after)
    assert changed == {name for name in after if not is_of_tower(name) and not name.endswith("layer_scalar") and not name.startswith(MTP)}
    resumed = TorchRankWorker(settings_of(published), World())
    resumed.restore(tmp_path / "iter_0000001")
    model = AutoModelForImageTextToText.from_pretrained(whole, dtype=torch.float32, attn_implementation="eager")
    for name, parameter in resumed.policy.model.named_parameters():
        torch.testing.assert_close(model.get_parameter(name), parameter, rtol=0.01, atol=1e-6)


def test_a_run_that_trained_its_tower_continues_on_text(published: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The tower's moments are left in the checkpoint."""
    with monkeypatch.context() as patched:
        patched.setattr("fuligo.trainer.torch_backend.worker.freeze_towers", lambda _: None)
        worker = TorchRankWorker(settings_of(published), World())
        for parameter in worker.policy.model.parameters():
            parameter.grad = torch.zeros_like(parameter) if parameter.requires_grad else None
        worker._learner.optimizer.step()
        worker._learner.progress.num_optimizer_steps = 1
        (tmp_path / "iter_0000001").mkdir()
        worker.save(tmp_path / "iter_0000001")
    resumed = TorchRankWorker(settings_of(published), World())
    resumed.restore(tmp_path / "iter_0000001")
    names = {id(parameter): name for name, parameter in resumed.policy.model.named_parameters()}
    with_moments = {names[id(parameter)] for parameter in resumed._learner.optimizer.state}
    assert with_moments == {name for name in names.values() if not is_of_tower(name)}


def test_engines_are_sent_the_published_names(published: Path) -> None:
    """SGLang's decay rates are in float32, and would differ from those that it loaded."""
    worker = TorchRankWorker(settings_of(published, sync_dtype="bf16"), World())
    experts = experts_in(published)
    assert experts is (StoredExperts.WHOLE if published.name.startswith(("qwen3_5_moe", "gemma4")) else StoredExperts.APART)
    sent = dict(checkpoint_weights(worker.named_weights(), experts))
    stored = {name: tensor for name, tensor in tensors_of(published).items() if not name.startswith(MTP)}
    assert sent.keys() == stored.keys()
    for name, tensor in stored.items():
        assert torch.equal(sent[name].float(), tensor.to(sent[name].dtype).float()), name
        is_exact = name.endswith("A_log") or name in dict(worker.policy.model.named_buffers())
        assert sent[name].dtype == (torch.float32 if is_exact else torch.bfloat16)


def test_a_merged_adapter_has_the_published_names_too(published: Path) -> None:
    lora = LoraSettings(AdapterConfig(rank=4, alpha=8.0))
    worker = TorchRankWorker(settings_of(published, lora=lora, sync_dtype="bf16"), World())
    sent = dict(checkpoint_weights(worker.named_weights(), experts_in(published)))
    stored = {name: tensor for name, tensor in tensors_of(published).items() if not name.startswith(MTP)}
    assert sent.keys() == stored.keys()
    assert all(torch.equal(sent[name].float(), tensor.to(sent[name].dtype).float()) for name, tensor in stored.items())


# qwen3_5_moe has the layers of qwen3_5, and experts
@pytest.mark.parametrize(
    "published", [pytest.param("qwen3_5", marks=pytest.mark.slow), "qwen3_5_moe", "gemma4"], indirect=True, scope="module"
)
@pytest.mark.usefixtures("warm_children")
async def test_two_ranks_train_as_one(published: Path, tmp_path: Path) -> None:
    """The tower is sharded and never gathered for a pass."""
    losses = []
    for num_ranks in (1, 2):
        trainer = LocalTrainer(settings_of(published, num_ranks=num_ranks, command_timeout_s=120.0))
        await trainer.load()
        try:
            result = await trainer.train(train_batches.batch(train_batches.samples(LENGTHS)))
            losses.append((result.metrics["train/grad_norm"], result.metrics["train/loss"]))
            await trainer.save(tmp_path / str(num_ranks))
        finally:
            await trainer.close()
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    before, after = tensors_of(published), tensors_of(tmp_path / "2" / "hf")
    assert all(torch.equal(tensor.float(), after[name]) for name, tensor in before.items() if is_of_tower(name))
