"""Evaluation datasets from flags and from a YAML file."""

from pathlib import Path

import pytest

from fuligo.config import Config
from fuligo.config.groups import EvalFlags, RolloutFlags
from fuligo.errors import ConfigError
from fuligo.rollout.eval_sets import eval_set_specs


def config(tmp_path: Path, yaml: str | None = None, **flags: object) -> Config:
    if yaml is not None:
        path = tmp_path / "eval.yaml"
        path.write_text(yaml)
        flags["eval_config"] = str(path)
    return Config(eval=EvalFlags(**flags), rollout=RolloutFlags(rollout_top_p=0.9, rollout_stop=["x"]))


GOOD = """
eval:
  defaults: {n_samples_per_eval_prompt: 4, temperature: 0.6}
  datasets:
    - {name: aime, path: aime.jsonl, rm_type: deepscaler, label_key: label, n_samples_per_eval_prompt: 16}
    - {name: gsm8k, path: "gsm8k.parquet@[0:9]", label_key: answer, max_response_len: 7, top_k: 5}
"""


def test_pairs_of_names_and_paths(tmp_path: Path):
    specs = eval_set_specs(config(tmp_path, eval_prompt_data=["a", "a.jsonl", "b", "b.parquet"]))
    assert [(spec.name, spec.path) for spec in specs] == [("a", ["a.jsonl"]), ("b", ["b.parquet"])]


def test_a_single_path_is_a_data_set_named_aime(tmp_path: Path):
    (spec,) = eval_set_specs(config(tmp_path, eval_prompt_data=["a.jsonl"]))
    assert (spec.name, spec.path) == ("aime", ["a.jsonl"])


def test_without_either_there_is_nothing_to_evaluate(tmp_path: Path):
    assert eval_set_specs(config(tmp_path)) == []


def test_an_entry_overrides_the_defaults_and_they_override_the_flags(tmp_path: Path):
    given = config(tmp_path, GOOD, eval_temperature=0.3, eval_max_response_len=50)
    aime, gsm8k = eval_set_specs(given)
    assert (aime.n_samples_per_eval_prompt, gsm8k.n_samples_per_eval_prompt) == (16, 4)
    assert aime.has_own_reward(given)
    assert not gsm8k.has_own_reward(given)
    params = gsm8k.sampling_params(given)
    assert (params.temperature, params.max_new_tokens, params.top_k) == (0.6, 7, 5)
    assert (params.top_p, params.stop) == (0.9, ("x",)), "inherited from the rollout"
    assert aime.sampling_params(given).max_new_tokens == 50, "inherited from the eval flags"


@pytest.mark.parametrize(
    ("yaml", "message"),
    [
        ("eval: {datasets: [{name: a, path: p, temprature: 1}]}", r"dataset 1: unknown key temprature.*temperature"),
        ("eval: {datasets: [{name: a, path: p, top_p: 2}]}", r"dataset 1: top_p: .*less than or equal to 1 \(given: 2\)"),
        ("eval: {datasets: [{path: p}]}", r"dataset 1: name"),
        ("eval: {datasets: [{name: a/b, path: p}]}", r"dataset 1: name"),
        ("eval: {datasets: [{name: a, path: p}, {name: a, path: q}]}", r"different names; listed twice: a"),
        ("eval: {datasets: {a: p}}", r"the file must hold `eval:`"),
        ("eval: {datasets: [], more: 1}", r"the file must hold `eval:`"),
        ("[1, 2]", r"the file must hold `eval:`"),
        ("eval: {datasets: [a]}", r"must be a mapping"),
        ("eval: {datasets: [", r"is not valid YAML"),
        ("eval: {datasets: [{name: a, path: p, rm_type: deepscalar}]}", r"dataset a: --rm-type deepscalar.*did you mean deepscaler"),
        ("eval: {datasets: [{name: a, path: p, rm_type: dapo}]}", r"dataset a: --rm-type dapo returns a dict"),
        ("eval: {datasets: [{name: a, path: p, rm_type: remote_rm}]}", r"dataset a: --rm-type remote_rm needs --rm-url"),
    ],
)
def test_a_wrong_file_is_refused_with_the_place_and_the_rule(tmp_path: Path, yaml: str, message: str):
    with pytest.raises(ConfigError, match=message):
        eval_set_specs(config(tmp_path, yaml))


def test_a_reward_that_compares_needs_a_label(tmp_path: Path):
    yaml = "eval: {datasets: [{name: a, path: p, rm_type: math}, {name: b, path: p, rm_type: math, label_key: answer}]}"
    with pytest.raises(ConfigError) as caught:
        eval_set_specs(config(tmp_path, yaml))
    assert caught.value.problems == (
        "evaluation dataset a: --rm-type math compares responses with a label, but no column is given; name the column of the label with "
        "--label-key",
    )


def test_an_evaluation_may_be_greedy_where_training_is_not(tmp_path: Path):
    yaml = "eval: {datasets: [{name: a, path: p}, {name: b, path: p, temperature: 0.7}]}"
    given = config(tmp_path, yaml, eval_temperature=0.0)
    assert [spec.sampling_params(given).temperature for spec in eval_set_specs(given)] == [0.0, 0.7]
    given = config(tmp_path, yaml.replace("0.7", "0"))
    assert [spec.sampling_params(given).temperature for spec in eval_set_specs(given)] == [1.0, 0.0]


def test_all_problems_are_reported_at_once(tmp_path: Path):
    yaml = "eval: {datasets: [{name: a, path: p, x: 1}, {name: b, path: p, temperature: -1}]}"
    with pytest.raises(ConfigError) as caught:
        eval_set_specs(config(tmp_path, yaml))
    assert len(caught.value.problems) == 2


def test_a_missing_file_is_named(tmp_path: Path):
    with pytest.raises(ConfigError, match=r"cannot read --eval-config .*none\.yaml: "):
        eval_set_specs(config(tmp_path, eval_config=str(tmp_path / "none.yaml")))
