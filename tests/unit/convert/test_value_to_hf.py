"""Export of value models: transformers computes the same values, and models that it cannot load are refused."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, AutoModelForTokenClassification, AutoTokenizer

from fuligo.cli.convert import main as convert
from fuligo.errors import CheckpointError, ConfigError
from fuligo.formats.checkpoint_files import COUNTERS, TRACKER
from fuligo.formats.disk import write_manifest
from tests import tiny

TOKENS = torch.tensor([[5, 9, 17, 4, 33, 8]])


def value_model(directory: Path, family: str = "qwen3", seed: int = 0) -> Path:
    """Save a value model as the torch trainer does."""
    tiny.save_value_model(directory, family, seed=seed, hidden=32)
    tiny.tokenizer().save_pretrained(directory)
    return directory


def checkpoints(directory: Path, *, with_values: bool = True, seed: int = 0) -> Path:
    """Save a first checkpoint of the torch trainer, limited to what conversions read."""
    first = directory / "iter_0000001"
    tiny.save_checkpoint(first / "hf", hidden=32)
    if with_values:
        value_model(first / "critic", seed=seed)
    (first / COUNTERS).write_text("{}")
    write_manifest(first)
    (directory / TRACKER).write_text("1")
    return directory


def values_of(directory: Path) -> torch.Tensor:
    """Return the values of the prefixes of `TOKENS` as the trainer computes them: the head's row times the last hidden states."""
    model = AutoModelForCausalLM.from_pretrained(directory, ignore_mismatched_sizes=True)
    (file,) = directory.glob("*.safetensors")
    with torch.no_grad():
        return model.base_model(TOKENS).last_hidden_state[0] @ load_file(file)["lm_head.weight"][0]


def exported(source: Path, target: Path) -> Path:
    assert convert(["value-to-hf", str(source), "--save", str(target)]) == 0
    return target


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "glm4", "deepseek_v3", "qwen2", "llama"])
def test_transformers_computes_the_same_values(tmp_path: Path, family: str) -> None:
    source = value_model(tmp_path / "critic", family)
    target = exported(source, tmp_path / "export")
    model, loading = AutoModelForTokenClassification.from_pretrained(target, output_loading_info=True)
    assert not any(loading[kind] for kind in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    with torch.no_grad():
        torch.testing.assert_close(model(TOKENS).logits[0, :, 0], values_of(source), atol=1e-6, rtol=1e-5)
    assert model.config.num_labels == 1
    assert AutoTokenizer.from_pretrained(target)("2+2")["input_ids"]


def test_it_is_a_reward_model_to_those_who_look_for_one(tmp_path: Path) -> None:
    """Compute the value of the last token as TRL's PPO does with its value model."""
    source = value_model(tmp_path / "critic")
    model = AutoModelForSequenceClassification.from_pretrained(exported(source, tmp_path / "export"))
    with torch.no_grad():
        torch.testing.assert_close(model(TOKENS).logits[0, 0], values_of(source)[-1], atol=1e-6, rtol=1e-5)


def test_a_checkpoint_is_asked_for_its_value_model(tmp_path: Path) -> None:
    run = checkpoints(tmp_path / "run")
    for number, given in enumerate((run, run / "iter_0000001", run / "iter_0000001" / "critic")):
        target = exported(given, tmp_path / f"export {number}")
        assert load_file(target / "model-00001-of-00001.safetensors")["score.weight"].shape == (1, 32)


def test_what_is_no_value_model_is_refused(tmp_path: Path) -> None:
    run = checkpoints(tmp_path / "run", with_values=False)
    for given in (run, run / "iter_0000001", run / "iter_0000001" / "hf"):
        with pytest.raises(CheckpointError, match=r"hf as a value model: it has an output layer of shape \[400, 32\]"):
            exported(given, tmp_path / "export")
    assert not (tmp_path / "export").exists()


def test_a_family_without_such_a_class_is_refused(tmp_path: Path) -> None:
    source = value_model(tmp_path / "critic", "glm4_moe")
    with pytest.raises(ConfigError, match=r"has no token classifier for model_type glm4_moe.*use .*critic directly with --critic-load"):
        exported(source, tmp_path / "export")
    assert not (tmp_path / "export").exists()


def test_value_models_are_compared_too(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    one = checkpoints(tmp_path / "one")
    shutil.copytree(one, tmp_path / "other")
    other = tmp_path / "other" / "iter_0000001"
    assert convert(["compare", str(one), str(other)]) == 0
    num_tensors = sum(len(load_file(other / name / "model.safetensors")) for name in ("hf", "critic"))
    assert capsys.readouterr().out == f"all {num_tensors} tensors are bitwise equal\n"
    tensors = load_file(other / "critic" / "model.safetensors")
    save_file(tensors | {"lm_head.weight": tensors["lm_head.weight"] + 1}, other / "critic" / "model.safetensors")
    assert convert(["compare", str(one), str(other)]) == 1
    assert capsys.readouterr().out.startswith("critic/lm_head.weight: 32 of 32 values differ, by up to 1\n1 of ")


def test_a_side_without_a_value_model_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Value models of two training checkpoints are compared; directories with only weights have none."""
    one, other = checkpoints(tmp_path / "one"), checkpoints(tmp_path / "other", with_values=False)
    assert convert(["compare", str(other), str(one)]) == 1
    assert capsys.readouterr().out.splitlines()[0] == f"critic: a value model is only in {one}"
    assert convert(["compare", str(one), str(other / "iter_0000001" / "hf")]) == 0


def test_config_json_says_what_the_directory_is(tmp_path: Path) -> None:
    source = value_model(tmp_path / "critic")
    config, before = (json.loads((path / "config.json").read_text()) for path in (exported(source, tmp_path / "export"), source))
    assert config["architectures"] == ["Qwen3ForTokenClassification"]
    assert {key for key in config if config[key] != before.get(key)} == {"architectures", "id2label", "label2id", "classifier_dropout"}
