"""Custom model providers: the model computes what its provider defines with the checkpoint's weights, or is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from fuligo.layout.megatron import Layout
from fuligo.trainer.megatron_backend.settings import MegatronTrainerSettings
from fuligo.trainer.objective import LossSettings
from fuligo.trainer.ranks.world import World
from fuligo.trainer.step import StepSamples
from fuligo.types import TrainBatch
from tests import shares, tiny, train_batches
from tests.megatron.gradients import assert_gradients_agree, megatron_gradients
from tests.megatron.policies import settings_of
from tests.megatron.providers import EPSILON
from tests.megatron.ranks import RankPool

LOSS = LossSettings(loss_type="sft_loss")
LENGTHS = [(4, 9), (1, 3), (6, 9), (2, 5)]
PP2 = Layout(pp=2, num_ranks=2)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_checkpoint(tmp_path_factory.mktemp("qwen3"), "qwen3", layers=4)


def batch() -> TrainBatch:
    return train_batches.batch(train_batches.samples(LENGTHS))


def provided(directory: Path, provider: str, layout: Layout = PP2) -> MegatronTrainerSettings:
    return settings_of(directory, layout, loss=LOSS, model_provider=f"tests.megatron.providers.{provider}")


def wide_norm_gradients(directory: Path) -> dict[str, Tensor]:
    """Return the gradients of transformers' model with the epsilon of the provider's final norm."""
    model: Any = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    model.model.norm.variance_epsilon = EPSILON
    step = StepSamples.of(batch(), 0, LOSS)
    for sample, weights in zip(step.samples, step.weights):
        ids = torch.from_numpy(sample.tokens).long()
        log_softmax = model(ids[None, :-1], use_cache=False).logits[0, sample.prompt_length - 1 :].log_softmax(-1)
        (-torch.from_numpy(weights) * log_softmax.gather(1, ids[sample.prompt_length :, None])[:, 0]).sum().backward()
    return {name: parameter.grad for name, parameter in model.named_parameters()}


def test_a_module_that_is_replaced_is_trained_as_it_computes(pool: RankPool, checkpoint: Path) -> None:
    got, _ = pool.run(2, megatron_gradients, provided(checkpoint, "with_wide_norm"), batch())
    assert_gradients_agree(got, wide_norm_gradients(checkpoint))


def around_a_step(world: World, settings: MegatronTrainerSettings, of: TrainBatch) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Return the exported weights before and after a step."""
    from fuligo.trainer.megatron_backend.worker import MegatronRankWorker

    worker = MegatronRankWorker(settings, world)
    before = {name: tensor.clone() for name, tensor in worker.named_weights()}
    worker.train(shares.to_train(worker, of))
    return before, {name: tensor.clone() for name, tensor in worker.named_weights()}


def test_its_weights_are_the_checkpoints_and_come_out_trained(pool: RankPool, checkpoint: Path) -> None:
    (before, after), _ = pool.run(2, around_a_step, provided(checkpoint, "with_wide_norm"), batch())
    stored = load_file(checkpoint / "model.safetensors")
    assert before.keys() == after.keys() == stored.keys()
    assert all(torch.equal(before[name], tensor) for name, tensor in stored.items())
    assert not torch.equal(after["model.norm.weight"], before["model.norm.weight"])


@pytest.mark.parametrize(
    ("provider", "message"),
    [
        ("bare_module", r"returns an object of type Linear; it must return a PolicyModel"),
        ("whole_model", r"returns a stage with (post_process|pre_process)=True instead of False"),
        ("with_gate", r"has weights that are not in the checkpoint: decoder\.layers\.0\.mlp\.gate\.weight"),
        ("without_last_layer", r"lacks weights of the checkpoint: decoder\.layers\.3\.\S+ decoder\.layers\.3\.\S+ .* and \d+ more"),
    ],
)
def test_a_model_that_does_not_fit_is_refused(pool: RankPool, checkpoint: Path, provider: str, message: str) -> None:
    with pytest.raises(AssertionError, match=rf"(?s)ConfigError: --custom-model-provider-path \S*{provider}:? .*{message}"):
        pool.run(2, around_a_step, provided(checkpoint, provider), batch())
