"""MTP layers of Qwen3-Next and Qwen3.5: trained as in plain torch without packing, or kept as they are in checkpoints and exports."""

from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor

from fuligo.convert.export import export
from fuligo.convert.merge_adapter import merge_adapter
from fuligo.errors import CheckpointError, ConfigError
from fuligo.formats.adapter_config import AdapterConfig
from fuligo.models.mtp import mtp_module
from fuligo.trainer.mtp import MTPTraining
from fuligo.trainer.objective import KlLoss, LossSettings
from fuligo.trainer.packing import Capacity
from fuligo.trainer.ranks.settings import LearningRateSchedule, LoraSettings, OptimizerSettings, TrainedParameters
from fuligo.trainer.ranks.trainer import LocalTrainer
from fuligo.trainer.ranks.world import World
from fuligo.trainer.step import StepSamples
from fuligo.trainer.torch_backend.critic import load_value_model
from fuligo.trainer.torch_backend.model import load_model
from fuligo.trainer.torch_backend.settings import TorchTrainerSettings
from fuligo.trainer.torch_backend.worker import TorchRankWorker
from tests import shares, tiny, tiny_mtp, tiny_vision, train_batches
from tests.float64 import assert_gradients_agree, float32_bound, in_float64, use_delta_rule

LENGTHS = [(4, 9), (1, 3), (6, 9), (2, 1), (5, 14), (3, 9)]
"""(prompt, response) lengths; in the second and the fourth, an MTP layer would need a token before the sample."""
MTP = "mtp."
FACTOR = 0.3


SLOW = pytest.mark.slow  # the language model of qwen3_5_moe, with experts stored one by one as in qwen3_next
FAMILIES = ["qwen3_next", "qwen3_5_text", pytest.param("qwen3_5_moe_text", marks=SLOW), "qwen3_5_moe"]
one_family = pytest.mark.parametrize(
    "checkpoint",
    [pytest.param(family, marks=SLOW) for family in ("qwen3_next", "qwen3_5_moe_text", "qwen3_5_moe")] + ["qwen3_5_text"],
    indirect=True,
    scope="module",
)
"""One family for tests that depend on flags alone; families differ in the gradients of the model below the layer and in stored names."""


@pytest.fixture(scope="module", params=FAMILIES)
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


def trained_settings(checkpoint: Path, *, is_joint: bool = False, **changes) -> TorchTrainerSettings:
    return settings_of(checkpoint, has_mtp=True, mtp=MTPTraining(FACTOR, is_joint), **changes)


def gradients(settings: TorchTrainerSettings, *, is_float64: bool) -> dict[str, Tensor]:
    worker = TorchRankWorker(settings, World())
    with in_float64(worker.policy.model) if is_float64 else nullcontext():
        worker.gradients(shares.to_train(worker, train_batches.batch(train_batches.samples(LENGTHS)))[0])
    return {name: each.grad.clone() for name, each in worker.policy.model.named_parameters() if each.grad is not None}


def backward(model: tiny_mtp.PredictingModel, *, factor: float = FACTOR) -> float:
    """Run backward sample by sample; return the loss of the layer."""
    step = StepSamples.of(train_batches.batch(train_batches.samples(LENGTHS)), 0, LossSettings(loss_type="sft_loss"))
    total = 0.0
    for sample, weights in zip(step.samples, step.weights, strict=True):
        own, of_layer = (-(torch.from_numpy(weights) * found).sum() for found in model.logprobs(sample))
        (own + factor * of_layer).backward()
        total += float(of_layer.detach())
    return total


def exact_gradients(checkpoint: Path, *, factor: float = FACTOR) -> dict[str, Tensor]:
    """Return the gradients of plain torch without packing, in float64 and with the delta rule as a recurrence."""
    reference = tiny_mtp.PredictingModel(checkpoint)
    assert use_delta_rule(reference.trunk)
    with in_float64(reference.trunk, reference.layer):
        backward(reference, factor=factor)
    return reference.gradients()


def require_gradients(settings: TorchTrainerSettings, expected: dict[str, Tensor]) -> None:
    assert_gradients_agree(gradients(settings, is_float64=True), expected, bound=1e-9)
    assert_gradients_agree(gradients(settings, is_float64=False), expected, bound=float32_bound(expected))


