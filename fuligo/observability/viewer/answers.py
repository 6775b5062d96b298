"""Answers to the page's requests as plain JSON values, for the server and for reports."""

import time
from collections.abc import Sequence
from dataclasses import asdict
from itertools import zip_longest
from pathlib import Path
from typing import Any

import numpy as np
import orjson
import pyarrow as pa
import pyarrow.compute as pc

from fuligo.observability.viewer.agreement import comparison
from fuligo.observability.viewer.alarms import WATCHES
from fuligo.observability.viewer.run import RunReader
from fuligo.observability.viewer.run_files import SampleSet
from fuligo.observability.viewer.sample_index import SampleIndex, read_index_table
from fuligo.observability.viewer.sample_query import Order, SampleFilter, in_order, matching
from fuligo.observability.viewer.sample_rows import (
    LINE_COLUMNS,
    MAX_CHARACTERS,
    UNREADABLE,
    PromptOrder,
    Row,
    message_texts,
    number,
    prompt_table,
    read_rows,
    rewards_by_step,
    short,
    short_prompt,
)
from fuligo.observability.viewer.settings import differences, setting_rows
from fuligo.observability.viewer.sources import prompt_segments, sampled_tokens, token_sources

Answer = dict[str, Any]
SEARCH_BUDGET_S = 0.15
"""Seconds of search per request; the page asks again if more is left."""
MAX_HISTORY = 400
MAX_OTHERS = 16
_MEMBER_COLUMNS = ("response", "drop_reason", "error")
_TOKEN_COLUMNS = ("engine_logprobs", "trainer_logprobs", "ref_logprobs", "teacher_logprobs", "entropy", "values", "returns", "advantages")
_SHOWN_LATEST = ("rollout/reward_mean", "rollout/response_len_mean", "rollout/tokens_per_s", "train/tokens_per_s", "perf/step_s")


def run_answer(run: RunReader) -> Answer:
    run.update_metrics()
    metrics = run.metrics
    state, age_s = run.state()
    return {
        "name": run.name,
        "path": str(run.path.resolve()),
        "state": state,
        "age_s": age_s,
        "num_done": metrics.num_done,
        "num_rollouts": run.num_rollouts,
        "now": asdict(run.now()),
        "clock_s": time.time(),
        "latest": {key: metrics.latest(key) for key in _SHOWN_LATEST},
        "first_reward": next(iter(metrics.column("rollout/reward_mean")), None),
        "keys": [key for key in metrics.columns if "/" in key],
        "eval_keys": [key for key in run.evaluations.columns if "/" in key],
        "generation": metrics.generation,
        "num_rows": metrics.num_rows,
        "num_samples": run.samples.table().num_rows,
        "num_eval_samples": run.eval_samples.table().num_rows,
        "engines": run.samples.engines(),
        "parts": {"train": run.samples.parts(), "eval": run.eval_samples.parts()},
        "datasets": run.datasets,
        "indexed": run.samples.progress,
        "trace_read": run.trace.share_read,
        "alarms": run.num_ongoing_alarms(),
        "problems": run.problems(),
    }


def metrics_answer(run: RunReader, keys: Sequence[str], after: int, generation: int) -> Answer:
    """Return the rows from `after` on, or all of them if the page has another generation of the file."""
    run.update_metrics()
    metrics = run.metrics
    start = after if generation == metrics.generation else 0
    return {
        "generation": metrics.generation,
        "start": start,
        "step": metrics.steps[start:],
        "time": metrics.column("time")[start:],
        "tokens": metrics.tokens()[start:],
        "values": {key: metrics.column(key)[start:] for key in keys if key in metrics.columns},
        "evaluations": {
            "step": run.evaluations.steps,
            "values": {key: run.evaluations.column(key) for key in keys if key in run.evaluations.columns},
        },
    }


def differences_answer(runs: Sequence[RunReader]) -> Answer:
    return {"runs": [run.name for run in runs], "rows": [asdict(row) for row in differences([run.settings for run in runs])]}


def settings_answer(run: RunReader) -> Answer:
    return {"rows": [asdict(row) for row in setting_rows([run.settings])]}


def samples_answer(run: RunReader, wanted: SampleFilter, order: Order, offset: int, limit: int, of: SampleSet = "train") -> Answer:
    """Return a page of the list of samples. A filter by text covers the files searched so far; the next request continues the search."""
    index = run.index(of)
    found, share = matching(index.table(), wanted), 1.0
    if text := wanted.text.strip():
        with run.lock:
            found, share = run.search(of, text).advance(index, found, SEARCH_BUDGET_S)
    return {
        "total": found.num_rows,
        "offset": offset,
        "rows": sample_lines(index, in_order(found, order, offset, limit)),
        "searched": share,
        "indexed": index.progress,
    }


