"""Names of an adapter's tensors: those of PEFT's own layers in the Hugging Face model."""

import pytest

from fuligo.errors import ConfigError
from fuligo.formats.adapter_config import AdapterConfig
from fuligo.models.adapter import adapter_tensors, add_adapter, linear_layers
from fuligo.models.adapter_names import AdapterNames
from fuligo.models.registry import names_of
from tests import tiny


@pytest.mark.parametrize("targets", [(), ("q_proj", "o_proj", "q_b_proj"), ("layers.1.self_attn.o_proj",)], ids=str)
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "glm4", "qwen3_moe", "glm4_moe", "glm4_moe_lite", "deepseek_v3"])
def test_names_and_shapes_are_those_of_peft(family: str, targets: tuple[str, ...]) -> None:
    model = tiny.model(family)
    present = {name.rpartition(".")[2] for name in linear_layers(model)}
    config = AdapterConfig(3, 6.0, tuple(target for target in targets if target.rpartition(".")[2] in present))
    names = AdapterNames.of(names_of(model.config.to_dict()), config)
    add_adapter(model, config, seed=0)
    wanted = {name: tuple(parameter.shape) for name, parameter in adapter_tensors(model).items()}
    assert {weight.checkpoint[0]: weight.shape for weight in names.weights()} == wanted
    assert set(names.kinds) == set(model.peft_config["default"].target_modules)


@pytest.mark.parametrize(
    ("family", "targets", "ranks", "message"),
    [
        ("qwen3", ("q_prj",), 1, "--lora-target-modules q_prj: .* did you mean q_proj?"),
        ("qwen3_moe", ("gate_proj",), 1, "PEFT takes this name for the experts' matrices"),
        ("qwen3", (), 4, "--tensor-model-parallel-size 4: .* use --tensor-model-parallel-size 2"),
        ("glm_moe_dsa", (), 1, "sparse attention"),
    ],
)
def test_what_cannot_be_adapted_is_refused(family: str, targets: tuple[str, ...], ranks: int, message: str) -> None:
    names = names_of(tiny.model_config(family).to_dict())
    with pytest.raises(ConfigError, match=message):
        AdapterNames.of(names, AdapterConfig(4, 8.0, targets), num_tensor_ranks=ranks)


def test_a_rank_that_no_matrix_has_is_refused() -> None:
    with pytest.raises(ConfigError, match="--lora-rank 1000000000: the widest matrix"):
        AdapterNames.of(names_of(tiny.model_config("qwen3").to_dict()), AdapterConfig(10**9, 8.0))
