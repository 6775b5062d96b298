"""QLoRA in the torch trainer: against PEFT on bitsandbytes' own layers, what engines receive, exact resume, conversions."""

import shutil
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, PeftModel
from torch import nn
from transformers import AutoModelForCausalLM

from fuligo.convert.merge_adapter import merge_adapter
from fuligo.engines.embedded.attention import AttentionPlan
from fuligo.engines.embedded.model import EngineModel
from fuligo.errors import CheckpointError
from fuligo.formats.adapter_config import ADAPTER, AdapterConfig
from fuligo.formats.checkpoint_files import checkpoint_weights
from fuligo.formats.quantized_base import BASE_PRECISION, BasePrecision, QuantizedBase, stored_bytes
from fuligo.formats.receiver import WeightStore
from fuligo.formats.stored_experts import StoredExperts
from fuligo.models.adapter import adapter_tensors, empty_model, lora_layers
from fuligo.models.quantized_linear import QuantizedLinear, quantizable_weights, quantized_weights, rounded
from fuligo.trainer.objective import LossSettings
from fuligo.trainer.ranks.settings import LearningRateSchedule, LoraSettings, OptimizerSettings
from fuligo.trainer.ranks.trainer import LocalTrainer
from fuligo.trainer.ranks.world import World
from fuligo.trainer.torch_backend.settings import TorchTrainerSettings
from fuligo.trainer.torch_backend.worker import TorchRankWorker
from tests import shares, tiny, train_batches
from tests.peft_oracle import logprobs_of, require_same_as_peft, save_random_adapter

pytestmark = pytest.mark.skipif(find_spec("bitsandbytes") is None, reason="the extra qlora is not installed")

LENGTHS = [(4, 9), (1, 3), (6, 9), (2, 4)]
PRECISIONS: list[BasePrecision] = ["nf4", "8bit"]
LARGEST_ERROR = {"nf4": 0.17, "8bit": 0.04}
"""Largest error of an element relative to the maximum of its block: half of the widest gap between two values of the code."""


@pytest.fixture(scope="module", params=["qwen2", "qwen3_moe", "deepseek_v3"])
def base(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a model with biases in some linear layers, one with experts, and one that also has dense layers and shared experts."""
    experts = {} if request.param == "qwen2" else {"moe_intermediate_size": 64}
    return tiny.save_checkpoint(tmp_path_factory.mktemp(request.param), request.param, initializer_range=0.05, **experts)


@pytest.fixture(scope="module")
def adapter(base: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save an adapter of random values of some layers by PEFT."""
    config = LoraConfig(r=3, lora_alpha=5, target_modules=["o_proj"])
    return save_random_adapter(base, config, tmp_path_factory.mktemp("adapter"))


def settings_of(base: Path, adapter: Path, precision: BasePrecision | None = "nf4", **overrides: Any) -> TorchTrainerSettings:
    given: dict[str, Any] = {
        "reference_weights": base,
        "optimizer": OptimizerSettings(LearningRateSchedule(peak=1e-2)),
        "lora": LoraSettings(AdapterConfig.read(adapter), initial_adapter=adapter, base_precision=precision),
        **overrides,
    }
    return TorchTrainerSettings(base, base, **given)


def with_rounded_weights(base: Path, precision: BasePrecision) -> Any:
    """Return transformers' model with quantized and dequantized linear layers, except the output layer."""
    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, attn_implementation="eager")
    storage = QuantizedBase(precision, "float32")
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and name != "lm_head":
            module.weight.data = rounded(module.weight.data, storage)
        elif name.endswith(".experts"):
            for weight in module.parameters():
                for expert in weight.data:
                    expert.copy_(rounded(expert, storage))
    return model


def with_layers_of_bitsandbytes(base: Path) -> Any:
    import bitsandbytes  # here, since it imports torch's compiler for 2 s

    model = AutoModelForCausalLM.from_pretrained(base, dtype=torch.float32, attn_implementation="eager")
    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and name != "lm_head":
            own = bitsandbytes.nn.LinearNF4(
                module.in_features,
                module.out_features,
                bias=module.bias is not None,
                compute_dtype=torch.float32,
                compress_statistics=False,
            )
            own.load_state_dict(module.state_dict())
            parent, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(parent), attribute, own.to("cpu"))
    return model


@pytest.mark.parametrize("base", ["qwen2"], indirect=True)
@pytest.mark.parametrize("recomputes", [False, True])
def test_log_probabilities_and_gradients_are_those_of_peft_on_bitsandbytes_layers(base: Path, adapter: Path, recomputes: bool) -> None:
    loss = LossSettings(loss_type="sft_loss", per_token=True)
    worker = TorchRankWorker(settings_of(base, adapter, loss=loss, gradient_checkpointing=recomputes), World())
    theirs = PeftModel.from_pretrained(with_layers_of_bitsandbytes(base), adapter, is_trainable=True)
    require_same_as_peft(worker, theirs, LENGTHS, gradient_bound=2e-5)


