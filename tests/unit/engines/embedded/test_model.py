import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from fuligo.engines.embedded.kv_cache import LayerShape
from fuligo.engines.embedded.model import MEAN_DIFFERENCE, EngineModel
from fuligo.errors import ConfigError, EngineError, FuligoError
from fuligo.formats.hugging_face import read_config_json
from fuligo.formats.receiver import WeightStore
from fuligo.formats.stored_experts import StoredExperts
from fuligo.models.registry import architecture_of
from fuligo.planner.memory.engine import cached_elements_per_token
from tests import tiny
from tests.megatron.prediction_fixture import PredictingModel

CPU = torch.device("cpu")


def load(path: Path) -> EngineModel:
    return EngineModel(str(path), CPU, torch.float32)


def test_what_the_engine_knows_of_a_model(engine_model: EngineModel) -> None:
    assert engine_model.end_ids == {tiny.EOS_ID}
    assert (engine_model.vocab_size, engine_model.context_length) == (400, 1024)
    shape = engine_model.cache_shape
    assert shape.shapes == (LayerShape(num_heads=2, key_dim=16, value_dim=16),) * 2


def test_a_directory_that_holds_no_model_is_an_error_of_the_user(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"no config\.json"):
        load(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match=str(tmp_path)):
        load(tmp_path)
    tiny.save_checkpoint(tmp_path)
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    save_file({name: tensor for name, tensor in tensors.items() if "layers.1.mlp.up" not in name}, file, metadata={"format": "pt"})
    with pytest.raises(ConfigError, match=r"weights are missing: model\.layers\.1\.mlp\.up_proj\.weight"):
        load(tmp_path)
    file.write_bytes(b"short")
    with pytest.raises(ConfigError, match="cannot load"):
        load(tmp_path)


@pytest.mark.parametrize(
    ("family", "overrides", "cause"),
    [
        ("gemma2", {"attn_logit_softcapping": 5.0, "head_dim": 16}, "soft-capped"),
        ("glm_moe_dsa", {"index_topk": 64}, "deepseek_sparse_attention"),  # dense below 64 tokens
        ("deepseek_v32", {"index_topk": 64}, "deepseek_sparse_attention"),
        ("glm_moe_dsa", {"index_topk": 64, "layer_types": ["full_attention"] * 2}, "keys selected by an indexer"),
        ("bloom", {"n_head": 4}, "does not support|cannot serve"),
        ("mamba", {}, "does not support|cannot serve"),
        ("nemotron_h", {"layers_block_type": ["mamba", "attention"]}, "from one packed sample to the next"),
    ],
)
def test_a_model_that_would_be_served_wrong_is_refused(tmp_path: Path, family: str, overrides: dict[str, object], cause: str) -> None:
    tiny.save_checkpoint(tmp_path, family, **overrides)
    with pytest.raises(FuligoError, match=cause) as raised:
        load(tmp_path)
    assert "--rollout-backend" not in str(raised.value).replace("in a run, --rollout-backend", ""), "`fuligo serve` has no such flag"


@pytest.mark.parametrize("is_wrong", [False, True])
def test_a_model_that_rounds_much_in_half_precision_is_served_if_its_attention_is_right(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_wrong: bool
) -> None:
    """With a bound below the rounding of transformers' own implementations, as the usual one is on some tokens of SmolLM2-135M."""
    monkeypatch.setitem(MEAN_DIFFERENCE, torch.bfloat16, 1e-3)
    lm = tiny.model("llama")
    with torch.no_grad():
        for parameter in lm.parameters():
            if parameter.dim() > 1:
                parameter.mul_(4.0)
    lm.save_pretrained(tmp_path)
    forward = EngineModel.forward

    def shifted(self: EngineModel, ids: torch.Tensor, positions: torch.Tensor, *rest: object, **given: object) -> torch.Tensor:
        return forward(self, ids, positions // 2, *rest, **given)

    if is_wrong:
        monkeypatch.setattr(EngineModel, "forward", shifted)
        with pytest.raises(EngineError, match="attention differ from those with the model's own"):
            EngineModel(str(tmp_path), CPU, torch.bfloat16)
        return
    EngineModel(str(tmp_path), CPU, torch.bfloat16)
    monkeypatch.setattr("fuligo.engines.embedded.model.NOISE_FACTOR", 0.0)
    with pytest.raises(EngineError, match="attention differ"):
        EngineModel(str(tmp_path), CPU, torch.bfloat16)


def test_a_model_with_a_vision_tower_is_refused_with_the_way_out(tmp_path: Path) -> None:
    text = tiny.model_config("qwen3_moe").to_dict()
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "qwen3_vl_moe", "text_config": text, "vision_config": {"depth": 1}}))
    with pytest.raises(EngineError, match="it has a tower that fuligo does not know; save its language model by itself"):
        load(tmp_path)


def test_rotary_scaling_that_looks_at_the_whole_batch_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    config = json.loads((checkpoint / "config.json").read_text())
    config["rope_parameters"] = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}
    (tmp_path / "config.json").write_text(json.dumps(config))
    with pytest.raises(EngineError, match="dynamic"):
        load(tmp_path)


def test_a_model_without_tokenizer_is_served_without_text(checkpoint: Path, tmp_path: Path) -> None:
    tiny.model().save_pretrained(tmp_path)
    assert load(tmp_path).tokenizer is None


def test_prediction_layers_are_left_and_named(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    predicting = PredictingModel.random("glm4_moe_lite")
    predicting.save(tmp_path)
    with caplog.at_level("INFO"):
        model = load(tmp_path)
    assert "skipping the weights of 1 MTP layer, which this engine does not use (model.layers.2.)" in caplog.text
    held = dict(model.module.named_parameters())
    assert held.keys() == dict(predicting.trunk.named_parameters()).keys()
    assert all(torch.equal(held[name], parameter) for name, parameter in predicting.trunk.named_parameters())


@pytest.mark.parametrize(
    ("family", "overrides"), [("qwen3_moe", {}), ("glm4_moe_lite", {"v_head_dim": 28}), ("deepseek_v3", {"v_head_dim": 12})]
)
def test_the_planner_counts_what_the_cache_holds(tmp_path: Path, family: str, overrides: dict[str, object]) -> None:
    tiny.save_checkpoint(tmp_path, family, **overrides)
    planned = cached_elements_per_token(architecture_of(read_config_json(tmp_path)))
    assert load(tmp_path).cache_shape.bytes_per_token(torch.float32) == 4 * planned


@pytest.mark.parametrize("family", ["qwen3_next", "qwen3_5_text"])
def test_decay_rates_are_loaded_exactly(family: str, tmp_path: Path) -> None:
    """In half precision they would differ from those that a trainer sends in float32."""
    paths = [tiny.save_checkpoint(tmp_path / str(seed), family, seed=seed) for seed in range(2)]
    model = EngineModel(str(paths[0]), CPU, torch.bfloat16)
    for path in paths:
        WeightStore(model.module, experts=StoredExperts.APART).load_directory(str(path), 1)
        stored = load_file(path / "model.safetensors")
        rates = {name: value for name, value in model.module.state_dict().items() if name.endswith("A_log")}
        assert rates and all(value.dtype == torch.float32 and torch.equal(value, stored[name]) for name, value in rates.items())
