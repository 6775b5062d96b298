"""Tests of the checks of files and directories before a start."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from fuligo.cli.preflight import preflight_problems
from fuligo.config.command_line import parse
from fuligo.convert.hf_to_dist import hf_to_dist
from fuligo.formats.checkpoint_files import TRACKER
from fuligo.formats.disk import replace_text
from fuligo.formats.file_manifest import write_manifest
from fuligo.trainer.ranks.world import World
from tests import tiny


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def dist(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write a distributed checkpoint with the tracker file of a conversion."""
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
    assert f"{file} has" in problem and "expected" in problem


@pytest.mark.parametrize("option", ["--ref-load", "--load"])
def test_one_that_does_not_say_of_which_model_it_is(model: Path, dist: Path, tmp_path: Path, option: str):
    other = Path(shutil.copytree(dist, tmp_path / "other"))
    (other / "release" / "manifest.json").unlink()
    shutil.rmtree(other / "release" / "model")
    (problem,) = problems(model, option, other, "--train-backend", "megatron")
    assert f"{option} {other / 'release'} is incomplete, or not a distributed checkpoint written by fuligo" in problem
    assert f"{other / 'release' / 'model' / 'config.json'} is missing" in problem


def test_an_export_replaces_neither_what_the_run_reads_nor_what_is_no_export(model: Path, tmp_path: Path):
    (problem,) = problems(model, "--save-hf", model)
    assert f"--save-hf {model} would replace the checkpoint of --hf-checkpoint" in problem
    (tmp_path / "home").mkdir()
    (tmp_path / "home" / "notes.txt").touch()
    (problem,) = problems(model, "--save-hf", tmp_path / "home")
    assert f"{tmp_path / 'home'}: it is not a Hugging Face directory" in problem
    assert problems(model, "--save-hf", tmp_path / "new") == []


def test_a_template_that_the_tokenizer_lacks_is_missed_before_any_engine_starts(model: Path, tmp_path: Path):
    bare = Path(shutil.copytree(model, tmp_path / "bare"))
    settings = json.loads((bare / "tokenizer_config.json").read_text())
    (bare / "chat_template.jinja").unlink(missing_ok=True)
    (bare / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": None}))
    assert problems(model, "--apply-chat-template") == problems(bare) == []
    (problem,) = problems(bare, "--apply-chat-template")
    assert f"--apply-chat-template: the tokenizer of {bare} has no chat template; use a chat model" in problem
    (bare / "chat_template.jinja").write_text("{{ messages }}")
    assert problems(bare, "--apply-chat-template") == []
    (bare / "chat_template.jinja").unlink()
    assert problems(bare, "--apply-chat-template", "--apply-chat-template-kwargs", '{"chat_template": "{{ messages }}"}') == []
    (bare / "tokenizer_config.json").write_text(json.dumps({**settings, "chat_template": None, "auto_map": {"AutoTokenizer": "own.py"}}))
    assert problems(bare, "--apply-chat-template") == [], "code of its own may bring one"


def engine_problems(model: Path, *more: object) -> list[str]:
    config = parse(["--hf-checkpoint", str(model), "--num-rollout", "1", "--run-dir", str(model.parent / "run"), *map(str, more)]).config
    return preflight_problems(config)


def test_engines_that_cannot_start_for_want_of_sglang(model: Path, tmp_path: Path):
    python = tmp_path / "python"
    engines = ["--rollout-num-gpus", 1, "--actor-num-gpus-per-node", 1, "--engine-python", python]
    python.write_text('#!/bin/sh\necho \'{"sglang": "0.5", "sglang-router": null}\'\n')
    python.chmod(0o755)
    (problem,) = engine_problems(model, *engines)
    assert f"{python} has no sglang-router; install" in problem and "--engine-python" in problem
    assert engine_problems(model, *engines, "--launcher", "ray") == [], "nodes of a cluster have their own"
    python.unlink()
    (problem,) = engine_problems(model, *engines)
    assert f"{python} has no sglang and no sglang-router" in problem


def test_a_model_whose_class_sglang_could_not_find(model: Path, tmp_path: Path):
    engines = ["--rollout-num-gpus", 1, "--actor-num-gpus-per-node", 1, "--launcher", "ray"]
    settings = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps({name: value for name, value in settings.items() if name != "architectures"}))
    (problem,) = engine_problems(model, *engines)
    assert f"{model}/config.json does not name the class of the model" in problem and '"architectures": ["..."]' in problem
    assert engine_problems(model) == [], "the embedded engine goes by the model_type"