@pytest.mark.parametrize("changes", [{"capacity": Capacity(max_tokens=34), "chunk_tokens": 5}, {"gradient_checkpointing": True}], ids=str)
def test_gradients_of_joint_training_are_those_of_plain_torch(checkpoint: Path, changes: dict) -> None:
    """In packed rows, no sample's layer sees another's tokens, and none is predicted from another sample."""
    require_gradients(trained_settings(checkpoint, is_joint=True, **changes), exact_gradients(checkpoint))


def test_otherwise_its_loss_trains_only_the_layer(checkpoint: Path) -> None:
    of_layer = {name: gradient for name, gradient in exact_gradients(checkpoint).items() if name.startswith(MTP)}
    of_model = {name: gradient for name, gradient in exact_gradients(checkpoint, factor=0.0).items() if not name.startswith(MTP)}
    assert of_layer
    require_gradients(trained_settings(checkpoint), of_model | of_layer)


@one_family
def test_its_loss_is_a_metric(checkpoint: Path) -> None:
    expected = backward(tiny_mtp.PredictingModel(checkpoint))
    worker = TorchRankWorker(trained_settings(checkpoint, temperature=0.7), World())
    assert train(worker)["train/mtp_loss"] == pytest.approx(expected, rel=1e-5)


def test_a_layer_that_is_loaded_and_not_trained_does_not_change(checkpoint: Path, tmp_path: Path) -> None:
    worker = TorchRankWorker(settings_of(checkpoint, has_mtp=True), World())
    without = TorchRankWorker(settings_of(checkpoint), World())
    assert train(worker).keys() == train(without).keys()
    original, found = tiny_mtp.tensors_of(checkpoint), exported(worker, tmp_path)
    assert found.keys() == original.keys()
    assert_same_bytes(mtp_of(found), mtp_of(original))
    expected = {name: tensor for name, tensor in exported(without, tmp_path / "without").items() if not name.startswith(MTP)}
    assert_same_bytes({name: found[name] for name in expected}, expected)


def test_a_trained_layer_is_exported_in_its_original_form_and_resumes(checkpoint: Path, tmp_path: Path) -> None:
    original = tiny_mtp.tensors_of(checkpoint)
    worker = TorchRankWorker(trained_settings(checkpoint), World())
    train(worker)
    found = exported(worker, tmp_path)
    assert {name: (tensor.shape, tensor.dtype) for name, tensor in found.items()} == {
        name: (tensor.shape, tensor.dtype) for name, tensor in original.items()
    }
    assert all(not torch.equal(tensor, original[name]) for name, tensor in mtp_of(found).items())
    resumed = TorchRankWorker(trained_settings(checkpoint), World())
    resumed.restore(tmp_path / "iter_0000001")
    assert train(resumed)["train/mtp_loss"] == train(worker)["train/mtp_loss"]
    for (name, ours), (_, theirs) in zip(resumed.named_weights(), worker.named_weights(), strict=True):
        assert torch.equal(ours, theirs), name


@one_family
def test_resuming_needs_the_flags_of_a_run_that_trained_the_layer(checkpoint: Path, tmp_path: Path) -> None:
    worker = TorchRankWorker(trained_settings(checkpoint), World())
    train(worker)
    worker.save(tmp_path / "trained")
    with pytest.raises(CheckpointError, match=r"mtp\..* is of shape .* there but absent in this run"):
        TorchRankWorker(settings_of(checkpoint), World()).restore(tmp_path / "trained")
    worker = TorchRankWorker(settings_of(checkpoint), World())
    train(worker)
    worker.save(tmp_path / "kept")
    with pytest.raises(CheckpointError, match=r"mtp\..* is (absent|of shape)"):
        TorchRankWorker(trained_settings(checkpoint), World()).restore(tmp_path / "kept")


@one_family
def test_a_layer_that_is_not_trained_cannot_be_all_that_is_chosen(checkpoint: Path) -> None:
    chosen = TrainedParameters(only=(MTP,))
    with pytest.raises(ConfigError, match="leave only parameters that are frozen anyway"):
        TorchRankWorker(settings_of(checkpoint, has_mtp=True, trained=chosen), World())
    worker = TorchRankWorker(trained_settings(checkpoint, trained=chosen), World())
    assert train(worker)["train/mtp_loss"] > 0


