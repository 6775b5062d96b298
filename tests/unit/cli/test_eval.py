"""Tests of `fuligo eval`: refused input and output paths."""

import io
import json
import shutil
from dataclasses import replace
from datetime import datetime
from pathlib import Path

import pytest

from fuligo.cli import chosen
from fuligo.cli import eval as command
from fuligo.cli.preflight import evaluation_problems
from fuligo.config import Config
from fuligo.config.command_line import parse
from fuligo.errors import ConfigError
from fuligo.job.evaluation import Evaluated, EvaluatedWeights
from fuligo.rollout.evaluate import Evaluation
from tests import tiny


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture
def given(checkpoint: Path, tmp_path: Path) -> list[str]:
    """Return the flags that an evaluation needs, without those of training."""
    (tmp_path / "test.jsonl").write_text('{"input": "1 + 1", "label": "2"}\n')
    flags = {"hf_checkpoint": checkpoint, "eval_prompt_data": tmp_path / "test.jsonl", "label_key": "label", "rm_type": "deepscaler"}
    return [str(part) for name, value in flags.items() for part in (f"--{name.replace('_', '-')}", value)]


def refused(*arguments: object) -> str:
    with pytest.raises(ConfigError) as error:
        command.main([str(argument) for argument in arguments])
    return str(error.value)


def test_help_says_what_it_takes(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--help"]) == 0
    assert "--load" in capsys.readouterr().out


def test_nothing_to_evaluate(checkpoint: Path) -> None:
    said = refused("--hf-checkpoint", checkpoint, "--rm-type", "random")
    assert said == "cannot evaluate: no dataset is given; use --eval-prompt-data, --eval-config or --eval-function-path"


def test_settings_of_micro_batches_are_not_asked_for(checkpoint: Path) -> None:
    """Packing by tokens needs --max-tokens-per-gpu only in training, so the next problem is reported."""
    said = refused("--hf-checkpoint", checkpoint, "--rm-type", "random", "--use-dynamic-batch-size")
    assert said.startswith("cannot evaluate: no dataset is given")


def test_what_a_run_of_training_would_be_refused_for_is_refused(given: list[str]) -> None:
    assert "did you mean" in refused(*given, "--eval-temprature", 1)
    assert "--rm-type nonsense is not a built-in reward" in refused(*given, "--rm-type", "nonsense")
    assert "--hf-checkpoint is missing" in refused(*given[2:])


@pytest.mark.parametrize("is_installed", [True, False])
def test_flags_of_engines_are_taken_where_sglang_is_installed(
    given: list[str], monkeypatch: pytest.MonkeyPatch, is_installed: bool
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(chosen, "nvidia_smi", lambda *arguments: "0, NVIDIA H200, 143771, 580.159, 4\n")
    monkeypatch.setattr(chosen, "package_versions", lambda names, *rest: dict.fromkeys(names, "1" if is_installed else None))
    said = refused(*given, "--engine-env", '{"NCCL_DEBUG": "INFO"}', "--eval-function-path", "no.such_function")
    assert said.startswith("--engine-env") is not is_installed
    if not is_installed:
        assert said.startswith("""--engine-env '{"NCCL_DEBUG": "INFO"}' has no effect without SGLang engines""")


def test_a_load_without_a_checkpoint(given: list[str], tmp_path: Path) -> None:
    """Check that an evaluation without a checkpoint is refused, so that the initial model is not mistaken for the trained one."""
    assert f"--load {tmp_path}/none holds no checkpoint to evaluate" in refused(*given, "--load", tmp_path / "none")


def test_every_problem_on_disk_is_named(given: list[str], tmp_path: Path) -> None:
    (tmp_path / "test.jsonl").write_text("{")
    said = refused(*given[:-2], "--custom-rm-path", "no.such", "--load", tmp_path / "none")
    assert all(part in said for part in ("evaluation dataset aime", "--load", "no.such"))


def test_engines_of_others_have_the_weights_that_they_have(given: list[str], tmp_path: Path) -> None:
    said = refused(*given, "--rollout-external-engine-addrs", "127.0.0.1:30000", "--load", tmp_path)
    assert "are evaluated with the weights that they have; remove one of the two flags" in said


def test_the_name_of_a_run_is_not_that_of_its_evaluation(given: list[str]) -> None:
    def directory(*more: str) -> Path:
        config: Config = parse([*given, *more]).config
        return command.run_directory(config, datetime(2026, 1, 2, 3, 4, 5))

    assert directory("--name", "mine") == Path("runs/eval-2026-01-02-030405")
    assert directory("--run-dir", "there") == Path("there")


@pytest.mark.parametrize("option", ["--hf-checkpoint", "--load"])
def test_code_of_a_checkpoint_runs_only_with_a_flag(
    option: str, given: list[str], checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("y\n" * 9))  # a question on standard input would be answered with yes
    own = Path(shutil.copytree(checkpoint, tmp_path / "own"))
    (own / "code.py").write_text(
        f"open({str(tmp_path / 'ran')!r}, 'w')\nfrom transformers import PreTrainedTokenizerFast\n"
        "class Own(PreTrainedTokenizerFast): pass\n"
    )
    settings = json.loads((own / "tokenizer_config.json").read_text())
    settings |= {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["code.Own", "code.Own"]}}
    (own / "tokenizer_config.json").write_text(json.dumps(settings))
    shape = json.loads((own / "config.json").read_text())
    (own / "config.json").write_text(json.dumps(shape | {"model_type": "arcee"}))  # transformers has no tokenizer for it
    arguments = [*given, option, str(own)] if option == "--load" else [option, str(own), *given[2:]]
    said = refused(*arguments)
    assert f"{option}: cannot load the tokenizer of {own}: it needs the Python code in that directory; read the code, then use" in said
    with_flag = evaluation_problems(parse([*arguments, "--trust-remote-code"]).config)
    assert not [problem for problem in with_flag if "Python code" in problem]
    assert not (tmp_path / "ran").exists()


def test_the_summary_names_weights_and_adapter(capsys: pytest.CaptureFixture[str]) -> None:
    evaluation = Evaluation({"eval/held_out/mean@1": 0.5}, {})
    evaluated = Evaluated(Path("run"), EvaluatedWeights(Path("base"), 0), evaluation, Path("mine/adapter"))
    command._show(evaluated, of_others=False)
    assert "weights: base with the adapter mine/adapter\n" in capsys.readouterr().out
    command._show(replace(evaluated, adapter=None), of_others=False)
    assert "weights: base\n" in capsys.readouterr().out
