"""Arguments of `fuligo train-many`, and what it refuses before anything starts."""

import re
from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

import fuligo
from fuligo import job
from fuligo.cli.train_many import _read as read
from fuligo.cli.train_many import _resumed as in_progress
from fuligo.cli.train_many import main, prepare_many
from fuligo.config.command_line import parse
from fuligo.config.files import save_yaml
from fuligo.errors import ConfigError
from fuligo.job import many
from fuligo.observability.run_directory import RunDirectory
from tests import tiny
from tests.unit.config.conftest import config_with


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny.save_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture
def files(checkpoint: Path, tmp_path: Path) -> list[str]:
    """Write the configs of two runs that start as they are; return their paths."""
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"text": "what is 1 + 1?", "label": "2"}\n')
    given = {
        "device": "cpu",
        "rollout_max_response_len": 12,
        "hf_checkpoint": str(checkpoint),
        "prompt_data": [str(prompts)],
        "input_key": "text",
        "lora_rank": 2,
        "lr": 1e-4,
    }
    written = []
    for name in ("a", "b"):
        save_yaml(config_with(**given, run_dir=str(tmp_path / "runs" / name)), tmp_path / f"{name}.yaml")
        written.append(str(tmp_path / f"{name}.yaml"))
    return written


def prepared(files: list[str], *flags: str, **options: Any) -> dict[str, Any]:
    return prepare_many({Path(file).stem: parse(["--config", file, *flags]).config for file in files}, **options)


@pytest.mark.parametrize("number", [0, 1])
def test_fewer_than_two_files_are_refused(files: list[str], number: int) -> None:
    with pytest.raises(ConfigError, match="use fuligo train for one"):
        main(files[:number])


def test_a_file_given_twice_is_refused(files: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"a\.yaml is given twice"):
        main([files[0], files[0]])


def test_each_file_is_a_run_also_where_names_look_like_others(files: list[str], tmp_path: Path) -> None:
    names = ("b.yml", "d/b.yaml", "z/b.yml.yaml")
    for name in names:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(Path(files[0]).read_bytes())
    given = [str(tmp_path / name) for name in names]
    assert list(read(given, ())) == given


