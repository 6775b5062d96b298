"""Images on a GPU: SGLang engines and the torch trainer see the same pictures, and the reward of the shapes example rises.

Qwen3.5 in whole runs: on text as it is published, and on images. FULIGO_SGLANG_PYTHON and FULIGO_SGLANG_PYTHONPATH are as in
test_sglang_cuda.py; engine and trainer share one GPU.
"""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file
from torch import Tensor

from tests.e2e.records import metrics
from tests.gpu.sglang_runs import PYTHON, train_on_sglang
from tests.gpu.test_families_sglang_cuda import FAMILIES

EXAMPLE = Path(__file__).parents[2] / "examples" / "shapes"
COLOCATED: dict[str, object] = {
    "train_backend": "torch",
    "rollout_backend": "sglang",
    "actor_num_gpus_per_node": 1,
    "rollout_num_gpus": 1,
    "update_weight_transport": "tensor",
    "sglang_mm_attention_backend": "sdpa",
    "colocate": True,
}

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
        sglang_cuda_graph_max_bs_decode=64,
        **COLOCATED,
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


def tensors_of(directory: Path) -> dict[str, Tensor]:
    return {name: tensor for file in directory.glob("*.safetensors") for name, tensor in load_file(file).items()}


@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe"])
@pytest.mark.parametrize("has_images", [False, True], ids=["text", "images"])
def test_qwen3_5_trains_as_it_is_published(tmp_path: Path, family: str, has_images: bool) -> None:
    """Layers of the sizes of Qwen3.5-35B-A3B, and of a dense model as wide; weights are random, so only scores and files are judged."""
    given = FAMILIES["qwen3_5_moe"]
    if family == "qwen3_5":
        shape = {key: value for key, value in given.shape.items() if "expert" not in key and key != "moe_intermediate_size"}
        given = replace(given, shape={**shape, "intermediate_size": 6144})
    model = given.save(tmp_path / "model", family, device="cuda", dtype=torch.bfloat16)
    torch.cuda.empty_cache()
    rows = [{"prompt": f"what is {number}", "label": str(number)} for number in range(16)]
    if has_images:
        for number, row in enumerate(rows):
            pixels = np.random.default_rng(number).integers(0, 256, (200 + 40 * number, 300, 3), dtype=np.uint8)
            Image.fromarray(pixels).save(tmp_path / f"{number}.png")
            row |= {"prompt": f"<image> what is {number}", "images": [f"{number}.png"]}
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    train_on_sglang(
        timeout_s=500,
        hf_checkpoint=model,
        run_dir=tmp_path / "run",
        prompt_data=tmp_path / "prompts.jsonl",
        input_key="prompt",
        label_key="label",
        multimodal_keys='{"image": "images"}' if has_images else None,
        apply_chat_template=True,
        rm_type="random",
        advantage_estimator="grpo",
        num_rollout=3,
        rollout_batch_size=8,
        n_samples_per_prompt=4,
        rollout_max_response_len=64,
        max_tokens_per_gpu=4096,
        use_dynamic_batch_size=True,
        lr=1e-4,
        save_interval=3,
        save_hf=tmp_path / "whole" / "{rollout_id}",
        sglang_cuda_graph_max_bs_decode=32,
        **COLOCATED,
    )
    steps = metrics(tmp_path / "run")
    differences = [round(step["train/logprob_abs_diff"], 4) for step in steps]
    print(f"{family}, {'images' if has_images else 'text'}: differences {differences}")
    assert max(differences) < 0.1 and all(step["rollout/num_failed"] == 0 for step in steps)
    [exported] = (tmp_path / "whole").iterdir()
    before, after = tensors_of(model), tensors_of(exported)
    assert before.keys() == after.keys() and all(before[name].dtype == after[name].dtype for name in before)
    changed = {name for name in before if not torch.equal(before[name], after[name])}
    assert any(name.startswith("model.visual.") for name in changed) is has_images
    assert any(name.startswith("model.language_model.") for name in changed)
