"""Sample files: exact values of every sample, under the columns that tools rely on."""

import json
from dataclasses import asdict
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from fuligo.observability.samples import SCHEMA, Training, prompt_key, sample_table, write_table
from fuligo.types import PromptImage, Sample, SampleGroup, SampleStatus, TokenScores, TrainSample

COLUMNS = [
    "index",
    "group_index",
    "prompt",
    "response",
    "label",
    "reward",
    "passed",
    "parts",
    "status",
    "finish_reason",
    "kept",
    "drop_reason",
    "error",
    "engine",
    "response_length",
    "advantage_mean",
    "oldest_version",
    "prompt_key",
    "prompt_ids",
    "response_ids",
    "loss_mask",
    "engine_logprobs",
    "trainer_logprobs",
    "ref_logprobs",
    "teacher_logprobs",
    "entropy",
    "values",
    "returns",
    "advantages",
    "versions",
    "metadata",
    "spans",
    "turns",
    "images",
]


def trained(sample: Sample, value: float, **fields: object) -> TrainSample:
    tokens = np.full(len(sample.response_ids), value, np.float32)
    known = {"loss_mask": sample.loss_mask, "reward": 1.0, "engine_logprobs": sample.engine_logprobs, "versions": sample.versions}
    return TrainSample(
        index=sample.index,
        group_index=sample.group_index,
        tokens=sample.tokens,
        prompt_length=len(sample.prompt_ids),
        mask_sum=1.0,
        **{**known, "advantages": tokens, **fields},
    )


def scores(sample: Sample, value: float) -> TokenScores:
    tokens = np.full(len(sample.response_ids), value, np.float32)
    return TokenScores(logprobs=-tokens, entropy=tokens)


def test_columns_are_the_documented_ones() -> None:
    assert SCHEMA.names == COLUMNS
    assert sample_table([]).schema.equals(SCHEMA)


def test_a_file_has_all_values_of_the_samples(tmp_path: Path, make_group) -> None:
    groups = [make_group(0, kept=True), make_group(1, kept=False, drop_reason="zero_std")]
    write_table(tmp_path / "rollout_000000.parquet", sample_table(groups))
    table = pq.read_table(tmp_path / "rollout_000000.parquet")
    assert table.schema.equals(SCHEMA)
    rows = table.to_pylist()
    assert [row["kept"] for row in rows] == [True, True, False, False]
    assert [row["drop_reason"] for row in rows] == [None, None, "zero_std", "zero_std"]
    for row, sample in zip(rows, [sample for group in groups for sample in group.samples], strict=True):
        for name in ("index", "group_index", "prompt", "response", "label", "reward", "status", "finish_reason", "error"):
            assert row[name] == getattr(sample, name), name
        for name in ("prompt_ids", "response_ids", "loss_mask", "engine_logprobs", "versions"):
            np.testing.assert_array_equal(np.array(row[name], getattr(sample, name).dtype), getattr(sample, name), err_msg=name)
        assert row["spans"] == [asdict(span) for span in sample.spans]
        assert row["engine"] == sample.engine
        assert row["response_length"] == len(sample.response_ids)
        assert row["oldest_version"] == sample.versions.min()
        assert row["trainer_logprobs"] is row["ref_logprobs"] is row["entropy"] is row["advantages"] is row["advantage_mean"] is None
    assert [path.name for path in tmp_path.iterdir()] == ["rollout_000000.parquet"]


def test_an_aborted_sample_without_tokens_has_a_row(make_group) -> None:
    empty = {"response_ids": np.empty(0, np.int32), "loss_mask": np.empty(0, np.int8), "engine_logprobs": np.empty(0, np.float32)}
    group = make_group(0, size=1, status=SampleStatus.ABORTED, reward=None, versions=np.empty(0, np.int32), spans=[], response="", **empty)
    row = sample_table([group]).to_pylist()[0]
    assert (row["status"], row["reward"], row["response_ids"], row["spans"]) == ("aborted", None, [], [])
    assert (row["engine"], row["response_length"], row["oldest_version"]) == (None, 0, None)