def test_runs_without_a_directory_get_one_each(files: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """It is fixed here: the process of each run would name it by its own start time."""
    monkeypatch.chdir(tmp_path)
    configs = prepared(files, "--run-dir", "none")
    directories = [config.run_directory(datetime(2000, 1, 1)) for config in configs.values()]
    assert [re.sub(r"\d", "0", str(directory)) for directory in directories] == ["runs/0000-00-00-000000-a", "runs/0000-00-00-000000-b"]


def test_the_engines_logs_lie_beside_the_first_run_also_below_the_working_directory(
    files: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    async def run_many(configs: object, logs: Path, *, resume: bool) -> None:
        begun.append((logs, resume))

    begun: list[object] = []
    monkeypatch.setattr(many, "run_many", run_many)
    monkeypatch.setattr(job, "_keep_private", lambda _: None)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    job.run_many_to_end({"a": parse(["--config", files[0], "--run-dir", "."]).config}, resume=True)
    assert begun == [(tmp_path / "here.engines", True)]


def test_config_as_an_option_is_refused(files: list[str]) -> None:
    with pytest.raises(ConfigError, match="takes config files without an option"):
        main([*files, "--config", files[0]])


def test_flags_after_the_files_hold_for_all_runs(files: list[str]) -> None:
    configs = prepared(files, "--num-rollout", "3")
    assert [(name, config.data.num_rollout) for name, config in configs.items()] == [("a", 3), ("b", 3)]
    with pytest.raises(ConfigError, match="a and b would both write to --run-dir"):
        main([*files, "--run-dir", "runs/one"])


def test_the_problems_of_all_runs_are_named_with_the_run(files: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        prepared(files, "--prompt-data", "missing.jsonl")
    assert {problem[:3] for problem in caught.value.problems} == {"a: ", "b: "}
    assert all("missing.jsonl" in problem for problem in caught.value.problems)


def test_runs_that_do_not_fit_together_are_refused_before_their_files_are_read(files: list[str]) -> None:
    with pytest.raises(ConfigError, match="use --lora-sync adapter") as caught:
        prepared(files, "--prompt-data", "missing.jsonl", "--lora-sync", "merged")
    assert not any("missing.jsonl" in problem for problem in caught.value.problems)


def test_used_run_directories_are_refused_before_anything_starts(files: list[str], tmp_path: Path) -> None:
    for name in ("a", "b"):
        (tmp_path / "runs" / name).mkdir(parents=True)
        (tmp_path / "runs" / name / "metrics.jsonl").write_text('{"step": 0}\n')
    with pytest.raises(ConfigError) as caught:
        prepared(files)
    assert [problem.partition(" already has")[0] for problem in caught.value.problems] == [
        f"{name}: --run-dir {tmp_path / 'runs' / name}" for name in ("a", "b")
    ]
    assert prepared(files, resumes=True).keys() == {"a", "b"}
    (tmp_path / "runs" / "a" / "metrics.jsonl").write_text("")
    (tmp_path / "runs" / "b" / "checkpoints").mkdir()
    with pytest.raises(ConfigError, match=r"^b: --run-dir .* already has recorded steps"):
        prepared(files)


def test_a_directory_that_a_job_uses_is_refused_before_anything_starts(files: list[str], tmp_path: Path) -> None:
    used = RunDirectory.create(tmp_path / "runs" / "b", parse(["--config", files[1]]).config, resume=False)
    for resumes in (False, True):
        with pytest.raises(ConfigError, match=r"^b: --run-dir .* is in use by a running job"):
            prepared(files, resumes=resumes)
    used.close()
    assert prepared(files, resumes=True).keys() == {"a", "b"}


def test_a_warning_that_concerns_all_runs_is_shown_once(files: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    prepared(files, warnings={"a": ["the same", "only a"], "b": ["the same", "only b"]})
    shown = capsys.readouterr().err
    assert [shown.count(text) for text in ("the same", "only a", "only b")] == [1, 1, 1]


def test_resume_loads_each_run_s_own_checkpoints_and_leaves_complete_runs_out(files: list[str], tmp_path: Path) -> None:
    done = tmp_path / "runs" / "a" / "checkpoints"
    done.mkdir(parents=True)
    (done / "latest_checkpointed_iteration.txt").write_text("10")
    configs = prepared(files, resumes=True)
    assert {name: config.checkpoint.load for name, config in configs.items()} == {"b": str(tmp_path / "runs" / "b" / "checkpoints")}


def test_resume_counts_the_rollouts_of_epochs(files: list[str], tmp_path: Path) -> None:
    """One prompt in batches of one: two epochs are two rollouts."""
    done = tmp_path / "runs" / "a" / "checkpoints"
    done.mkdir(parents=True)
    (done / "latest_checkpointed_iteration.txt").write_text("2")
    assert list(prepared(files, "--num-epoch", "2", "--rollout-batch-size", "1", resumes=True)) == ["b"]


@pytest.mark.parametrize(
    "flags, num_recorded, num_evaluated, skipped",
    [
        ("--no-save-last", 10, None, True),
        ("--no-save-last", 9, None, False),
        ("", 10, None, False),  # its last checkpoint is missing
        ("--no-save-last --save-interval 4", 10, None, True),
        ("--no-save-last --save-interval 5", 10, None, False),  # so is this one's
        ("--no-save-last --eval-interval 5", 10, 10, True),
        ("--no-save-last --eval-interval 5", 10, 5, False),
        ("--no-save-last --eval-interval 5", 10, None, False),
        ("--no-save-last --eval-function-path hooks.py:evaluate", 10, None, False),
        ("--no-save-last --eval-function-path hooks.py:evaluate", 10, 10, True),
        ("--no-save-last --ckpt-step 4", 10, None, False),
    ],
)
def test_resume_leaves_out_runs_that_save_no_last_checkpoint_by_their_records(
    files: list[str], tmp_path: Path, flags: str, num_recorded: int, num_evaluated: int | None, skipped: bool
) -> None:
    run = tmp_path / "runs" / "a"
    (run / "eval").mkdir(parents=True)
    (run / "metrics.jsonl").write_text("".join(f'{{"step": {step}}}\n' for step in range(num_recorded)))
    if num_evaluated is not None:
        (run / "eval" / "metrics.jsonl").write_text(f'{{"num_rollouts": {num_evaluated}}}\n')
    given = [*flags.split(), *(["--eval-prompt-data", str(tmp_path / "prompts.jsonl")] if "--eval-interval" in flags else [])]
    configs = {Path(file).stem: parse(["--config", file, "--num-rollout", "10", *given]).config for file in files}
    assert list(in_progress(configs)) == (["b"] if skipped else ["a", "b"])


def test_resume_of_a_run_s_own_checkpoints_takes_the_newest(files: list[str], tmp_path: Path) -> None:
    """Not --ckpt-step, which belongs to the --load that the run began with."""
    done = tmp_path / "runs" / "a" / "checkpoints"
    done.mkdir(parents=True)
    (done / "latest_checkpointed_iteration.txt").write_text("2")
    configs = {Path(file).stem: parse(["--config", file, "--load", "first", "--ckpt-step", "5"]).config.checkpoint for file in files}
    resumed = in_progress({Path(file).stem: parse(["--config", file, "--load", "first", "--ckpt-step", "5"]).config for file in files})
    assert (resumed["a"].checkpoint.load, resumed["a"].checkpoint.ckpt_step) == (str(done), None)
    assert resumed["b"].checkpoint == configs["b"]


def test_resume_from_a_given_step_takes_that_checkpoint_of_each_run(files: list[str], tmp_path: Path) -> None:
    """Also of a run that is complete, to continue from before it went wrong."""
    for name, newest in (("a", "10"), ("b", "4")):
        own = tmp_path / "runs" / name / "checkpoints"
        own.mkdir(parents=True)
        (own / "latest_checkpointed_iteration.txt").write_text(newest)
    given = {Path(file).stem: parse(["--config", file, "--ckpt-step", "3"]).config for file in files}
    assert {name: (config.checkpoint.load, config.checkpoint.ckpt_step) for name, config in in_progress(given).items()} == {
        name: (str(tmp_path / "runs" / name / "checkpoints"), 3) for name in ("a", "b")
    }


def test_resume_needs_a_directory_with_a_name(files: list[str]) -> None:
    with pytest.raises(ConfigError, match="a: --resume cannot find a run directory"):
        prepare_many(
            {"a": parse(["--config", files[0], "--run-dir", "none"]).config, "b": parse(["--config", files[1]]).config}, resumes=True
        )


def test_help_names_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert "A.yaml B.yaml ... [--resume] [--flag value ...]" in capsys.readouterr().out


@pytest.mark.parametrize("number", [0, 1])
def test_from_python_fewer_than_two_configs_are_refused(files: list[str], number: int) -> None:
    with pytest.raises(ConfigError, match="use fuligo train for one"):
        fuligo.train_many(files[:number])


def test_functions_that_the_processes_of_runs_cannot_import_are_refused(files: list[str]) -> None:
    configs = [fuligo.configure(file, rm_type=None, custom_rm_path=lambda args, sample: 1.0) for file in files]
    with pytest.raises(ConfigError, match=r"run 0: custom_rm_path=fuligo\.callables.*; move it to a module"):
        fuligo.train_many(configs)
