"""Names of an adapter's tensors: those of PEFT's own layers in the Hugging Face model."""

import pytest

from fuligo.errors import ConfigError
from fuligo.formats.adapter_config import AdapterConfig, is_target
from fuligo.models.adapter import adapter_tensors, add_adapter, linear_layers, peft_targets
from fuligo.models.adapter_names import AdapterNames, PeftTargets
from fuligo.models.registry import names_of
from tests import tiny

TARGETS = [
    (),
    ("q_proj", "o_proj", "q_b_proj"),
    ("layers.1.self_attn.o_proj",),
    ("o_proj", "shared_experts.up_proj", "layers.0.mlp.down_proj"),
]


@pytest.mark.parametrize("targets", TARGETS, ids=str)
@pytest.mark.parametrize("family", ["qwen2", "qwen3", "glm4", "qwen3_moe", "glm4_moe", "glm4_moe_lite", "deepseek_v3"])
def test_names_and_shapes_are_those_of_peft(family: str, targets: tuple[str, ...]) -> None:
    model = tiny.model(family)
    present = [target for target in targets if any(is_target(name, target) for name in linear_layers(model))]
    config = AdapterConfig(3, 6.0, tuple(present))
    names = AdapterNames.of(names_of(model.config.to_dict()), config)
    targets_of_model = peft_targets(model, config)
    add_adapter(model, config, seed=0)
    wanted = {name: tuple(parameter.shape) for name, parameter in adapter_tensors(model).items()}
    assert {weight.checkpoint[0]: weight.shape for weight in names.weights()} == wanted
    assert names.peft_targets == targets_of_model


def test_layers_with_names_of_experts_are_parameters_for_peft() -> None:
    """Those that are adapted in all layers by the end of their name."""
    model = tiny.model("glm4_moe", layers=3, first_k_dense_replace=1)
    every = peft_targets(model, AdapterConfig(3, 6.0))
    kinds = ("down_proj", "gate_proj", "up_proj")
    assert every.modules == ["k_proj", "o_proj", "q_proj", "v_proj"]
    assert every.parameters == [f"{block}.{kind}.weight" for block in ("mlp", "shared_experts") for kind in kinds]
    some = AdapterConfig(3, 6.0, ("q_proj", "2.mlp.shared_experts.up_proj", "mlp.gate_proj"))
    assert peft_targets(model, some) == PeftTargets(
        ["q_proj"], ["mlp.gate_proj.weight", "model.layers.2.mlp.shared_experts.up_proj.weight"]
    )
    with pytest.raises(ConfigError, match=r"dropout 0\.1: PEFT does not support dropout for the MLPs of an MoE model"):
        peft_targets(model, AdapterConfig(3, 6.0, dropout=0.1))
    with pytest.raises(ConfigError, match="such as its experts; use dropout 0"):
        peft_targets(model, AdapterConfig(3, 6.0, ("q_proj",), dropout=0.1, adapts_experts=True))


@pytest.mark.parametrize(
    ("family", "targets", "ranks", "message"),
    [
        ("qwen3", ("q_prj",), 1, "target module q_prj: .* did you mean q_proj?"),
        ("qwen3_moe", ("gate_proj",), 1, "qwen3_moe has no linear layer of this name"),
        ("qwen3", (), 4, "--tensor-model-parallel-size 4: .* use --tensor-model-parallel-size 2"),
        ("glm_moe_dsa", (), 1, "sparse attention"),
    ],
)
def test_what_cannot_be_adapted_is_refused(family: str, targets: tuple[str, ...], ranks: int, message: str) -> None:
    names = names_of(tiny.model_config(family).to_dict())
    with pytest.raises(ConfigError, match=message):
        AdapterNames.of(names, AdapterConfig(4, 8.0, targets), num_tensor_ranks=ranks)


def test_a_rank_that_no_matrix_has_is_refused() -> None:
    with pytest.raises(ConfigError, match="rank 1000000000 exceeds the 128 inputs or outputs"):
        AdapterNames.of(names_of(tiny.model_config("qwen3").to_dict()), AdapterConfig(10**9, 8.0))
