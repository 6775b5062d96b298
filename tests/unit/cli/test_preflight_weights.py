"""Tests of the checks before a start of weights other than the model's own: distributed checkpoints, teachers, value models."""

import json
import shutil
from pathlib import Path

import pytest

from fuligo.convert.hf_to_dist import hf_to_dist
from fuligo.trainer.ranks.world import World
from tests import tiny
from tests.unit.cli.test_preflight import model, problems

__all__ = ["model"]


@pytest.fixture(scope="module")
def dist(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a distributed checkpoint with the tracker file of a conversion."""
    directory = tmp_path_factory.mktemp("dist")
    hf_to_dist(model, directory, World())
    return directory


@pytest.mark.parametrize("option", ["--ref-load", "--load"])
def test_only_the_megatron_trainer_reads_distributed_checkpoints(model: Path, dist: Path, option: str):
    assert problems(model, option, dist, "--train-backend", "megatron") == []
    assert problems(model, option, dist / "release", "--train-backend", "megatron") == []
    (problem,) = problems(model, option, dist)
    assert f"{option} {dist / 'release'} is a distributed checkpoint" in problem
    assert f"fuligo convert dist-to-hf {dist / 'release'} --save DIR" in problem


@pytest.mark.parametrize("option", ["--ref-load", "--load"])
def test_a_distributed_checkpoint_of_another_model_is_refused(model: Path, dist: Path, tmp_path: Path, option: str):
    other = Path(shutil.copytree(dist, tmp_path / "other"))
    config = other / "release" / "model" / "config.json"
    config.write_text(json.dumps({**json.loads(config.read_text()), "hidden_size": 32}))
    (other / "release" / "manifest.json").unlink()
    (problem,) = problems(model, option, other, "--train-backend", "megatron")
    assert "are different models: hidden_size" in problem


def test_damage_is_seen_before_anything_starts(model: Path, dist: Path, tmp_path: Path):
    cut = Path(shutil.copytree(dist, tmp_path / "cut"))
    file = next((cut / "release").glob("*.distcp"))
    file.write_bytes(file.read_bytes()[:-1])
    (problem,) = problems(model, "--ref-load", cut, "--train-backend", "megatron")
    assert f"{file} has" in problem and "expected" in problem


@pytest.mark.parametrize("option", ["--ref-load", "--load"])
def test_a_distributed_checkpoint_without_its_models_config_is_refused(model: Path, dist: Path, tmp_path: Path, option: str):
    other = Path(shutil.copytree(dist, tmp_path / "other"))
    (other / "release" / "manifest.json").unlink()
    shutil.rmtree(other / "release" / "model")
    (problem,) = problems(model, option, other, "--train-backend", "megatron")
    assert f"{option} {other / 'release'} is incomplete, or not a distributed checkpoint written by fuligo" in problem
    assert f"{other / 'release' / 'model' / 'config.json'} is missing" in problem


def test_a_teacher_is_read_before_anything_starts(model: Path, dist: Path, tmp_path: Path):
    other = tiny.save_checkpoint(tmp_path / "other", layers=1)
    words = json.loads((other / "tokenizer.json").read_text())
    strange = Path(shutil.copytree(other, tmp_path / "strange"))
    words["added_tokens"][0]["content"] = "<nothing>"
    (strange / "tokenizer.json").write_text(json.dumps(words))
    opd = ("--use-opd", "--opd-teacher-load")
    megatron = ("--train-backend", "megatron")
    assert problems(model, *opd, other) == problems(model, *opd, model, *megatron) == problems(model, *opd, dist, *megatron) == []
    for more, text in (
        ((tmp_path / "none",), f"--opd-teacher-load: {tmp_path / 'none'}"),
        ((dist,), "is a distributed checkpoint, which the Megatron trainer reads"),
        ((strange,), "have different tokenizers: 0 is '<nothing>' and '<pad>'"),
        ((other, *megatron), "are different models: num_hidden_layers 1 and 2; the Megatron trainer swaps it with the policy"),
    ):
        (problem,) = problems(model, *opd, *more)
        assert text in problem


def test_first_weights_of_a_value_model_are_of_the_policys_model(model: Path, dist: Path, tmp_path: Path):
    ppo = ("--advantage-estimator", "ppo", "--critic-load")
    values = tiny.save_value_model(tmp_path / "values")
    tiny.tokenizer().save_pretrained(values)
    assert problems(model, *ppo, values) == problems(model, *ppo, model) == []
    (problem,) = problems(model, "--ref-load", values)
    assert "lm_head.weight has shape [1, 64]" in problem, "a value model is no policy"
    assert problems(model, *ppo, dist, "--train-backend", "megatron") == []
    (problem,) = problems(model, *ppo, dist)
    assert f"--critic-load {dist / 'release'} is a distributed checkpoint" in problem
    (problem,) = problems(model, *ppo, tmp_path / "nowhere")
    assert "--critic-load: " in problem and "does not exist" in problem
    other = tiny.save_checkpoint(tmp_path / "other", layers=1)
    (problem,) = problems(model, *ppo, other)
    assert "--critic-load: " in problem and "are different models: num_hidden_layers 1 and 2" in problem