@pytest.mark.parametrize("precision", PRECISIONS)
def test_log_probabilities_and_gradients_are_those_of_dequantized_weights(base: Path, adapter: Path, precision: BasePrecision) -> None:
    loss = LossSettings(loss_type="sft_loss", per_token=True)
    worker = TorchRankWorker(settings_of(base, adapter, precision, loss=loss), World())
    require_same_as_peft(
        worker, PeftModel.from_pretrained(with_rounded_weights(base, precision), adapter, is_trainable=True), LENGTHS, gradient_bound=2e-5
    )
    full = AutoModelForCausalLM.from_pretrained(base)
    samples = shares.scored(worker, train_batches.samples(LENGTHS))
    for sample in samples:  # the reference is the quantized base without the adapter
        np.testing.assert_allclose(sample.ref_logprobs, logprobs_of(with_rounded_weights(base, precision), sample).detach(), atol=1e-5)
    largest = max(np.abs(sample.ref_logprobs - logprobs_of(full, sample).detach().numpy()).max() for sample in samples)
    assert largest > 1e-3, "quantized weights differ from those of the checkpoint"


@pytest.mark.usefixtures("eager")
@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("shape", [(96, 64), (33, 17), (1, 7)])
def test_a_layer_holds_few_bytes_and_is_near_its_matrix(precision: BasePrecision, shape: tuple[int, int]) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(shape[1], shape[0])
    layer = QuantizedLinear(linear, QuantizedBase(precision, "float32"))
    assert layer.packed.nbytes + layer.scales.nbytes == stored_bytes(linear.weight.numel(), precision)
    assert list(layer.state_dict()) == ["bias"]
    assert (layer.weight - linear.weight).abs().max() <= LARGEST_ERROR[precision] * linear.weight.abs().max()
    torch.testing.assert_close(layer(torch.eye(shape[1])), layer.weight.T + linear.bias)
    assert torch.equal(rounded(linear.weight, layer.base), layer.weight)


@pytest.fixture
def eager() -> Iterator[None]:
    """Prevent bitsandbytes from compiling its operation for rows that are not whole blocks, which takes 5 s of CPU time per shape."""
    with torch.compiler.set_stance("force_eager"):
        yield


@pytest.mark.parametrize(("precision", "dtype"), [("nf4", "fp32"), ("nf4", "bf16"), ("8bit", "bf16")])
@torch.no_grad()
def test_the_engine_samples_from_the_base_that_is_trained(base: Path, adapter: Path, precision: BasePrecision, dtype: Any) -> None:
    """Engines receive exactly the weights that the trainer computes with, also if these are rounded for the engines."""
    worker = TorchRankWorker(settings_of(base, adapter, precision, sync_dtype=dtype), World())
    sent = dict(worker._adapter_sender._policy.base())
    layers = quantized_weights(worker.policy.model)
    assert layers.keys() == set(quantizable_weights(empty_model(base)))
    for name, layer in layers.items():
        *experts, num_outputs, num_inputs = layer.shape
        rows, ends = torch.eye(num_inputs), None
        if experts:
            rows, ends = rows.repeat(*experts, 1), torch.arange(1, experts[0] + 1, dtype=torch.int32) * num_inputs
        weight = layer.product(rows, ends=ends).unflatten(0, (*experts, num_inputs)).transpose(-1, -2)
        torch.testing.assert_close(weight, sent[name].float(), rtol=0, atol=1e-6, msg=name)
        assert list(sent[name].shape) == [*experts, num_outputs, num_inputs]
        assert sent[name].dtype is worker.export_dtype
    full = AutoModelForCausalLM.from_pretrained(base).state_dict()
    assert sent.keys() == full.keys()
    model = EngineModel(str(base), torch.device("cpu"), torch.float32, adapter=AdapterConfig.read(adapter))
    store = WeightStore(model.module, experts=StoredExperts.APART)
    policy = worker._adapter_sender._policy
    as_stored = checkpoint_weights(policy.base(), StoredExperts.APART)
    store.load_tensors([*as_stored, *((name, tensor.float()) for name, tensor in adapter_tensors(worker.policy.model).items())], 1)
    (sample,) = train_batches.samples([(5, 20)])
    ids = torch.from_numpy(sample.tokens).long()
    logits = model.forward(ids, torch.arange(len(ids)), AttentionPlan([], [0, len(ids)]))[sample.prompt_length - 1 : -1]
    sampled = logits.log_softmax(-1).gather(1, ids[sample.prompt_length :, None])[:, 0]
    (trained,) = worker.logprobs(shares.to_score(worker, [sample]))
    # In bf16 engines also get embeddings and norms rounded, and the trainer has them in float32: that is so in every run.
    np.testing.assert_allclose(trained, sampled.numpy(), atol=1e-5 if dtype == "fp32" else 0.05)


