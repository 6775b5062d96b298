"""Records, samples and checkpoints of a finished run."""

import json
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import pyarrow.parquet as pq

from fuligo.checkpoint.state import RunState
from tests.metrics_page import is_timing, undocumented

TOKENS = ("index", "group_index", "response_ids", "engine_logprobs", "trainer_logprobs", "advantages", "versions", "kept")
"""Columns of samples/ that are bit for bit equal in two equal runs."""


def json_lines(path: Path) -> list[dict]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def metrics(run_dir: Path) -> list[dict]:
    """Return the records of a run without timings. docs/metrics.md documents each of their keys."""
    records = json_lines(run_dir / "metrics.jsonl")
    assert undocumented(key for record in records for key in record) == []
    return [{key: value for key, value in record.items() if not is_timing(key)} for record in records]


def evaluations(run_dir: Path) -> list[dict]:
    """Return the records of a run's evaluations. docs/metrics.md documents each of their keys."""
    records = json_lines(run_dir / "eval" / "metrics.jsonl")
    assert undocumented(key for record in records for key in record if key != "num_rollouts") == []
    return records


def sample_rows(run_dir: Path, *columns: str) -> list[dict]:
    """Return all samples of a run in order, each with its `step`."""
    rows = []
    for path in sorted((run_dir / "samples").glob("rollout_*.parquet")):
        step = int(path.stem.removeprefix("rollout_"))
        rows += [{"step": step, **row} for row in pq.read_table(path, columns=list(columns)).to_pylist()]
    return rows


def checkpoint(run_dir: Path, num_rollouts: int) -> Path:
    return run_dir / "checkpoints" / f"iter_{num_rollouts:07d}"


def assert_every_prompt_is_accounted_for(run_dir: Path, prompts: Sequence[str], *, num_rollouts: int, num_samples: int) -> None:
    """Check that each drawn prompt ended once, waits in the checkpoint, or was returned to the data.

    Args:
        prompts: text of each row of the prompt file.
        num_samples: samples of each prompt.
    """
    rows = sample_rows(run_dir, "index", "group_index", "prompt", "drop_reason")
    ended = [row for row in rows if row["drop_reason"] not in ("aborted", "stale")]
    state = RunState.read(checkpoint(run_dir, num_rollouts)).rollout
    assert set(Counter(row["index"] for row in ended).values()) == {1}, "each sample ends once"
    groups = {row["group_index"]: row["prompt"] for row in ended}
    assert set(Counter(row["group_index"] for row in ended).values()) == {num_samples}, "all samples of a prompt end together"
    waiting = {group.index: group.row for group in state.buffer}
    assert not groups.keys() & waiting.keys(), "groups in the buffer are unused"
    assert max([*groups, *waiting]) < state.next_group_index

    returned = state.source["returned"]
    epoch, offset = state.source["epoch"], state.source["offset"]
    assert isinstance(returned, list) and isinstance(epoch, int) and isinstance(offset, int)
    asked = [prompts.index(json.loads(prompt)[-1]["content"]) for prompt in groups.values()]
    drawn = Counter(asked) + Counter(waiting.values()) + Counter(returned)
    assert drawn.total() == epoch * len(prompts) + offset, "each drawn prompt is accounted for"
    assert {drawn[row] for row in range(len(prompts))} <= {epoch, epoch + 1}, "each row is drawn once per epoch"
