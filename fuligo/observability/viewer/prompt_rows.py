"""Prompts of a run by pass rate: which ones are solved, which never, and which change, as pure functions of the sample index."""

from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

PromptOrder = Literal["pass_rate", "-pass_rate", "change", "-change", "num_samples", "-num_samples"]


def prompt_table(index: pa.Table, order: PromptOrder) -> pa.Table:
    """Return one row per prompt of a dataset that has rewards, sorted; equal ones by key, so that pages of the list fit together.

    Columns: `prompt` (key), `dataset` (null in training), `num_samples` (with a reward), `num_steps`, `pass_rate` (null where no sample
    of the dataset passes), `mean` (reward), `first` and `last` (mean reward of the first and last step), `change` (last - first),
    `newest` and `row` (place of a sample).
    """
    judged = index.filter(pc.field("reward").is_valid() & ~pc.field("reward").is_nan())
    judged = judged.set_column(judged.column_names.index("passed"), "passed", judged["passed"].fill_null(False).cast(pa.float64()))
    steps = judged.group_by(["prompt", "dataset", "step"], use_threads=False).aggregate(
        [("reward", "mean"), ("passed", "mean"), ("row", "min"), ("row", "count")]
    )
    steps = steps.sort_by([("prompt", "ascending"), ("dataset", "ascending"), ("step", "ascending")])
    prompts, datasets = steps["prompt"].to_numpy(), steps["dataset"].fill_null("").to_numpy()
    is_new = np.r_[True, (prompts[1:] != prompts[:-1]) | (datasets[1:] != datasets[:-1])]
    starts = np.flatnonzero(is_new) if len(prompts) else np.empty(0, np.int64)
    ends = np.r_[starts[1:], len(prompts)].astype(np.int64) - 1
    counts, rewards, passed = (steps[name].to_numpy().astype(np.float64) for name in ("row_count", "reward_mean", "passed_mean"))
    totals = np.add.reduceat(counts, starts) if len(starts) else counts
    weighted = [np.add.reduceat(values * counts, starts) / totals if len(starts) else totals for values in (passed, rewards)]
    table = pa.table(
        {
            "prompt": prompts[starts] if len(starts) else pa.array([], pa.int64()),
            "dataset": steps["dataset"].take(pa.array(starts)),
            "num_samples": totals.astype(np.int64),
            "num_steps": ends - starts + 1,
            "pass_rate": _where_any_passes(weighted[0], datasets[starts]),
            "mean": weighted[1],
            "first": rewards[starts],
            "last": rewards[ends] if len(starts) else rewards,
            "change": (rewards[ends] - rewards[starts]) if len(starts) else rewards,
            "newest": steps["step"].to_numpy()[ends] if len(starts) else pa.array([], pa.int32()),
            "row": steps["row_min"].to_numpy()[ends] if len(starts) else pa.array([], pa.int32()),
        }
    )
    name, direction = order.removeprefix("-"), "descending" if order.startswith("-") else "ascending"
    by_mean = [("mean", direction)] if name == "pass_rate" else []
    return table.sort_by([(name, direction), *by_mean, ("prompt", "ascending"), ("dataset", "ascending")])


def _where_any_passes(pass_rates: np.ndarray, datasets: np.ndarray) -> pa.Array:
    """Return the pass rates, null in datasets where nothing passes: with shaped rewards right answers may stay below 1."""
    passing = set(datasets[pass_rates > 0].tolist())
    return pa.array(pass_rates, pa.float64(), mask=np.array([name not in passing for name in datasets.tolist()], bool))


def rewards_by_step(index: pa.Table) -> dict[tuple[int, str | None], list[tuple[int, float]]]:
    """Return (step, mean reward) of each prompt and dataset, oldest first."""
    means = index.group_by(["prompt", "dataset", "step"], use_threads=False).aggregate([("reward", "mean")]).sort_by("step")
    found: dict[tuple[int, str | None], list[tuple[int, float]]] = {}
    for row in means.to_pylist():
        points = found.setdefault((row["prompt"], row["dataset"]), [])
        if row["reward_mean"] is not None and np.isfinite(row["reward_mean"]):
            points.append((row["step"], round(row["reward_mean"], 4)))
    return found
