"""The embedded engine and the torch trainer rotate as much of each head as config.json states, as SGLang does."""

import json
from pathlib import Path

import torch

from fuligo.engines.embedded.model import EngineModel
from fuligo.models.modules import take_stated_rotation
from fuligo.trainer.torch_backend.model import load_model
from tests import tiny


def test_minimax_rotates_rotary_dim_of_each_head(tmp_path: Path) -> None:
    """The published config.json states it; transformers 5.12.1 does not read it."""
    directory = tiny.save_checkpoint(tmp_path, "minimax_m2", head_dim=16, rope_theta=100.0)
    config = directory / "config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"rotary_dim": 8}))
    engine = EngineModel(str(directory), torch.device("cpu"), torch.float32).module
    for model in (load_model(directory), engine):
        (embedding,) = [module for module in model.modules() if hasattr(module, "inv_freq")]
        expected = 100.0 ** -(torch.arange(4) / 4)
        torch.testing.assert_close(embedding.inv_freq, expected)
        torch.testing.assert_close(embedding.original_inv_freq, expected)


def test_a_model_that_states_no_rotation_is_not_changed() -> None:
    assert take_stated_rotation(tiny.model("minimax_m2")) == take_stated_rotation(tiny.model("qwen3")) == 0
