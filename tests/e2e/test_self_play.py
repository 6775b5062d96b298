"""The self-play example: two samples of a prompt play each other."""

from pathlib import Path

import pyarrow.parquet as pq

from tests.e2e.command import succeed
from tests.e2e.records import metrics

CONFIG = Path(__file__).parents[2] / "examples" / "self_play" / "config.yaml"


def test_both_sides_of_every_game_are_trained(tmp_path: Path) -> None:
    sizes = ["--num-rollout", 2, "--rollout-batch-size", 8, "--n-samples-per-prompt", 4]
    succeed("train", "--config", CONFIG, "--no-eval", "--run-dir", tmp_path / "run", *sizes)
    assert len(metrics(tmp_path / "run")) == 2
    rows = pq.read_table(tmp_path / "run" / "samples" / "rollout_000001.parquet").to_pylist()
    assert len(rows) == 32
    by_index = {row["index"]: row for row in rows}
    for index in range(min(by_index), max(by_index), 2):
        first, second = by_index[index], by_index[index + 1]
        assert (first["status"], second["status"]) == ("completed", "completed")
        heaps = [int(turn["content"].split()[0]) for row in (first, second) for turn in row["turns"] if turn["role"] == "user"]
        assert len(set(heaps)) == len(heaps) and max(heaps) == int(first["label"]) == int(second["label"])
        assert sorted([first["turns"][-1]["reward"] > 0.5, second["turns"][-1]["reward"] > 0.5]) == [False, True]
        assert first["advantages"] and second["advantages"]
