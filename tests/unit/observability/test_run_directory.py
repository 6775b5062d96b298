"""Run directories: fixed names, no overwriting, and an exact cut where a resume starts."""

import json
import logging
import os
import resource
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from fuligo.config import Config
from fuligo.errors import ConfigError, FuligoError
from fuligo.observability.run_directory import RunDirectory
from fuligo.observability.trace import read_trace
from tests.config_files import load_yaml
from tests.small_disk import SmallDisk


def create(path: Path, *, resume: bool = False) -> RunDirectory:
    return RunDirectory.create(path, Config(), resume=resume)


@pytest.fixture
def recorded(tmp_path: Path, make_group) -> RunDirectory:
    """Record a run of four steps, evaluated before the first and after every second."""
    run = create(tmp_path / "run")
    run.write_evaluation(0, {"aime": [make_group()]}, {"eval/aime/mean@1": 0.0})
    for step in range(4):
        with run.trace.phase("rollout", step):
            run.write_samples(step, [make_group(step)])
        run.record({"step": step, "rollout/reward_mean": step / 4})
        if step % 2 == 1:
            run.write_evaluation(step + 1, {"aime": [make_group()]}, {"eval/aime/mean@1": step / 4})
    return run


def names(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_file_names_are_fixed(recorded: RunDirectory) -> None:
    assert names(recorded.path) == ["checkpoints", "config.yaml", "eval", "log.txt", "metrics.jsonl", "samples", "trace.json"]
    assert names(recorded.samples) == [f"rollout_{step:06d}.parquet" for step in range(4)]
    assert names(recorded.eval) == ["eval_000000.parquet", "eval_000002.parquet", "eval_000004.parquet", "metrics.jsonl"]


def test_the_config_is_written_to_be_run_again(tmp_path: Path) -> None:
    assert load_yaml(create(tmp_path / "run").config_file) == Config()


def test_evaluations_name_their_data_sets(tmp_path: Path, make_group) -> None:
    run = create(tmp_path / "run")
    path = run.write_evaluation(20, {"aime": [make_group(0)], "gsm8k": [make_group(1)]}, {"eval/aime/mean@1": 0.5})
    assert pq.read_table(path)["dataset"].to_pylist() == ["aime", "aime", "gsm8k", "gsm8k"]
    assert json.loads((run.eval / "metrics.jsonl").read_text()) == {"num_rollouts": 20, "eval/aime/mean@1": 0.5}


def test_each_data_set_of_an_evaluation_reports_its_own_value(tmp_path: Path, make_group) -> None:
    groups = {name: [make_group(0, size=1, reward={"acc": 1.0, "brief": 0.25})] for name in ("aime", "style", "other")}
    path = create(tmp_path / "run").write_evaluation(20, groups, {}, reward_keys={"aime": "acc", "style": "brief"})
    table = pq.read_table(path)
    assert (table["reward"].to_pylist(), table["passed"].to_pylist()) == ([1.0, 0.25, None], [True, False, None])


def test_log_lines_of_the_package_go_to_the_log(recorded: RunDirectory) -> None:
    logging.getLogger("fuligo.anything").info("engine is up")
    assert "INFO    fuligo.anything: engine is up" in recorded.log_file.read_text()
    recorded.close()
    logging.getLogger("fuligo.anything").info("after the end")
    assert "after the end" not in recorded.log_file.read_text()


def test_a_resume_cuts_everything_back_to_where_it_starts(recorded: RunDirectory) -> None:
    (recorded.samples / ".rollout_000004.parquet.tmp").write_bytes(b"torn")
    recorded.close()
    run = create(recorded.path, resume=True)
    run.cut_back(2)
    assert [record["step"] for record in run.records()] == [0, 1]
    assert names(run.samples) == ["rollout_000000.parquet", "rollout_000001.parquet"]
    assert names(run.eval) == ["eval_000000.parquet", "eval_000002.parquet", "metrics.jsonl"]
    assert [json.loads(line)["num_rollouts"] for line in (run.eval / "metrics.jsonl").read_text().splitlines()] == [0, 2]
    assert {event["args"]["step"] for event in read_trace(run.trace.path) if event["ph"] == "X"} == {0, 1}


def test_a_resume_before_the_first_checkpoint_starts_over(recorded: RunDirectory) -> None:
    recorded.cut_back(0)
    assert recorded.records() == [] and names(recorded.samples) == []
    assert names(recorded.eval) == ["metrics.jsonl"] and (recorded.eval / "metrics.jsonl").read_text() == ""


def test_recorded_steps_are_not_overwritten_without_resume(recorded: RunDirectory) -> None:
    recorded.close()
    with pytest.raises(ConfigError, match=r"already has recorded steps; .*continue that run with --load .*run/checkpoints"):
        create(recorded.path)
    assert len(recorded.records()) == 4


def test_a_run_that_recorded_nothing_yet_may_be_started_again(tmp_path: Path) -> None:
    create(tmp_path / "run").close()
    create(tmp_path / "run").close()


def test_foreign_files_are_not_touched(tmp_path: Path) -> None:
    (tmp_path / "config.yaml").write_text("mine: true")
    with pytest.raises(ConfigError, match=r"has files that do not belong to a run \(config\.yaml\)"):
        create(tmp_path)
    assert names(tmp_path) == ["config.yaml"] and (tmp_path / "config.yaml").read_text() == "mine: true"


def test_a_file_is_refused_as_run_directory(tmp_path: Path) -> None:
    (tmp_path / "run").touch()
    with pytest.raises(ConfigError, match="is a file"):
        create(tmp_path / "run")


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write anywhere")
def test_an_unwritable_place_is_refused(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(ConfigError, match=r"cannot write the run directory .*: Permission denied"):
        create(tmp_path / "run")


def test_a_place_below_a_file_is_refused(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"cannot write the run directory .*: Not a directory"):
        create(tmp_path / "file" / "run")


@pytest.fixture
def small_files() -> Iterator[None]:
    """Limit every file to 20 kB."""
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, limits[1]))
    yield
    resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_a_full_disk_is_named_and_what_was_recorded_stays(tmp_path: Path, make_group, small_files) -> None:
    run = create(tmp_path / "run")
    with pytest.raises(FuligoError, match=r"cannot write .*metrics\.jsonl: File too large.*free some space, then resume"):
        for step in range(2000):
            run.record({"step": step})
    with pytest.raises(FuligoError, match=r"cannot write .*rollout_000001\.parquet"):
        run.write_samples(1, [make_group(0, size=100, num_tokens=200)])
    assert names(run.samples) == []
    num_whole = len(run.records())
    run.close()
    run = create(tmp_path / "run", resume=True)
    run.cut_back(100)
    assert [record["step"] for record in run.records()] == list(range(min(num_whole, 100))) and num_whole > 100
    assert names(run.samples) == []