@one_family
def test_a_loss_that_trains_nothing_is_refused(checkpoint: Path) -> None:
    """A joint one also trains the model below the frozen layer."""
    frozen = TrainedParameters(frozen=("^mtp",))
    with pytest.raises(ConfigError, match=r"--enable-mtp-training: --freeze-params-name-list freezes all their parameters"):
        TorchRankWorker(trained_settings(checkpoint, trained=frozen), World())
    with pytest.raises(ConfigError, match=r"--enable-mtp-training: --only-train-params-name-list freezes all their parameters"):
        TorchRankWorker(trained_settings(checkpoint, trained=TrainedParameters(only=("lm_head",))), World())
    worker = TorchRankWorker(trained_settings(checkpoint, is_joint=True, trained=frozen), World())
    assert train(worker)["train/mtp_loss"] > 0


@one_family
def test_a_value_model_has_no_layer(checkpoint: Path) -> None:
    policy = load_model(checkpoint, has_mtp=True)
    assert mtp_module(policy) is not None and mtp_module(load_value_model(checkpoint, policy)) is None


@one_family
def test_the_reference_has_no_layer(checkpoint: Path, tmp_path: Path) -> None:
    changing = {"reference_weights": checkpoint, "ref_update_interval": 1, "loss": LossSettings(kl_loss=KlLoss(0.1, "k2"))}
    worker = TorchRankWorker(trained_settings(checkpoint, **changing), World())
    samples = shares.scored(worker, train_batches.samples(LENGTHS))
    worker.train(shares.to_train(worker, train_batches.batch(samples)))
    worker.save(tmp_path)
    assert not mtp_of(tiny_mtp.tensors_of(tmp_path / "reference"))
    resumed = TorchRankWorker(trained_settings(checkpoint, **changing), World())
    resumed.restore(tmp_path)


@pytest.mark.usefixtures("warm_children")
@one_family
async def test_two_ranks_train_the_layer_as_one(checkpoint: Path) -> None:
    found = []
    for num_ranks in (1, 2):
        trainer = LocalTrainer(trained_settings(checkpoint, num_ranks=num_ranks, command_timeout_s=120.0))
        await trainer.load()
        try:
            metrics = (await trainer.train(train_batches.batch(train_batches.samples(LENGTHS)))).metrics
            found.append((metrics["train/grad_norm"], metrics["train/loss"], metrics["train/mtp_loss"]))
        finally:
            await trainer.close()
    assert found[1] == pytest.approx(found[0], rel=1e-5)


def test_a_checkpoint_without_the_layer_is_refused(tmp_path: Path) -> None:
    bare = tiny.save_checkpoint(tmp_path / "bare", "qwen3_5_text")
    with pytest.raises(CheckpointError, match=r"--mtp-num-layers 1: .*bare has no MTP layer"):
        TorchRankWorker(trained_settings(bare), World())
    other = tiny.save_checkpoint(tmp_path / "other", "qwen3")
    with pytest.raises(CheckpointError, match="the torch trainer has no MTP layer for qwen3 models"):
        TorchRankWorker(trained_settings(other), World())


@pytest.mark.parametrize(
    ("name", "tensor", "problem"),
    [
        ("mtp.fc.weight", torch.zeros(64, 64), r"mtp.fc.weight has shape \[64, 64\], expected \[64, 128\]"),
        ("mtp.norm.weight", None, "mtp.norm.weight is missing"),
        ("mtp.embed_tokens.weight", torch.zeros(400, 64), "unknown tensors mtp.embed_tokens.weight"),
    ],
)
def test_other_layers_are_refused(name: str, tensor: Tensor | None, problem: str, tmp_path: Path) -> None:
    directory = tiny_mtp.add_mtp(tiny.save_checkpoint(tmp_path, "qwen3_5_text"))
    tensors = {each: held for each, held in tiny_mtp.tensors_of(directory).items() if each != name}
    save_file(tensors | ({} if tensor is None else {name: tensor}), directory / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=problem):
        TorchRankWorker(trained_settings(directory), World())
