"""Failing rewards and engines: the run continues, or ends with an error that names the cause and keeps what is recorded."""

import asyncio
import json
import os
import re
import shutil
import signal
import socket
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from aiohttp import web

from fuligo.checkpoint.store import saving_to
from tests.e2e.command import fail, succeed
from tests.e2e.conftest import Job, Start
from tests.e2e.processes import alive, descendants, wait_until
from tests.e2e.records import metrics, sample_rows


def test_a_reward_that_fails_on_some_samples_fails_those_samples(job: Job, tmp_path: Path) -> None:
    succeed(*job(rm_type=None, custom_rm_path="tests.e2e.rewards.fails_on_some", rm_timeout_s=1, num_rollout=2, run_dir=tmp_path / "run"))
    records, rows = metrics(tmp_path / "run"), sample_rows(tmp_path / "run", "index", "status", "error", "reward", "kept", "advantages")
    assert [record["rollout/num_failed"] for record in records] == [4, 4]
    assert all(row["kept"] for row in rows), "a group with three rewarded samples is kept"

    errors = defaultdict(set)
    for row in rows:
        errors[row["index"] % 12].add(row["error"])
        assert (row["status"] == "failed") == (row["reward"] is None) == (row["advantages"] is None) == (row["error"] is not None)
    raised, hung, not_a_number = errors.pop(0), errors.pop(4), errors.pop(8)
    (raised,) = raised
    assert raised.startswith("reward: fails_on_some raised ValueError: cannot judge 12 tokens (rewards.py:")
    assert hung == {"reward: fails_on_some gave no reward within 1 s (--rm-timeout-s)"}
    assert all("nan" in error for error in not_a_number)
    assert set.union(*errors.values()) == {None}


def test_a_reward_that_fails_on_all_samples_ends_the_run(job: Job, tmp_path: Path) -> None:
    said = fail(1, *job(rm_type=None, custom_rm_path="tests.e2e.rewards.fails_on_all", run_dir=tmp_path / "run"))
    assert "fails_on_all raised ValueError: the judge is out for lunch" in said


def test_a_hopeless_rollout_ends_early_and_shows_why(job: Job, tmp_path: Path) -> None:
    """Every wave is reported, and the dropped samples are on disk."""
    said = fail(
        1,
        *job(
            rm_type=None,
            custom_rm_path="tests.e2e.rewards.always_wrong",
            dynamic_sampling_filter_path="fuligo.rollout.filters.check_reward_nonzero_std",
            rollout_max_response_len=2,
            run_dir=tmp_path / "run",
        ),
    )
    said = " ".join(said.split())
    assert "rollout 0 after wave 1: kept 0 of" in (tmp_path / "run" / "log.txt").read_text()
    assert re.search(r"dropped: (\d+) by check_reward_nonzero_std\..* Dropped groups: \1 with every reward 0\.", said), said
    dropped = sample_rows(tmp_path / "run", "kept", "drop_reason", "reward")
    assert len(dropped) >= 64 * 4
    assert not any(row["kept"] for row in dropped)
    assert {row["drop_reason"] for row in dropped if row["reward"] is not None} <= {"check_reward_nonzero_std", "surplus"}


@pytest.mark.parametrize(
    ("number", "timeout_s", "said"),
    [
        ("SIGKILL", 600, "was killed (out of memory"),
        # Each wave takes the timeout. tests/unit/engines/test_client.py waits for such an engine, and the run ends as above.
        pytest.param("SIGSTOP", 10, "no answer within 10 s", marks=pytest.mark.slow),
    ],
    ids=["killed", "stopped"],
)
def test_an_engine_that_dies_or_stops_answering_is_named(number: str, timeout_s: int, said: str, job: Job, tmp_path: Path) -> None:
    """Finished steps are on disk. tests/e2e/test_resume.py continues from them."""
    run_dir = tmp_path / "run"
    command = job(
        rm_type=None,
        custom_rm_path="tests.e2e.killers.signal_engine",
        embedded_max_running_requests=4,
        rollout_timeout_s=timeout_s,
        max_sampling_waves=2,
        num_rollout=2,
        run_dir=run_dir,
    )
    error = fail(1, *command, SIGNAL_ENGINE=f"{number}:1")
    assert "engine http://127.0.0.1:" in error
    assert said in error
    assert [record["step"] for record in metrics(run_dir)] == [0]
    assert {row["step"] for row in sample_rows(run_dir, "kept") if row["kept"]} == {0}, "those of a rollout that was not filled are dropped"