def test_trained_samples_are_matched_in_any_order(make_group) -> None:
    groups = [make_group(0), make_group(1, kept=False)]
    kept = groups[0].samples
    training = Training(
        [trained(kept[1], 0.5), trained(kept[0], -0.5)],
        {0: scores(kept[1], 3.0), 1: scores(kept[0], 2.0)},
    )
    rows = sample_table(groups, training).to_pylist()
    assert [row["advantages"] for row in rows] == [[-0.5] * 3, [0.5] * 3, None, None]
    assert [row["advantage_mean"] for row in rows] == [-0.5, 0.5, None, None]
    assert [row["entropy"] for row in rows] == [[2.0] * 3, [3.0] * 3, None, None]
    assert [row["trainer_logprobs"] for row in rows] == [[-2.0] * 3, [-3.0] * 3, None, None]


def test_trainer_logprobs_are_the_old_ones_if_computed(make_group) -> None:
    group = make_group(0, size=1)
    sample = group.samples[0]
    old, ref = np.full(3, -7, np.float32), np.full(3, -8, np.float32)
    training = Training([trained(sample, 0.0, old_logprobs=old, ref_logprobs=ref)], {0: scores(sample, 1.0)})
    row = sample_table([group], training).to_pylist()[0]
    assert (row["trainer_logprobs"], row["ref_logprobs"]) == ([-7.0] * 3, [-8.0] * 3)


def test_values_and_returns_of_the_value_model_are_recorded(make_group) -> None:
    group = make_group(0, size=2)
    first, second = group.samples
    expected, learnt = np.array([0.1, 0.2, 0.4], np.float32), np.ones(3, np.float32)
    rows = sample_table([group], Training([trained(first, 0.0, values=expected, returns=learnt), trained(second, 0.0)])).to_pylist()
    np.testing.assert_array_equal(np.array(rows[0]["values"], np.float32), expected)
    assert (rows[0]["returns"], rows[1]["values"], rows[1]["returns"]) == ([1.0] * 3, None, None)


def test_parts_split_from_one_rollout_keep_their_own_advantages(make_group) -> None:
    group = make_group(0, size=2)
    first, second = group.samples
    second.index = first.index
    rows = sample_table([group], Training([trained(first, 1.0), trained(second, 2.0)])).to_pylist()
    assert [row["advantages"][0] for row in rows] == [1.0, 2.0]


def test_values_other_than_text_are_json(make_group) -> None:
    messages = [{"role": "user", "content": "1 + 1 =? ✓"}]
    metadata = {"rm_type": "math", "scores": np.array([1, 2]), 3: "key"}
    group = make_group(0, size=1, prompt=messages, label=["2", 2.0], metadata=metadata, reward={"acc": 0.25, "pred": "2"})
    row = sample_table([group], reward_key="acc").to_pylist()[0]
    assert json.loads(row["prompt"]) == messages
    assert json.loads(row["label"]) == ["2", 2.0]
    assert row["reward"] == 0.25
    assert json.loads(row["metadata"]) == {"reward": {"acc": 0.25, "pred": "2"}, "rm_type": "math", "scores": [1, 2], "3": "key"}