def test_a_log_line_that_does_not_fit_is_dropped_quietly(small_disk: SmallDisk, capsys: pytest.CaptureFixture[str]) -> None:
    """The records that the run needs report the full disk."""
    run = create(small_disk.path / "run")
    for number in range(200):
        logging.getLogger("fuligo.test").info("line %d", number)
        small_disk.fill()
    run.close()
    assert "line 0" in run.log_file.read_text() and "line 199" not in run.log_file.read_text()
    assert "Traceback" not in capsys.readouterr().err


def test_two_processes_cannot_write_to_one_run(tmp_path: Path) -> None:
    create(tmp_path / "run")
    with pytest.raises(ConfigError, match="is in use by a running job"):
        create(tmp_path / "run")


def test_the_lock_of_a_killed_process_is_released(tmp_path: Path) -> None:
    script = (
        "import os, pathlib, sys; from fuligo.config import Config; from fuligo.observability.run_directory import RunDirectory\n"
        "RunDirectory.create(pathlib.Path(sys.argv[1]), Config(), resume=False); os.kill(os.getpid(), 9)"
    )
    assert subprocess.run([sys.executable, "-c", script, str(tmp_path / "run")], timeout=240, check=False).returncode == -9
    create(tmp_path / "run").close()


@pytest.mark.skipif(os.geteuid() != 0, reason="makes a link for another user")
def test_a_link_of_another_user_is_refused_and_not_followed(tmp_path: Path) -> None:
    """In /tmp, another user can prepare the directory that a run is going to use."""
    prepared, precious = tmp_path / "run", tmp_path / "precious"
    prepared.mkdir(mode=0o777)
    precious.write_text("kept")
    (prepared / "metrics.jsonl").touch()
    (prepared / "log.txt").symlink_to(precious)
    os.chown(prepared / "log.txt", 65534, 65534, follow_symlinks=False)
    with pytest.raises(ConfigError, match=r"links of another user \(log.txt\)"):
        create(prepared)
    assert precious.read_text() == "kept"
    os.chown(prepared / "log.txt", os.geteuid(), os.getegid(), follow_symlinks=False)
    create(prepared).close()  # a link of one's own may lead to another disk
