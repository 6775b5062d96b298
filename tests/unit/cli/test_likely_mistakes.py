"""Tests of the warnings of `fuligo train`."""

import json
from pathlib import Path

import pytest

from fuligo.cli.preflight import likely_mistakes
from fuligo.config.command_line import parse
from tests import tiny
from tests.unit.cli.test_preflight import saved


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_checkpoint(tmp_path_factory.mktemp("model"))


def test_a_megatron_on_the_python_path_is_warned_of(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("PYTHONPATH", raising=False)
    (tmp_path / "megatron" / "core").mkdir(parents=True)
    (tmp_path / "megatron" / "core" / "__init__.py").touch()

    def warnings(path: Path, backend: str = "megatron") -> list[str]:
        env = json.dumps({"PYTHONPATH": f"/nowhere:{path}"})
        return likely_mistakes(parse(["--hf-checkpoint", str(model), "--train-backend", backend, "--env", env]).config)

    (warning,) = warnings(tmp_path)
    assert f"{tmp_path}, whose megatron.core replaces the installed Megatron-Core" in warning
    assert warnings(tmp_path / "megatron") == warnings(tmp_path, "torch") == []
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    assert likely_mistakes(parse(["--hf-checkpoint", str(model), "--train-backend", "megatron"]).config) == [warning]
    assert warnings(Path("/elsewhere")) == [warning], "ranks also import from the inherited path"


def test_a_load_without_checkpoints_is_warned_of_unless_the_run_makes_them_there(model: Path, tmp_path: Path):
    def warnings(*more: object) -> list[str]:
        return likely_mistakes(parse(["--hf-checkpoint", str(model), "--run-dir", str(tmp_path), *map(str, more)]).config)

    assert warnings() == warnings("--load", tmp_path / "checkpoints") == []
    assert warnings("--load", tmp_path / "own", "--save", tmp_path / "own") == []
    misspelt, saved_to = tmp_path / "chekpoints", tmp_path / "checkpoints"
    begins_anew = f"--load {misspelt} holds no checkpoint: the run starts from scratch and saves to {saved_to}"
    assert warnings("--load", tmp_path / "chekpoints") == [begins_anew]
    saved(model, tmp_path / "chekpoints", 1)
    assert warnings("--load", tmp_path / "chekpoints") == []


def test_recorded_steps_that_a_run_without_a_checkpoint_discards_are_warned_of(model: Path, tmp_path: Path):
    config = parse(["--hf-checkpoint", str(model), "--run-dir", str(tmp_path), "--load", str(tmp_path / "checkpoints")]).config
    (tmp_path / "metrics.jsonl").write_text("")
    assert likely_mistakes(config) == []
    (tmp_path / "metrics.jsonl").write_text('{"step": 0}\n{"step": 1}\n')
    discards = (
        f"--load {tmp_path}/checkpoints holds no checkpoint: the run starts from scratch and discards the 2 recorded steps of {tmp_path}"
    )
    assert likely_mistakes(config) == [discards]
    saved(model, tmp_path / "checkpoints", 1)
    assert likely_mistakes(config) == []


def test_a_damaged_newest_checkpoint_does_not_stop_a_resume_from_another_one(model: Path, tmp_path: Path):
    for iteration in (1, 2):
        saved(model, tmp_path, iteration)
    (tmp_path / "iter_0000002" / "manifest.json").write_text("{")
    assert likely_mistakes(parse(["--hf-checkpoint", str(model), "--load", str(tmp_path), "--ckpt-step", "1"]).config) == []


def test_prompts_without_the_chat_template_that_the_tokenizer_has_are_warned_of(tmp_path: Path):
    def warnings(*more: str) -> list[str]:
        return likely_mistakes(parse(["--hf-checkpoint", str(tmp_path), "--prompt-data", "prompts.jsonl", *more]).config)

    tokenizer = tmp_path / "tokenizer_config.json"
    tokenizer.write_text(json.dumps({"chat_template": "{{ messages }}"}))
    (warning,) = warnings()
    assert "--apply-chat-template is not given, so prompts go to the model unchanged" in warning
    assert warnings("--apply-chat-template") == []
    tokenizer.write_text("{}")
    assert warnings() == [], "a base model without a template"
