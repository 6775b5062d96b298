"""MTP layers of Qwen3-Next and Qwen3.5: what a run does not train, its checkpoints and exports hold as it was."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from fuligo.convert.export import export
from fuligo.convert.merge_adapter import merge_adapter
from fuligo.formats.adapter_config import AdapterConfig
from fuligo.trainer.objective import LossSettings
from fuligo.trainer.ranks.settings import LearningRateSchedule, LoraSettings, OptimizerSettings
from fuligo.trainer.ranks.world import World
from fuligo.trainer.torch_backend.settings import TorchTrainerSettings
from fuligo.trainer.torch_backend.worker import TorchRankWorker
from tests import shares, tiny, tiny_mtp, tiny_vision, train_batches

LENGTHS = [(4, 9), (1, 3), (6, 9), (2, 1), (5, 14), (3, 9)]
"""(prompt, response) lengths; in the second and the fourth, an MTP layer would need a token before the sample."""
MTP = "mtp."


@pytest.fixture(scope="module", params=["qwen3_next", "qwen3_5_text", "qwen3_5_moe_text", "qwen3_5_moe"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a checkpoint in bfloat16 with an MTP layer."""
    directory, family = tmp_path_factory.mktemp(request.param), request.param
    if family in tiny_vision.LANGUAGE:
        return tiny_vision.save_as_published(directory, family, tied=False, whole_mtp_experts=True)
    tiny.model(family).to(torch.bfloat16).save_pretrained(directory)
    tiny.tokenizer().save_pretrained(directory)
    return tiny_mtp.add_mtp(directory, dtype=torch.bfloat16)


def settings_of(checkpoint: Path, **changes) -> TorchTrainerSettings:
    given = {
        "hf_checkpoint": checkpoint,
        "initial_weights": checkpoint,
        "optimizer": OptimizerSettings(LearningRateSchedule(peak=1e-2), clip_grad=0.0),
        "loss": LossSettings(loss_type="sft_loss"),
        "takes_images": False,
    }
    return TorchTrainerSettings(**{**given, **changes})


def train(worker: TorchRankWorker) -> dict[str, float]:
    return worker.train(shares.to_train(worker, train_batches.batch(train_batches.samples(LENGTHS)))).metrics


def exported(worker: TorchRankWorker, directory: Path) -> dict[str, Tensor]:
    """Save a checkpoint, export it as --save-hf does, and return the export's tensors."""
    (directory / "iter_0000001").mkdir(parents=True)
    worker.save(directory / "iter_0000001")
    export(directory / "iter_0000001", directory / "exported")
    return tiny_mtp.tensors_of(directory / "exported")


def mtp_of(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: tensor for name, tensor in tensors.items() if name.startswith(MTP)}


def assert_same_bytes(found: dict[str, Tensor], original: dict[str, Tensor]) -> None:
    assert found.keys() == original.keys()
    for name, tensor in found.items():
        assert tensor.dtype == original[name].dtype and torch.equal(tensor, original[name]), name


def test_exports_of_a_trained_model_hold_the_original_layer(checkpoint: Path, tmp_path: Path) -> None:
    original = tiny_mtp.tensors_of(checkpoint)
    worker = TorchRankWorker(settings_of(checkpoint), World())
    train(worker)
    found = exported(worker, tmp_path)
    assert found.keys() == original.keys() and mtp_of(original)
    assert_same_bytes(mtp_of(found), mtp_of(original))
    assert not torch.equal(found["lm_head.weight"], original["lm_head.weight"])


def test_a_resumed_run_keeps_the_layer_of_its_checkpoint(checkpoint: Path, tmp_path: Path) -> None:
    """Not that of the initial weights, which may be another by then."""
    original = tiny_mtp.tensors_of(checkpoint)
    TorchRankWorker(settings_of(checkpoint), World()).save(tmp_path / "first")
    other = tmp_path / "other"
    other.mkdir()
    for file in checkpoint.iterdir():
        (other / file.name).write_bytes(file.read_bytes())
    whole = any(name.endswith("experts.gate_up_proj") for name in mtp_of(original))
    tiny_mtp.add_mtp(other, seed=5, dtype=torch.bfloat16, whole_experts=whole)
    resumed = TorchRankWorker(settings_of(other), World())
    resumed.restore(tmp_path / "first")
    train(resumed)
    assert_same_bytes(mtp_of(exported(resumed, tmp_path / "second")), mtp_of(original))


def test_a_checkpoint_without_the_layer_resumes_with_that_of_the_initial_weights(checkpoint: Path, tmp_path: Path) -> None:
    worker = TorchRankWorker(settings_of(checkpoint), World())
    worker._carried.clear()
    worker.save(tmp_path / "first")
    resumed = TorchRankWorker(settings_of(checkpoint), World())
    resumed.restore(tmp_path / "first")
    assert_same_bytes(mtp_of(exported(resumed, tmp_path / "second")), mtp_of(tiny_mtp.tensors_of(checkpoint)))


def test_a_merged_adapter_is_exported_with_the_original_layer(checkpoint: Path, tmp_path: Path) -> None:
    lora = LoraSettings(AdapterConfig(rank=4, alpha=8.0))
    worker = TorchRankWorker(settings_of(checkpoint, lora=lora), World())
    train(worker)
    (tmp_path / "saved").mkdir()
    worker.save(tmp_path / "saved")
    assert not any(MTP in name for name in tiny_mtp.tensors_of(tmp_path / "saved" / "adapter"))
    merge_adapter(checkpoint, tmp_path / "saved" / "adapter", tmp_path / "merged")
    original, merged = (tiny_mtp.tensors_of(directory) for directory in (checkpoint, tmp_path / "merged"))
    assert merged.keys() == original.keys()
    assert_same_bytes(mtp_of(merged), mtp_of(original))
