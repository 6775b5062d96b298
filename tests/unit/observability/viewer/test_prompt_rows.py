"""Pass rates of prompts against a count by hand."""

import math
from collections import defaultdict

import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fuligo.observability.viewer.answers import others_answer, prompts_answer
from fuligo.observability.viewer.run import RunReader
from fuligo.observability.viewer.sample_index import INDEX_SCHEMA
from fuligo.observability.viewer.sample_rows import PromptOrder, prompt_table, rewards_by_step
from tests.unit.observability.viewer.recorded_run import NUM_STEPS, PROMPTS

ROW = st.tuples(st.integers(0, 3), st.integers(0, 4), st.sampled_from([0.0, 0.5, 1.0, None, math.nan]))


def index(rows: list[tuple[int, int, float | None]], datasets: list[str] | None = None) -> pa.Table:
    """Return the index of samples (prompt, step, reward)."""
    columns = {"prompt": [row[0] for row in rows], "step": [row[1] for row in rows], "reward": [row[2] for row in rows]}
    passed = [None if reward is None else reward >= 1 for reward in columns["reward"]]
    given = columns | {"row": list(range(len(rows))), "passed": passed, "dataset": datasets or [None] * len(rows)}
    return pa.table(
        {field.name: pa.array(given.get(field.name, [None] * len(rows)), field.type) for field in INDEX_SCHEMA}, schema=INDEX_SCHEMA
    )


@given(st.lists(ROW, max_size=40), st.sampled_from(["pass_rate", "-pass_rate", "change", "-change", "num_samples"]))
def test_prompts_are_counted_and_sorted(rows: list[tuple[int, int, float | None]], order: PromptOrder) -> None:
    by_prompt: dict[int, dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for prompt, step, reward in rows:
        if reward is not None and not math.isnan(reward):
            by_prompt[prompt][step].append(reward)
    found = prompt_table(index(rows), order).to_pylist()
    assert {row["prompt"] for row in found} == set(by_prompt)
    any_passes = any(reward >= 1 for steps in by_prompt.values() for rewards in steps.values() for reward in rewards)
    for row in found:
        steps = by_prompt[row["prompt"]]
        every = [reward for rewards in steps.values() for reward in rewards]
        means = [sum(steps[step]) / len(steps[step]) for step in sorted(steps)]
        assert row["num_samples"] == len(every) and row["num_steps"] == len(steps) and row["newest"] == max(steps)
        assert row["pass_rate"] == (pytest.approx(sum(reward >= 1 for reward in every) / len(every)) if any_passes else None)
        assert (row["mean"], row["change"]) == pytest.approx((sum(every) / len(every), means[-1] - means[0]))
    name = order.removeprefix("-")
    values = [row["mean" if name == "pass_rate" and not any_passes else name] for row in found]
    assert values == sorted(values, reverse=order.startswith("-"))


def test_rewards_by_step_leave_out_what_was_not_judged() -> None:
    assert rewards_by_step(index([(7, 1, 1.0), (7, 0, 0.0), (7, 1, 0.0), (8, 0, None)])) == {(7, None): [(0, 0.0), (1, 0.5)], (8, None): []}


def test_datasets_judge_the_same_prompt_apart() -> None:
    """The shaped rewards of `b` never reach 1, so it has no pass rates, and its prompts come last."""
    rows = index([(7, 0, 1.0), (7, 0, 0.5), (8, 0, 0.0), (7, 3, 0.9)], ["a", "b", "a", "b"])
    found = [(row["prompt"], row["dataset"], row["pass_rate"], row["mean"]) for row in prompt_table(rows, "-pass_rate").to_pylist()]
    assert found == [(7, "a", 1.0, 1.0), (8, "a", 0.0, 0.0), (7, "b", None, pytest.approx(0.7))]
    assert [row["dataset"] for row in prompt_table(rows, "pass_rate").to_pylist()] == ["a", "a", "b"]
    assert rewards_by_step(rows)[7, "b"] == [(0, 0.5), (3, 0.9)]


def test_an_answer_has_texts_and_curves_of_one_page(run: RunReader) -> None:
    answer = prompts_answer(run, "-pass_rate", 1, 2)
    assert answer["total"] == len(PROMPTS) and len(answer["rows"]) == 2
    whole = prompts_answer(run, "-pass_rate", 0, 10)["rows"]
    assert whole[1:3] == answer["rows"] and {row["text"] for row in whole} == set(PROMPTS)
    assert all(len(row["steps"]) == NUM_STEPS for row in whole)
    assert answer["any_passes"]
    assert prompts_answer(run, "pass_rate", 0, 10, "eval", "held_out")["total"] == 1


def test_other_runs_answer_with_the_nearest_step(run: RunReader) -> None:
    key = int(prompts_answer(run, "pass_rate", 0, 1)["rows"][0]["prompt_key"])
    other = RunReader(run.path, "other")
    other.update_rest(float("inf"))
    (found,) = others_answer([run, other], run, key, 99)["runs"]
    assert (found["run"], found["step"], len(found["members"])) == ("other", NUM_STEPS - 1, 4)
    assert all(member["response"] for member in found["members"])
    assert others_answer([run, other], run, 1, 0) == {"runs": []}