def sample_lines(index: SampleIndex, shown: pa.Table) -> list[Answer]:
    """Return lines of the list for rows of the index; their texts are read from their files."""
    lines = _numbers(shown)
    by_step: dict[int, list[Answer]] = {}
    for line in sorted(lines, key=lambda line: line["row"]):
        by_step.setdefault(line["step"], []).append(line)
    for step, of_step in by_step.items():
        texts = _readable_rows(index.file(step), [line["row"] for line in of_step], LINE_COLUMNS)
        for line, text in zip_longest(of_step, texts, fillvalue={}):
            line["prompt"] = short_prompt(text.get("prompt"))
            line |= {name: short(text.get(name)) for name in ("response", "label", "error")}
            line |= {name: text.get(name) for name in ("finish_reason", "drop_reason")}
    return lines


def _readable_rows(path: Path | None, rows: Sequence[int], columns: Sequence[str] | None = None) -> list[Row]:
    """Return rows of a sample file; none without a file, or if it cannot be read."""
    try:
        return read_rows(path, rows, columns) if path is not None else []
    except UNREADABLE:
        return []


def _numbers(rows: pa.Table) -> list[Answer]:
    """Return rows of the index as JSON values."""
    return [
        {
            **row,
            "reward": number(row["reward"]),
            "advantage": number(row["advantage"]),
            "parts": {name: number(value) for name, value in row["parts"] or ()},
            "prompt_key": str(row["prompt"]),  # 63 bits do not fit into a JavaScript number
        }
        for row in rows.to_pylist()
    ]


def _of_step(index: SampleIndex, step: int) -> pa.Table | None:
    """Return a step's rows of the index, read from its file if it is not indexed yet; None if the file cannot be read."""
    known = index.table().filter(pc.field("step") == step)
    path = index.file(step)
    if known.num_rows or path is None:
        return known
    try:
        return read_index_table(path, step)
    except UNREADABLE:
        return None


def sample_answer(run: RunReader, step: int, row: int, of: SampleSet = "train") -> Answer | None:
    """Return one sample, token by token, with the lines of its group; None if there is no such sample."""
    index = run.index(of)
    rows = _of_step(index, step)
    path = index.file(step)
    if rows is None or path is None:
        return None
    mine = next(iter(_numbers(rows.filter(pc.field("row") == row))), None)
    whole = next(iter(_readable_rows(path, [row])), None)
    if mine is None or whole is None:
        return None
    # The datasets of an evaluation number their groups independently.
    members = [mine]
    if mine["group"] is not None:
        of_group = rows.filter(pc.field("group") == mine["group"])
        members = [member for member in _numbers(of_group) if member["dataset"] == mine["dataset"]]
    texts = _readable_rows(path, [member["row"] for member in members], _MEMBER_COLUMNS)
    prompt_ids = whole.get("prompt_ids") or []
    rendered = run.tokens.text(prompt_ids) if prompt_ids else None
    return {
        **mine,
        **{name: whole.get(name) for name in ("label", "finish_reason", "drop_reason", "error", "dataset")},
        "segments": [asdict(part) for part in prompt_segments(rendered, message_texts(whole.get("prompt")))],
        "response": whole.get("response") or "",
        "metadata": _metadata(whole.get("metadata")),
        "spans": whole.get("spans") or [],
        "images": [image["source"] for image in whole.get("images") or []],
        "prompt_tokens": len(prompt_ids),
        "tokens": _tokens(run, whole),
        **_episode(path, rows, mine, whole),
        "members": [{**member, **text} for member, text in zip(members, texts, strict=False)],
    }


def _episode(path: Path, rows: pa.Table, mine: Answer, whole: Row) -> Answer:
    """Return the turns of the episode that a sample belongs to, and its place among the samples of the episode.

    An episode in an environment is recorded with the last of its samples.
    """
    same = [row for row in _numbers(rows.filter(pc.field("index") == mine["index"])) if row["dataset"] == mine["dataset"]]
    parts = [row["row"] for row in same] if mine["index"] is not None else [mine["row"]]
    turns = whole.get("turns")
    if turns is None and len(parts) > 1 and parts[-1] != mine["row"]:
        turns = next((last.get("turns") for last in _readable_rows(path, parts[-1:], ["index", "turns"])), None)
    known = [_shortened(entry) for entry in turns if isinstance(entry, dict)] if isinstance(turns, list) else None
    return {"turns": known, "part": parts.index(mine["row"]), "num_parts": len(parts)}


def _shortened(value: Any) -> Any:
    """Return a value with its texts cut to the length that a page shows; a tool may return megabytes."""
    match value:
        case str():
            return value[:MAX_CHARACTERS]
        case dict():
            return {name: _shortened(inner) for name, inner in value.items()}
        case list():
            return [_shortened(inner) for inner in value]
    return value


def _tokens(run: RunReader, whole: Row) -> Answer:
    """Return lists with one entry per response token; null for values that the run did not record."""
    ids = whole.get("response_ids") or []
    texts = run.tokens.texts(ids) if ids else []
    sampled = sampled_tokens(len(ids), whole.get("spans") or [], whole.get("engine_logprobs"))
    return {
        "ids": ids,
        "texts": texts,
        "mask": whole.get("loss_mask"),
        "sources": token_sources(texts, run.tokens.markers(ids), sampled, whole.get("loss_mask")),
        "versions": whole.get("versions"),
        "engines": engines_of_tokens(len(ids), whole.get("spans") or []),
        **{name: _rounded(whole.get(name)) for name in _TOKEN_COLUMNS},
    }


