"""Prompts of a run by pass rate: which ones are solved, which never, and which change, as pure functions of the sample index."""

from typing import Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

PromptOrder = Literal["pass_rate", "-pass_rate", "change", "-change", "num_samples", "-num_samples"]
PASS_REWARD = 1.0
"""Reward from which a response passes, as in the metrics `pass@k`."""


def prompt_table(index: pa.Table, order: PromptOrder) -> pa.Table:
    """Return one row per prompt that has rewards, sorted; equal ones by key, so that pages of the list fit together.

    Columns: `prompt` (key), `num_samples` (with a reward), `num_steps`, `pass_rate`, `mean` (reward), `first` and `last` (mean reward of
    the first and last step), `change` (last - first), `newest` and `row` (place of a sample).
    """
    judged = index.filter(pc.field("reward").is_valid() & ~pc.field("reward").is_nan())
    judged = judged.append_column("passed", pa.array((judged["reward"].to_numpy() >= PASS_REWARD).astype(np.float64)))
    steps = judged.group_by(["prompt", "step"], use_threads=False).aggregate(
        [("reward", "mean"), ("passed", "mean"), ("row", "min"), ("row", "count")]
    )
    steps = steps.sort_by([("prompt", "ascending"), ("step", "ascending")])
    prompts = steps["prompt"].to_numpy()
    starts = np.flatnonzero(np.r_[True, prompts[1:] != prompts[:-1]]) if len(prompts) else np.empty(0, np.int64)
    ends = np.r_[starts[1:], len(prompts)].astype(np.int64) - 1
    counts, rewards, passed = (steps[name].to_numpy().astype(np.float64) for name in ("row_count", "reward_mean", "passed_mean"))
    totals = np.add.reduceat(counts, starts) if len(starts) else counts
    weighted = [np.add.reduceat(values * counts, starts) / totals if len(starts) else totals for values in (passed, rewards)]
    table = pa.table(
        {
            "prompt": prompts[starts] if len(starts) else pa.array([], pa.int64()),
            "num_samples": totals.astype(np.int64),
            "num_steps": ends - starts + 1,
            "pass_rate": weighted[0],
            "mean": weighted[1],
            "first": rewards[starts],
            "last": rewards[ends] if len(starts) else rewards,
            "change": (rewards[ends] - rewards[starts]) if len(starts) else rewards,
            "newest": steps["step"].to_numpy()[ends] if len(starts) else pa.array([], pa.int32()),
            "row": steps["row_min"].to_numpy()[ends] if len(starts) else pa.array([], pa.int32()),
        }
    )
    name, direction = order.removeprefix("-"), "descending" if order.startswith("-") else "ascending"
    return table.sort_by([(name, direction), *([("mean", direction)] if name == "pass_rate" else []), ("prompt", "ascending")])


def rewards_by_step(index: pa.Table) -> dict[int, list[tuple[int, float]]]:
    """Return (step, mean reward) of each prompt, oldest first."""
    means = index.group_by(["prompt", "step"], use_threads=False).aggregate([("reward", "mean")]).sort_by("step")
    found: dict[int, list[tuple[int, float]]] = {prompt: [] for prompt in index["prompt"].unique().to_pylist()}
    for row in means.to_pylist():
        if row["reward_mean"] is not None and np.isfinite(row["reward_mean"]):
            found[row["prompt"]].append((row["step"], round(row["reward_mean"], 4)))
    return found
