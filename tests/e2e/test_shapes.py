"""The shapes example: a vision-language model, from pictures in a parquet file to a reward that rises."""

from pathlib import Path

import pyarrow.parquet as pq
import torch
from safetensors.torch import load_file

from tests.e2e.command import succeed
from tests.e2e.records import metrics

EXAMPLE = Path(__file__).parents[2] / "examples" / "shapes"


def test_the_model_learns_to_count_and_its_frozen_tower_stays(tmp_path: Path) -> None:
    run = tmp_path / "run"
    sizes = ["--num-rollout", 6, "--rollout-batch-size", 24]
    given = ["--freeze-vision-tower", "--check-weight-update-equal", "--save-interval", 6]
    succeed("train", "--config", EXAMPLE / "config.yaml", "--no-eval", "--run-dir", run, *sizes, *given)

    first, *_, last = metrics(run)
    assert last["rollout/reward_mean"] > first["rollout/reward_mean"] + 0.2
    assert max(step["train/logprob_abs_diff"] for step in metrics(run)) < 1e-4, "engine and trainer see the same image"
    rows = pq.read_table(run / "samples" / "rollout_000003.parquet").to_pylist()
    for row in rows:
        (image,) = row["images"]
        assert image["source"] == "image 1 of 'images'" and (image["num_rows"], image["num_columns"]) == (4, 4)

    before = load_file(EXAMPLE / "model" / "model.safetensors")
    (exported,) = (run / "checkpoints" / "iter_0000006" / "hf").glob("*.safetensors")
    after = load_file(exported)
    assert before.keys() == after.keys()
    changed = {name for name, tensor in before.items() if not torch.equal(tensor.float(), after[name])}
    assert not any(name.startswith("model.visual.") for name in changed)
    assert "model.language_model.layers.0.self_attn.q_proj.weight" in changed