def engines_of_tokens(num_tokens: int, spans: Sequence[Row]) -> list[int | None] | None:
    """Return the engine that sampled each token; None if none is known."""
    engines: list[int | None] = [None] * num_tokens
    for span in spans:
        if span.get("engine") is not None:
            first, last = span["first_token"], min(span["first_token"] + span["num_tokens"], num_tokens)
            engines[first:last] = [span["engine"]] * max(0, last - first)
    return engines if any(engine is not None for engine in engines) else None


def _rounded(values: list[float | None] | None) -> list[float | None] | None:
    return None if values is None else [None if value is None or not np.isfinite(value) else float(f"{value:.4g}") for value in values]


def _metadata(text: Any) -> Any:
    try:
        return orjson.loads(text or "{}")
    except orjson.JSONDecodeError:
        return {}


def history_answer(run: RunReader, prompt_key: int, of: SampleSet = "train", dataset: str | None = None) -> Answer:
    """Return the newest `MAX_HISTORY` samples of a prompt, oldest first, and the number of all its samples."""
    index = run.index(of)
    found = _of_prompt(index, prompt_key, dataset)
    return {"total": found.num_rows, "rows": _numbers(found)[-MAX_HISTORY:], "indexed": index.progress}


def _of_prompt(index: SampleIndex, prompt_key: int, dataset: str | None) -> pa.Table:
    """Return the rows of a prompt, only those of `dataset` if it is given: datasets may judge the same prompt in different ways."""
    found = index.table().filter(pc.field("prompt") == prompt_key)
    return found if dataset is None else found.filter(pc.field("dataset") == dataset)


def prompts_answer(
    run: RunReader, order: PromptOrder, offset: int, limit: int, of: SampleSet = "train", dataset: str | None = None
) -> Answer:
    """Return prompts with the text of their newest sample, their pass rates, and their mean rewards by step."""
    index = run.index(of)
    table = index.table()
    prompts = prompt_table(table if dataset is None else table.filter(pc.field("dataset") == dataset), order)
    shown = prompts.slice(offset, limit)
    by_step = rewards_by_step(table.filter(pc.field("prompt").isin(shown["prompt"].to_pylist())))
    rows = [
        {
            **{name: number(row[name]) for name in ("pass_rate", "mean", "first", "last", "change")},
            **{name: row[name] for name in ("num_samples", "num_steps", "dataset")},
            "prompt_key": str(row["prompt"]),
            "steps": by_step[row["prompt"], row["dataset"]],
            "text": "".join(
                short_prompt(text.get("prompt")) for text in _readable_rows(index.file(row["newest"]), [row["row"]], ["prompt"])
            ),
        }
        for row in shown.to_pylist()
    ]
    any_passes = prompts["pass_rate"].null_count < prompts.num_rows
    return {"total": prompts.num_rows, "any_passes": any_passes, "offset": offset, "rows": rows, "indexed": index.progress}


def others_answer(
    runs: Sequence[RunReader], run: RunReader, prompt_key: int, step: int, of: SampleSet = "train", dataset: str | None = None
) -> Answer:
    """Return the responses of other runs to the same prompt, each at the step nearest to `step`."""
    found = []
    for other in runs:
        table = _of_prompt(other.index(of), prompt_key, dataset)
        if other is run or not table.num_rows:
            continue
        nearest = min(table["step"].unique().to_pylist(), key=lambda known: (abs(known - step), known))
        members = table.filter(pc.field("step") == nearest).slice(0, MAX_OTHERS)
        texts = _readable_rows(other.index(of).file(nearest), members["row"].to_pylist(), _MEMBER_COLUMNS)
        found.append({"run": other.name, "step": nearest, "members": [{**line, **text} for line, text in zip(_numbers(members), texts)]})
    return {"runs": found}


def steps_answer(run: RunReader) -> Answer:
    """Return the seconds of every step by cause: one list per cause, one entry per step."""
    run.update_metrics()
    causes = run.causes()
    names = list(dict.fromkeys(cause.name for _, of_step in causes for cause in of_step))
    seconds = {name: [0.0] * len(causes) for name in names}
    for at, (_, of_step) in enumerate(causes):
        for cause in of_step:
            seconds[cause.name][at] = round(cause.seconds, 4)
    idle = [number(value) for value in run.metrics.column("perf/idle_fraction")]
    return {"steps": [step for step, _ in causes], "causes": seconds, "idle": idle, "trace_read": run.trace.share_read}


def step_answer(run: RunReader, step: int) -> Answer | None:
    """Return the timeline of one step; None if its times were not recorded."""
    run.update_metrics()
    found = run.step_time(step)
    return None if found is None else asdict(found)


def health_answer(run: RunReader) -> Answer:
    run.update_metrics()
    watched = [watch.key for watch in WATCHES if watch.key in run.metrics.columns]
    alarms = [asdict(alarm) for alarm in run.alarms()]
    return {"alarms": alarms, "agreement": comparison(run.metrics), "watched": watched, "log": run.log_warnings()}