@pytest.mark.parametrize("size", [1, 64, 65, 200])
def test_row_groups_hold_64_samples_compressed_with_zstd(tmp_path: Path, make_group, size: int) -> None:
    write_table(tmp_path / "file.parquet", sample_table([make_group(0, size=size)]))
    meta = pq.read_metadata(tmp_path / "file.parquet")
    assert [meta.row_group(number).num_rows for number in range(meta.num_row_groups)] == [64] * (size // 64) + [size % 64] * (size % 64 > 0)
    assert {meta.row_group(0).column(column).compression for column in range(meta.num_columns)} == {"ZSTD"}


def test_a_sample_passes_by_the_value_that_evaluations_report(make_group) -> None:
    shaped = make_group(0, size=1, reward={"score": 0.9, "acc": 1.0})
    wrong = make_group(1, size=1, reward={"score": 1.5, "acc": 0.0})
    plain, unjudged = make_group(2, size=1, reward=1.0), make_group(3, size=1, reward=None)
    rows = sample_table([shaped, wrong, plain, unjudged], reward_key="score", pass_key="acc").to_pylist()
    assert [(row["reward"], row["passed"]) for row in rows] == [(0.9, True), (1.5, False), (1.0, True), (None, None)]
    assert [row["passed"] for row in sample_table([shaped, wrong], reward_key="score").to_pylist()] == [False, True]
    penalized = make_group(4, size=1, reward=0.9, metrics={"reward_main": 1.0, "reward_brief": -0.1})
    both = make_group(5, size=1, reward={"score": 1.0, "acc": 0.0}, metrics={"reward_main": 1.1, "reward_brief": -0.1})
    assert [row["passed"] for row in sample_table([penalized, both], reward_key="score", pass_key="acc").to_pylist()] == [True, False]


def test_parts_of_a_reward_are_its_numbers_and_the_further_rewards(make_group) -> None:
    graded = {"acc": np.float32(0.5), "ok": True, "pred": "2", "huge": 10**400, "nan": float("nan")}
    group = make_group(0, size=1, reward=graded, metrics={"reward_main": 0.5, "num_calls": 3.0})
    rows = sample_table([group, make_group(1, size=1, reward=1.0)]).to_pylist()
    assert rows[0]["parts"] == [("acc", 0.5), ("ok", 1.0), ("reward_main", 0.5)]
    assert rows[1]["parts"] is None


def test_the_footer_has_minima_and_maxima_of_the_search_columns(tmp_path: Path, make_group) -> None:
    write_table(tmp_path / "file.parquet", sample_table([make_group(0, size=70, kept=True)]))
    meta = pq.read_metadata(tmp_path / "file.parquet")
    columns = {meta.row_group(0).column(at).path_in_schema: meta.row_group(0).column(at) for at in range(meta.num_columns)}
    with_statistics = {name for name, column in columns.items() if column.is_stats_set}
    assert with_statistics == {
        *("index", "group_index", "reward", "passed", "status", "kept", "engine", "response_length", "advantage_mean"),
        *("oldest_version", "prompt_key", "versions.list.element"),
    }
    assert (columns["index"].statistics.min, columns["index"].statistics.max) == (0, 63)


def test_the_same_prompt_has_the_same_key_in_every_process(make_group) -> None:
    messages = [{"role": "user", "content": "1 + 1 =?"}]
    groups = [make_group(0, prompt=messages), make_group(1, prompt=[dict(messages[0])]), make_group(2, prompt="1 + 1 =?")]
    keys = [row["prompt_key"] for row in sample_table(groups).to_pylist()]
    assert keys[:4] == [prompt_key('[{"role":"user","content":"1 + 1 =?"}]')] * 4
    assert keys[4:] == [prompt_key("1 + 1 =?")] * 2 != keys[:2]


def test_values_that_json_readers_cannot_hold_are_text(make_group) -> None:
    """They come from prompt files and hooks, and must not end the run at the step that draws them."""
    group = make_group()
    first, second = group.samples[:2]
    first.label, first.metadata = 10**30, {"n": -(2**63) - 1, "x": [2**64, {"y": 10**5000}], 10**20: "half \ud83d", "ok": 2**64 - 1}
    second.label = nested = []
    for _ in range(2000):
        nested.append([])
        nested = nested[0]
    rows = sample_table([group]).to_pylist()
    assert json.loads(rows[0]["label"]) == str(10**30)
    metadata = json.loads(rows[0]["metadata"])
    assert metadata == {"n": str(-(2**63) - 1), "x": [str(2**64), {"y": hex(10**5000)}], str(10**20): "half \\ud83d", "ok": 2**64 - 1}
    assert rows[1]["label"].startswith("[[[")


def test_images_are_named_and_tell_equal_prompts_apart() -> None:
    ids = np.arange(9, dtype=np.int32)
    images = [PromptImage(f"{name}.png", name.encode(), name * 32, 2, 2, 3) for name in "ab"]
    groups = [SampleGroup(n, n, [Sample(n, n, "<image>what", ids, images=(image,))]) for n, image in enumerate([*images, images[0]])]
    rows = sample_table(groups).to_pylist()
    assert rows[1]["images"] == [{"source": "b.png", "digest": "b" * 32, "first_token": 2, "num_rows": 2, "num_columns": 3}]
    keys = [row["prompt_key"] for row in rows]
    assert keys[0] == keys[2] != keys[1]
    (text,) = sample_table([SampleGroup(0, 0, [Sample(0, 0, "what", ids)])]).to_pylist()
    assert (text["images"], text["prompt_key"]) == ([], prompt_key("what"))