# tests/unit/data/test_open_file.py truncates both kinds of file
@pytest.mark.parametrize("suffix", ["jsonl", pytest.param("parquet", marks=pytest.mark.slow)])
def test_a_prompt_file_truncated_under_a_run_ends_it_with_one_sentence(suffix: str, job: Job, prompts: Path, tmp_path: Path) -> None:
    """The run does not die by SIGBUS. It resumes once the file is restored, and refuses other content with as many rows."""
    run_dir, data = tmp_path / "run", tmp_path / f"prompts.{suffix}"
    table = pa.Table.from_pylist([json.loads(line) for line in prompts.read_text().splitlines()])
    write = {"parquet": lambda: pq.write_table(table, data, row_group_size=4), "jsonl": lambda: shutil.copy(prompts, data)}[suffix]
    write()
    command = job(
        prompt_data=data,
        rm_type=None,
        custom_rm_path="tests.e2e.killers.truncate_prompts",
        num_rollout=2,
        save_interval=1,
        run_dir=run_dir,
        load=run_dir / "checkpoints",
    )
    error = fail(1, *command, TRUNCATE_PROMPTS="1")
    assert f"cannot continue with {data}: its content changed while it was read" in error
    assert [record["step"] for record in metrics(run_dir)] == [0]
    lines = prompts.read_text().splitlines()
    if suffix == "jsonl":
        data.write_text("\n".join([lines[1], lines[0], *lines[2:]]) + "\n")
        assert "cannot resume: the dataset has 40 rows like the checkpoint's, but different content" in fail(2, *command)
    write()
    succeed(*command)
    assert [record["step"] for record in metrics(run_dir)] == [0, 1]


def test_a_save_directory_of_a_running_job_is_refused(job: Job, tmp_path: Path) -> None:
    """Refused before an engine starts, and without touching unfinished files there."""
    unfinished = tmp_path / "saves" / ".tmp_iter_0000007"
    with saving_to(tmp_path / "saves"):
        unfinished.mkdir()
        error = fail(2, *job(save=tmp_path / "saves", run_dir=tmp_path / "run"))
    assert f"cannot save to {tmp_path / 'saves'}: a running job saves its checkpoints there" in error
    assert unfinished.is_dir() and not (tmp_path / "run" / "engine.txt").exists()


@pytest.mark.slow
def test_a_trainer_rank_that_stops_is_named(job: Job, start: Start, tmp_path: Path) -> None:
    """tests/parity/test_torch_trainer_ranks.py tests the same with a shorter deadline."""
    run_dir = tmp_path / "run"
    process = start(*job(actor_num_gpus_per_node=2, num_rollout=1000, run_dir=run_dir))
    wait_until(lambda: len(metrics(run_dir)) >= 2 or process.poll() is not None, "two steps are recorded")
    family = descendants(process.pid)
    os.kill(next(pid for pid, command in family.items() if "trainer.ranks.rank" in command), signal.SIGSTOP)
    said, _ = process.communicate(timeout=240)
    assert process.returncode == 1, said
    assert f"trainer rank 1 on {socket.gethostname()} has not answered for 40 s" in " ".join(said.split())
    assert "Traceback" not in said
    wait_until(lambda: not alive(family), f"all of {family} have ended", timeout_s=120)


Answer = Callable[[web.Request], web.Response]


@contextmanager
def engine_elsewhere(**answers: Answer) -> Iterator[str]:
    """Serve a scripted engine and yield its address: `answers` by the last part of the path, success for all other paths."""

    async def handle(request: web.Request) -> web.Response:
        answer = answers.get(request.path.rpartition("/")[2])
        return answer(request) if answer is not None else web.json_response({"success": True, "tp_size": 1})

    async def listen() -> int:
        application = web.Application()
        application.router.add_route("*", "/{path:.*}", handle)
        runner = web.AppRunner(application)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        return runner.addresses[0][1]

    loop = asyncio.new_event_loop()
    port = loop.run_until_complete(listen())
    thread = threading.Thread(target=loop.run_forever, daemon=True)
    thread.start()
    try:
        yield f"127.0.0.1:{port}"
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(120)


@pytest.mark.parametrize(
    ("generate", "said"),
    [
        pytest.param(
            lambda _: web.Response(text="<html>welcome to nginx</html>"), "the answer is not JSON: b'<html>welcome", marks=pytest.mark.slow
        ),
        pytest.param(lambda _: web.json_response({"text": "hello"}), "malformed answer", marks=pytest.mark.slow),
        (lambda _: web.json_response({"error": {"message": "CUDA out of memory"}}, status=500), "status 500: CUDA out of memory"),
    ],
    ids=["no-json", "malformed", "500"],
)
def test_an_engine_that_answers_garbage_is_named(generate: Answer, said: str, job: Job, tmp_path: Path) -> None:
    """tests/unit/engines/test_client.py tests each kind of malformed answer with only the client."""
    with engine_elsewhere(generate=generate) as address:
        command = job(rollout_external_engine_addrs=address, embedded_num_threads=None, rollout_retries=1, run_dir=tmp_path / "run")
        error = fail(1, *command, "--debug-rollout-only")
    assert f"x engine http://{address}" in error
    assert said in error


def test_an_engine_that_keeps_its_old_weights_is_named(job: Job, tmp_path: Path) -> None:
    info = web.json_response({"model_path": "elsewhere", "weight_version": "7"})
    with engine_elsewhere(model_info=lambda _: web.Response(body=info.body, content_type="application/json")) as address:
        error = fail(1, *job(rollout_external_engine_addrs=address, embedded_num_threads=None, run_dir=tmp_path / "run"))
    assert f"engine http://{address} reports weight version 7 after version 0 was sent" in error
    assert metrics(tmp_path / "run") == []


def test_an_engine_that_is_not_there_is_named(job: Job, tmp_path: Path) -> None:
    with engine_elsewhere() as address:
        pass
    error = fail(
        1, *job(rollout_external_engine_addrs=address, embedded_num_threads=None, engine_start_timeout_s=0.5, run_dir=tmp_path / "run")
    )
    assert f"engine http://{address} was not ready within 0.5 s" in error
