"""Run directories made to harm whoever views them: every endpoint answers soon, without a failure, and with nothing from outside."""

import concurrent.futures
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from starlette.testclient import TestClient

from fuligo.observability.viewer.api import make_app
from fuligo.observability.viewer.report import write_report
from fuligo.observability.viewer.run import RunReader
from fuligo.observability.viewer.tokens import TokenTexts
from tests.unit.observability.viewer.recorded_run import NUM_STEPS, SCRIPT

pytestmark = pytest.mark.long

DEADLINE_S = 120.0
"""For all endpoints together on a busy machine; what hangs, hangs forever."""
SECRET = "the secret of another user"
PATHS = (
    "/",
    "/api/runs",
    "/api/metrics?run=r&keys=train/loss,step,time",
    "/api/differences?run=r",
    "/api/settings?run=r",
    "/api/samples?run=r",
    "/api/samples?run=r&text=apples",
    "/api/samples?run=r&of=eval",
    f"/api/sample?run=r&of=eval&step={NUM_STEPS}&row=5",
    "/api/history?run=r&prompt=1",
    "/api/steps?run=r",
    *(f"/api/{what}&step={step}" for what in ("step?run=r", "sample?run=r&row=1") for step in (0, 1, 2, 3)),
    "/api/health?run=r",
    "/api/trace.json?run=r",
)
FILES = ("metrics.jsonl", "config.yaml", "trace.json", "log.txt", "eval/metrics.jsonl", "samples/rollout_000003.parquet")
ABSURD = ("-1", "1e308", "-1e308", str(10**30), str(2**63), str(-(2**63)), "9" * 5000, "null", "true", '"x"', "[]", "{}", "1e-400")


def _replace(make: Callable[[Path], object]) -> Callable[[Path], None]:
    def attack(run: Path) -> None:
        for name in FILES:
            (run / name).unlink(missing_ok=True)
            make(run / name)

    return attack


def _link_outside(run: Path) -> None:
    outside = run.parent / "outside"
    outside.mkdir()
    for name in FILES:
        target = outside / Path(name).name
        shutil.copy(run / name, target)
        (run / name).unlink()
        (run / name).symlink_to(target)
    (outside / "log.txt").write_text(f" ERROR {SECRET}\n")
    (outside / "trace.json").write_text(f'[\n{{"name": "{SECRET}", "ph": "X", "pid": 1, "args": {{"step": 3}}}},\n')
    (outside / "metrics.jsonl").write_text(f'{{"step": 0, "{SECRET}": 1}}\n')


def _link_directories(run: Path) -> None:
    for name in ("samples", "eval"):
        (run / name).rename(run.parent / name)
        (run / name).symlink_to(run.parent / name)
    (run.parent / "eval" / "metrics.jsonl").write_text(f'{{"num_rollouts": 0, "eval/{SECRET}/mean@1": 1}}\n')


def _absurd_metrics(run: Path) -> None:
    keys = (
        "step",
        "time",
        "train/loss",
        "policy_version",
        "perf/step_s",
        "rollout/staleness",
        "rollout/num_tokens",
        "train/logprob_abs_diff",
    )
    sound = (run / "metrics.jsonl").read_text().splitlines()[0]
    lines = [json.dumps({**json.loads(sound), key: 0})[:-1] + f', "{key}": {value}}}' for key in keys for value in ABSURD]
    with (run / "metrics.jsonl").open("a") as file:
        file.write("\n".join(lines) + "\n")
    shutil.copy(run / "metrics.jsonl", run / "eval" / "metrics.jsonl")


def _absurd_trace(run: Path) -> None:
    with (run / "trace.json").open("a") as file:
        for value in ABSURD:
            for key in ("pid", "tid", "ts", "dur", "name", "ph"):
                event = {"name": '"rollout"', "ph": '"X"', "pid": "1", "tid": "0", "ts": "1", "dur": "1", key: value}
                file.write("{" + ", ".join(f'"{name}": {text}' for name, text in event.items()) + f', "args": {{"step": {value}}}}},\n')
            file.write(f'{{"ph": "M", "name": "process_name", "pid": {value}, "args": {{"name": {value}}}}},\n')
            file.write(f'{{"ph": "M", "name": "begin", "pid": 1, "ts": {value}, "args": {{"phase": {value}, "step": {value}}}}},\n')


def _absurd_config(run: Path) -> None:
    (run / "config.yaml").write_text(
        f"data: {{num_rollout: {10**30}, x: .inf, y: {'9' * 4000}}}\nmodel: {{hf_checkpoint: /dev}}\n? [a, b]\n: {{c: 1}}\n"
    )


def _other_columns(run: Path) -> None:
    """Give each column the type of another."""
    table = pq.read_table(run / "samples" / "rollout_000003.parquet")
    for step, column in enumerate((pa.array([[b"\xff"]] * len(table)), pa.array(["x" * 9] * len(table)), pa.array([2**62] * len(table)))):
        wrong = pa.table(dict.fromkeys(table.column_names, column))
        pq.write_table(wrong, run / "samples" / f"rollout_{step:06d}.parquet")
    pq.write_table(table.slice(0, 0), run / "samples" / "rollout_000003.parquet")


