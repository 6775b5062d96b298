"""The embedded engine and the torch trainer use one epsilon for all norms, as SGLang and Megatron do."""

from pathlib import Path

import pytest
import torch

from fuligo.engines.embedded.model import EngineModel
from fuligo.models.modules import take_stated_epsilon
from fuligo.trainer.torch_backend.model import load_model
from tests import tiny

EPSILON = 0.05


@pytest.mark.parametrize("family", ["deepseek_v3", "glm4_moe_lite"])
def test_all_norms_have_the_epsilon_of_config_json(family: str, tmp_path: Path):
    directory = tiny.save_checkpoint(tmp_path, family, rms_norm_eps=EPSILON)
    engine = EngineModel(str(directory), torch.device("cpu"), torch.float32).module
    for model in (load_model(directory), engine):
        norms = {name: module for name, module in model.named_modules() if hasattr(module, "variance_epsilon")}
        assert any(name.endswith("kv_a_layernorm") for name in norms)
        assert {module.variance_epsilon for module in norms.values()} == {EPSILON}


def test_a_model_without_latents_is_not_changed():
    assert take_stated_epsilon(tiny.model("qwen3", rms_norm_eps=EPSILON)) == 0
