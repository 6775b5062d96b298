"""Datasets of the Hub, from a server on this machine and then only from the cache."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.fake_hub import FakeHub, serve_hub

PROGRAM = """
import json, sys
from fuligo.config.groups import DataFlags
from fuligo.data.dataset import Rows
from fuligo.errors import DataError
for entry in sys.argv[1:]:
    try:
        rows = Rows.open(entry, DataFlags())
        print(json.dumps({"prompts": [rows[row].prompt for row in range(len(rows))], "digest": rows.digest()}))
    except DataError as error:
        print(json.dumps({"error": str(error)}))
"""


@pytest.fixture
def hub(tmp_path: Path) -> Iterator[FakeHub]:
    """Hub with acme/sums (two splits of jsonl) and acme/two (two configurations of parquet)."""
    sums, two = tmp_path / "hub/datasets/acme/sums", tmp_path / "hub/datasets/acme/two"
    sums.mkdir(parents=True)
    for split, count in (("train", 5), ("test", 2)):
        (sums / f"{split}.jsonl").write_text("".join(json.dumps({"input": f"{split} {row}"}) + "\n" for row in range(count)))
    card = "---\nconfigs:\n"
    for config in ("main", "hard"):
        (two / config).mkdir(parents=True)
        pq.write_table(pa.table({"input": [config] * 2}), two / config / "train-0.parquet")
        card += f"- config_name: {config}\n  data_files:\n  - split: train\n    path: {config}/train-*\n"
    (two / "README.md").write_text(f"{card}---\n")
    with serve_hub(tmp_path / "hub") as server:
        yield server


def read(environment: dict[str, str], *entries: str) -> list[dict]:
    """Read the entries in a process of its own, since the library reads its settings when it is imported."""
    command = [sys.executable, "-c", PROGRAM, *entries]
    done = subprocess.run(command, env={**os.environ, **environment}, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.long
def test_a_data_set_is_downloaded_once_and_then_read_without_a_network(hub: FakeHub, tmp_path: Path) -> None:
    entries = ["acme/sums:train@[1:4]", "acme/sums:test", "acme/two:hard:train"]
    environment = hub.environment(tmp_path / "home", HF_TOKEN="hf_secret")
    loaded = read(environment, *entries)
    assert [entry["prompts"] for entry in loaded] == [["train 1", "train 2", "train 3"], ["test 0", "test 1"], ["hard", "hard"]]
    assert "Bearer hf_secret" in hub.tokens
    hub.requests.clear()
    assert read({**environment, "HF_HUB_OFFLINE": "1"}, *entries) == loaded, "with the same digests, which a resume compares"
    assert not hub.requests


@pytest.mark.long
def test_what_is_missing_is_named_with_the_remedy(hub: FakeHub, tmp_path: Path) -> None:
    given = read(hub.environment(tmp_path / "home"), "acme/sums", "acme/sums:dev", "acme/two:train", "acme/nothing:train")
    several, unknown, config, nothing = (entry["error"] for entry in given)
    assert "the splits train, test; choose one, such as acme/sums:train" in several
    assert "the splits train, test; dev is not one of them" in unknown
    assert "['main', 'hard']" in config and "write acme/two:CONFIG:SPLIT" in config
    assert "acme/nothing:train is not a file here" in nothing and "HF_TOKEN" in nothing
    (offline,) = read(hub.environment(tmp_path / "other", HF_HUB_OFFLINE="1"), "acme/sums:train")
    assert "OfflineModeIsEnabled" in offline["error"] and "the same HF_HOME" in offline["error"]
