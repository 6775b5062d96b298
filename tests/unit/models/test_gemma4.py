"""Gemma 4's language model on the torch trainer: recomputation with shared keys and values, files, refusals."""

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

from fuligo.errors import TrainerError
from fuligo.trainer.objective import LossSettings
from fuligo.trainer.ranks.world import World
from fuligo.trainer.torch_backend.compiled_layers import can_compile
from fuligo.trainer.torch_backend.model import load_model
from fuligo.trainer.torch_backend.worker import TorchRankWorker
from tests import shares, tiny, train_batches
from tests.parity.test_torch_trainer import settings_of

DENSE = tiny.GEMMA4 | {"enable_moe_block": False}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_checkpoint(tmp_path_factory.mktemp("gemma4"), "gemma4_text", **DENSE)


def gradients(checkpoint: Path, **changes: Any) -> dict[str, torch.Tensor]:
    worker: Any = TorchRankWorker(settings_of(checkpoint, loss=LossSettings(loss_type="sft_loss"), **changes), World())
    batch = train_batches.batch(train_batches.samples([(4, 9), (1, 12), (6, 3)]))
    worker.gradients(shares.to_train(worker, batch)[0])
    return {name: weight.grad for name, weight in worker.policy.model.named_parameters() if weight.grad is not None}


def test_recomputed_layers_find_the_keys_that_they_share(checkpoint: Path) -> None:
    """A layer takes keys and values of one before it, which is recomputed later."""
    kept, recomputed = gradients(checkpoint), gradients(checkpoint, gradient_checkpointing=True)
    assert kept.keys() == recomputed.keys()
    largest = max(gradient.abs().max() for gradient in kept.values())
    assert all((recomputed[name] - gradient).abs().max() <= 1e-6 * largest for name, gradient in kept.items())


def test_a_saved_model_is_the_loaded_one_to_the_bit(checkpoint: Path, tmp_path: Path) -> None:
    """The factor of each layer's output is a buffer."""
    load_model(checkpoint).save_pretrained(tmp_path)
    before, after = load_file(checkpoint / "model.safetensors"), load_file(tmp_path / "model.safetensors")
    assert before.keys() == after.keys() and all(torch.equal(after[name], tensor) for name, tensor in before.items())
    assert "model.layers.0.layer_scalar" in after


def test_layers_that_share_keys_are_not_compiled(checkpoint: Path) -> None:
    model = AutoModelForCausalLM.from_pretrained(checkpoint)
    assert not can_compile(model)


def test_a_model_that_sees_all_tokens_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    tiny.save_checkpoint(tmp_path, "gemma4_text", **DENSE, use_bidirectional_attention="all")
    with pytest.raises(TrainerError, match="differ by"):
        TorchRankWorker(settings_of(tmp_path), World())


@pytest.mark.parametrize("family", ["gemma3", "gemma4"])
def test_the_guides_script_saves_the_language_model_alone(tmp_path: Path, family: str) -> None:
    text: Any = tiny.model_config("gemma4_text", **DENSE) if family == "gemma4" else tiny.model_config("gemma3_text")
    tower = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 2}
    sizes = {"head_dim": 16, "global_head_dim": 16} if family == "gemma4" else {"image_size": 28, "patch_size": 14}
    config = AutoConfig.for_model(family, text_config=text.to_dict(), vision_config=tower | sizes)
    whole: Any = AutoModelForImageTextToText.from_config(config)
    whole.save_pretrained(tmp_path / "whole")
    tiny.tokenizer().save_pretrained(tmp_path / "whole")
    guide = (Path(__file__).parents[3] / "docs" / "models.md").read_text()
    script = guide.partition("this script does:\n\n```python\n")[2].partition("```")[0]
    places = {"google/gemma-3-4b-it": tmp_path / "whole", "gemma-3-4b-text": tmp_path / "alone"}
    for name, place in places.items():
        script = script.replace(f'"{name}"', repr(str(place)))
    exec(script, {})
    ids = torch.tensor([[5, 6, 7]])
    with torch.no_grad():
        expected = whole.model.language_model(ids).last_hidden_state
        torch.testing.assert_close(load_model(tmp_path / "alone").model(ids, packed_cu_seqlens=(0, 3)).last_hidden_state, expected)