def test_a_resume_is_exact_and_refused_with_another_precision(base: Path, adapter: Path, tmp_path: Path) -> None:
    batch = train_batches.batch(train_batches.samples(LENGTHS))
    first = TorchRankWorker(settings_of(base, adapter), World())
    first.train(shares.to_train(first, batch))
    first.save(tmp_path)
    first.train(shares.to_train(first, batch))
    assert QuantizedBase.read(tmp_path / ADAPTER) == QuantizedBase("nf4", "float32")
    again = TorchRankWorker(settings_of(base, adapter), World())
    again.restore(tmp_path)
    again.train(shares.to_train(again, batch))
    for name, tensor in adapter_tensors(first.policy.model).items():
        assert torch.equal(adapter_tensors(again.policy.model)[name], tensor), name
    for precision, words in ((None, "this run's is not quantized"), ("8bit", "this run's is in 8bit, rounded to float32")):
        other = TorchRankWorker(settings_of(base, adapter, precision), World())
        with pytest.raises(CheckpointError, match=f"was trained on a base in nf4, rounded to float32, but {words}"):
            other.restore(tmp_path)
        with pytest.raises(CheckpointError, match="it was trained on a base in nf4"):
            TorchRankWorker(settings_of(base, tmp_path / ADAPTER, precision), World())
    TorchRankWorker(settings_of(base, tmp_path / ADAPTER), World())


def test_conversions_and_engines_take_the_base_that_the_record_names(base: Path, adapter: Path, tmp_path: Path) -> None:
    worker = TorchRankWorker(settings_of(base, adapter), World())
    worker.save(tmp_path / "saved")
    saved = tmp_path / "saved" / ADAPTER
    merged = dict(worker.named_weights())
    merge_adapter(base, saved, tmp_path / "merged")
    for name, tensor in AutoModelForCausalLM.from_pretrained(tmp_path / "merged").state_dict().items():
        torch.testing.assert_close(tensor, merged[name], rtol=1e-6, atol=1e-7, msg=name)
    served = EngineModel(str(base), torch.device("cpu"), torch.float32, adapter=saved)
    weights = {name: layer.get_base_layer().weight for name, layer in lora_layers(served.module).items()}
    layers = quantized_weights(worker.policy.model)
    for name, weight in weights.items():
        assert torch.equal(weight, layers[f"{name}.weight"].weight), name
    theirs = PeftModel.from_pretrained(with_rounded_weights(base, "nf4"), saved)
    ids = torch.arange(5, 25)
    logits = served.forward(ids, torch.arange(len(ids)), AttentionPlan([], [0, len(ids)]))
    torch.testing.assert_close(logits, theirs(input_ids=ids[None]).logits[0].float(), rtol=1e-4, atol=1e-4)


# the shared experts and dense layers of "deepseek_v3" are of the kinds that the other two have
@pytest.mark.long
@pytest.mark.parametrize("base", ["qwen2", "qwen3_moe", pytest.param("deepseek_v3", marks=pytest.mark.slow)], indirect=True)
@pytest.mark.usefixtures("warm_children")
async def test_two_ranks_train_as_one(base: Path, adapter: Path) -> None:
    samples = train_batches.samples([*LENGTHS, (3, 7), (2, 8)])
    results = {}
    for num_ranks in (1, 2):
        trainer = LocalTrainer(settings_of(base, adapter, num_ranks=num_ranks))
        await trainer.load()
        for _ in range(2):
            result = await trainer.train(train_batches.batch(samples))
        results[num_ranks] = result
        await trainer.close()
    for name in ("train/loss", "train/grad_norm", "train/entropy"):
        assert results[2].metrics[name] == pytest.approx(results[1].metrics[name], rel=1e-5), name
    for position, score in results[1].scores.items():
        np.testing.assert_allclose(results[2].scores[position].logprobs, score.logprobs, atol=1e-5)


@pytest.mark.parametrize("change", [{"precision": "nf3"}, {"block_size": 128}, {"dtype": "int8"}, {"precision": None}])
def test_damaged_records_are_refused(adapter: Path, tmp_path: Path, change: dict[str, Any]) -> None:
    shutil.copytree(adapter, tmp_path, dirs_exist_ok=True)
    replace(QuantizedBase("nf4", "bfloat16"), **change).write(tmp_path)
    with pytest.raises(CheckpointError, match=BASE_PRECISION):
        QuantizedBase.read(tmp_path)
    (tmp_path / BASE_PRECISION).write_text("{")
    with pytest.raises(CheckpointError, match=BASE_PRECISION):
        QuantizedBase.read(tmp_path)
