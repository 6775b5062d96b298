"""Images on a GPU: SGLang engines and the torch trainer see the same pictures, and the reward of the shapes example rises.

FULIGO_SGLANG_PYTHON and FULIGO_SGLANG_PYTHONPATH are as in test_sglang_cuda.py; engine and trainer share one GPU.
"""

from pathlib import Path

import pytest
from safetensors.torch import load_file

from tests.e2e.records import metrics
from tests.gpu.sglang_runs import PYTHON, train_on_sglang

EXAMPLE = Path(__file__).parents[2] / "examples" / "shapes"

pytestmark = pytest.mark.skipif(PYTHON is None, reason="FULIGO_SGLANG_PYTHON names no interpreter with SGLang")


@pytest.mark.parametrize("frozen", [False, True], ids=["trained", "frozen"])
def test_a_model_learns_to_count_what_it_sees(tmp_path: Path, frozen: bool) -> None:
    run = tmp_path / "run"
    train_on_sglang(
        timeout_s=400,
        config=EXAMPLE / "config.yaml",
        run_dir=run,
        num_rollout=12,
        eval_interval=12,
        save_interval=12,
        train_backend="torch",
        rollout_backend="sglang",
        actor_num_gpus_per_node=1,
        rollout_num_gpus=1,
        update_weight_transport="tensor",
        sglang_mm_attention_backend="sdpa",
        sglang_cuda_graph_max_bs_decode=64,
        colocate=True,
        freeze_vision_tower=frozen or None,
    )

    steps = metrics(run)
    rewards = [round(step["rollout/reward_mean"], 3) for step in steps]
    differences = [round(step["train/logprob_abs_diff"], 4) for step in steps]
    print(f"rewards {rewards}\ndifferences {differences}")
    assert rewards[-1] > rewards[0] + 0.2
    assert max(differences) < 0.05, "engine and trainer see the same images"
    assert all(step["rollout/num_failed"] == 0 for step in steps)
    before = load_file(EXAMPLE / "model" / "model.safetensors")
    (exported,) = (run / "checkpoints" / "iter_0000012" / "hf").glob("*.safetensors")
    after = load_file(exported)
    changed = {name for name, tensor in before.items() if not tensor.float().equal(after[name].float())}
    assert any(name.startswith("model.visual.") for name in changed) is not frozen