def saved(model: Path, directory: Path, iteration: int) -> Path:
    """Write the parts of a torch trainer's checkpoint that the checks read."""
    directory = directory / f"iter_{iteration:07d}"
    shutil.copytree(model, directory / "hf")
    write_manifest(directory)
    replace_text(directory.parent / TRACKER, str(iteration))
    return directory


def test_a_run_that_has_nothing_left_to_do_ends_before_anything_starts(model: Path, tmp_path: Path):
    done = saved(model, tmp_path, 2)
    assert problems(model, "--load", tmp_path, "--num-rollout", 3) == []
    (problem,) = problems(model, "--load", tmp_path, "--num-rollout", 2)
    assert problem == f"cannot resume {done}: the run is complete (2 of 2 rollouts); raise --num-rollout to continue"


def test_rows_that_the_reward_cannot_judge_are_refused_unless_a_hook_judges(model: Path, tmp_path: Path):
    file = tmp_path / "choices.jsonl"
    file.write_text('{"input": "Which?", "label": "A"}\n{"input": "Which?", "label": "green"}\n')

    def found(*more: str) -> list[str]:
        common = ["--hf-checkpoint", str(model), "--num-rollout", "1", "--run-dir", str(tmp_path / "run"), "--label-key", "label"]
        return preflight_problems(parse([*common, *more]).config)

    refused = "choices.jsonl, line 2: --rm-type gpqa: the label is 'green', but it must be A, B"
    (problem,) = found("--prompt-data", str(file), "--rm-type", "gpqa")
    assert problem.startswith("--prompt-data: ") and refused in problem and "--skip-bad-rows" in problem
    (problem,) = found("--prompt-data", f"{file}@[:1]", "--rm-type", "gpqa", "--eval-prompt-data", str(file))
    assert problem.startswith("evaluation data set aime: ") and refused in problem
    for more in (["--rm-type", "f1"], ["--rm-type", "gpqa", "--skip-bad-rows"], ["--rm-type", "gpqa", "--loss-type", "sft_loss"]):
        assert found("--prompt-data", str(file), *more) == []


def test_stop_tokens_are_the_models(model: Path):
    size = json.loads((model / "config.json").read_text())["vocab_size"]
    assert problems(model, "--rollout-stop-token-ids", size - 1) == []
    (problem,) = problems(model, "--rollout-stop-token-ids", 0, size)
    assert problem == f"--rollout-stop-token-ids {size}: the model's {size} tokens end at {size - 1}; correct them"


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


def test_a_served_teacher_speaks_as_the_student_does(model: Path, tmp_path: Path):
    other = tiny.save_checkpoint(tmp_path / "other", vocab_size=399)
    (tmp_path / "engines.yaml").write_text(
        f"sglang: [{{server_groups: [{{num_gpus: 1}}]}}, {{name: teacher, model_path: {other}, server_groups: [{{num_gpus: 1}}]}}]"
    )
    served = ("--sglang-config", tmp_path / "engines.yaml", "--rollout-backend", "sglang", "--rollout-num-gpus", 2)
    config = parse(["--hf-checkpoint", str(model), "--num-rollout", "1", "--use-opd", *map(str, served)]).config
    assert [problem for problem in preflight_problems(config) if problem.startswith("the model teacher of --sglang-config: ")]


def test_evaluation_beside_a_teacher_alone_has_rewards_of_its_own(model: Path, tmp_path: Path):
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"input": "1 + 1", "label": "2"}\n')
    judged = {"name": "judged", "path": str(prompts), "rm_type": "math", "label_key": "label"}
    (tmp_path / "eval.yaml").write_text(json.dumps({"eval": {"datasets": [judged, {"name": "open", "path": str(prompts)}]}}))
    (problem,) = problems(model, "--use-opd", "--opd-teacher-load", model, "--eval-config", tmp_path / "eval.yaml")
    assert problem.startswith("evaluation data set open: its responses have no reward")


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
