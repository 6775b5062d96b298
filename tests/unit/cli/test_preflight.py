"""What the paths of a config name on disk is fit for the trainer that is asked for, or refused with what to do."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from fuligo.checkpoint.hf_to_dist import hf_to_dist
from fuligo.cli.preflight import preflight_problems
from fuligo.config.parse import parse
from fuligo.trainer.ranks.world import World
from tests import tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def dist(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With the tracker of a conversion."""
    directory = tmp_path_factory.mktemp("dist")
    hf_to_dist(model, directory, World())
    return directory


def problems(model: Path, *more: object) -> list[str]:
    sound = ["--debug-train-only", "--load-debug-rollout-data", "data", "--num-rollout", "1", "--run-dir", str(model.parent / "run")]
    return preflight_problems(parse(["--hf-checkpoint", str(model), *sound, *map(str, more)]).config)


@pytest.mark.parametrize("option", ["--ref-load", "--load"])
def test_distributed_checkpoints_are_the_megatron_trainers(model: Path, dist: Path, option: str):
    assert problems(model, option, dist, "--train-backend", "megatron") == []
    assert problems(model, option, dist / "release", "--train-backend", "megatron") == []
    (problem,) = problems(model, option, dist)
    assert f"{option} {dist / 'release'} is a distributed checkpoint" in problem
    assert f"fuligo convert dist-to-hf {dist / 'release'} --save DIR" in problem


@pytest.mark.parametrize("option", ["--ref-load", "--load"])
def test_they_are_of_the_same_model(model: Path, dist: Path, tmp_path: Path, option: str):
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
    assert f"{file} has" in problem and "were written" in problem


@pytest.mark.parametrize("option", ["--ref-load", "--load"])
def test_one_that_does_not_say_of_which_model_it_is(model: Path, dist: Path, tmp_path: Path, option: str):
    other = Path(shutil.copytree(dist, tmp_path / "other"))
    (other / "release" / "manifest.json").unlink()
    shutil.rmtree(other / "release" / "model")
    (problem,) = problems(model, option, other, "--train-backend", "megatron")
    assert f"{option} {other / 'release'} is no distributed checkpoint that fuligo wrote" in problem
    assert f"{other / 'release' / 'model' / 'config.json'} is missing" in problem


def test_an_export_replaces_neither_what_the_run_reads_nor_what_is_no_export(model: Path, tmp_path: Path):
    (problem,) = problems(model, "--save-hf", model)
    assert f"--save-hf {model} is what --hf-checkpoint reads" in problem
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "notes.txt").touch()
    (problem,) = problems(model, "--save-hf", tmp_path / "home")
    assert f"{tmp_path / 'home'} is there and is no Hugging Face directory" in problem
    assert problems(model, "--save-hf", tmp_path / "new") == []