def _many_rows(run: Path) -> None:
    """Write a small file that stands for millions of samples."""
    rows = pa.table({"index": pa.repeat(pa.scalar(1, pa.int64()), 20_000_000), "reward": pa.nulls(20_000_000, pa.float32())})
    pq.write_table(rows, run / "samples" / "rollout_000003.parquet", compression="zstd")


def _long_text(run: Path) -> None:
    """Write a small file that stands for gigabytes of text."""
    table = pq.read_table(run / "samples" / "rollout_000003.parquet")
    at = table.column_names.index("response")
    table = table.set_column(at, "response", pa.array(["a" * 2**23] * len(table), pa.large_string()))
    pq.write_table(table, run / "samples" / "rollout_000003.parquet", compression="zstd")


def put_scripts(run: Path) -> None:
    """Put a script into every text: keys and values of files, and columns of samples."""
    text = json.dumps(SCRIPT)
    record = json.loads((run / "metrics.jsonl").read_text().splitlines()[-1])
    (run / "metrics.jsonl").write_text(json.dumps({**record, SCRIPT: 1.0, f"eval/{SCRIPT}/mean@1": 1.0}) + "\n")
    (run / "config.yaml").write_text(f"data: {{num_rollout: 12, {text}: {text}}}\n{text}: {{name: {text}}}\n")
    (run / "log.txt").write_text(f"2026-01-01 ERROR {SCRIPT}\n")
    event = f'"ph": "X", "pid": 1, "tid": 0, "ts": {record["time"] * 1e6}, "dur": 1e6, "args": {{"step": {record["step"]}}}'
    (run / "trace.json").write_text(f'[\n{{"name": {text}, {event}}},\n')
    for file in [*(run / "samples").glob("*.parquet"), *(run / "eval").glob("*.parquet")]:
        table = pq.read_table(file)
        for at, name in enumerate(table.column_names):
            if table.schema.field(at).type == pa.string():
                table = table.set_column(at, name, pa.array([SCRIPT] * len(table)))
        pq.write_table(table, file)


ATTACKS = {
    "scripts": put_scripts,
    "pipes": _replace(os.mkfifo),
    "directories": _replace(Path.mkdir),
    "binary": _replace(lambda path: path.write_bytes(os.urandom(2**20))),
    "one long line": _replace(lambda path: path.write_bytes(b"[" * 2**23)),
    "sparse": _replace(lambda path: (path.touch(), os.truncate(path, 2**20 if path.suffix == ".json" else 2**40))),
    "deep": _replace(lambda path: path.write_bytes((b'{"step": 0, "a": ' + b"[" * 10**5 + b"]" * 10**5 + b"}\n") * 3)),
    "endless": _replace(lambda path: path.symlink_to("/dev/zero")),
    "links": _link_outside,
    "links of directories": _link_directories,
    "absurd metrics": _absurd_metrics,
    "absurd trace": _absurd_trace,
    "absurd config": _absurd_config,
    "other columns": _other_columns,
    "many rows": _many_rows,
    "long text": _long_text,
}


@pytest.mark.parametrize("attack", ATTACKS.values(), ids=ATTACKS)
def test_every_endpoint_answers_soon(attack: Callable[[Path], None], recorded: Path, tmp_path: Path) -> None:
    run = tmp_path / "r"
    shutil.copytree(recorded, run, ignore=shutil.ignore_patterns(*(f"rollout_{step:06d}.parquet" for step in range(4, NUM_STEPS))))
    attack(run)
    pool = concurrent.futures.ThreadPoolExecutor(1)
    try:
        reader, answers = pool.submit(_all_answers, run).result(DEADLINE_S)
    finally:
        pool.shutdown(wait=False)
    for path, (status, text) in answers.items():
        assert status in (200, 404), path
        assert SECRET not in text, path
        assert SCRIPT not in text or path.startswith("/api/"), "JSON is no page"
        assert len(text) < 2**24, path
    write_report([reader], tmp_path / "report.html")
    report = (tmp_path / "report.html").read_text()
    assert SECRET not in report
    assert SCRIPT not in report


def _all_answers(run: Path) -> tuple[RunReader, dict[str, tuple[int, str]]]:
    reader = RunReader(run, "r")
    reader.update_metrics()
    for _ in range(20):
        reader.update_rest(1.0)
    client = TestClient(make_app([reader], token="secret"), base_url="http://127.0.0.1:6780", headers={"authorization": "Bearer secret"})
    return reader, {path: ((answer := client.get(path)).status_code, answer.text) for path in PATHS}


def test_a_tokenizer_that_would_fill_the_memory_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "tokenizer.json").touch()
    os.truncate(tmp_path / "tokenizer.json", 2**40)
    assert TokenTexts([tmp_path]).texts([1, 2]) is None
