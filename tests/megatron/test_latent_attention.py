"""Multi-head latent attention on Megatron-Core: gradients against transformers for families and layouts."""

from pathlib import Path
from typing import Any

import pytest

from fuligo.config.groups import OptimizerFlags
from fuligo.layout.megatron import Layout
from fuligo.trainer.objective import LossSettings
from fuligo.trainer.packing import Capacity
from tests import train_batches
from tests.megatron.checkpoints import save_uneven
from tests.megatron.gradients import assert_gradients_agree, megatron_gradients, torch_gradients
from tests.megatron.policies import settings_of
from tests.megatron.ranks import RankPool

LENGTHS = [(4, 9), (1, 3), (6, 9), (2, 1), (5, 14), (3, 9)]
"""(prompt, response) lengths."""
LOSS = LossSettings(loss_type="sft_loss")
SLOW = pytest.mark.slow

LAYOUTS = {
    "one": Layout(),
    "tp2": Layout(tp=2, num_ranks=2),
    "tp2 sp": Layout(tp=2, sequence_parallel=True, num_ranks=2),
    "cp2": Layout(cp=2, num_ranks=2),
    "pp2": Layout(pp=2, num_ranks=2),
    "tp2 sp cp2": Layout(tp=2, cp=2, sequence_parallel=True, num_ranks=4),
    "tp2 sp pp2": Layout(tp=2, pp=2, sequence_parallel=True, num_ranks=4),
}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10_000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 8,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
    "mscale": 0.7,
    "mscale_all_dim": 1.0,
}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    # One epsilon for all norms, as SGLang has it; transformers' class takes 1e-6 for those of the latents (`models/modules.py`).
    "glm4_moe_lite": ("glm4_moe_lite", {"rms_norm_eps": 0.01}),
    "deepseek_v3 yarn": ("deepseek_v3", {"rope_parameters": YARN}),
    "kimi_k2 yarn": ("kimi_k2", {"rope_parameters": YARN}),
    "deepseek_v3 dense": ("deepseek_v3", {"first_k_dense_replace": 2}),
    "deepseek_v3 direct queries": ("deepseek_v3", {"q_lora_rank": None, "first_k_dense_replace": 2}),
}


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory):
    made: dict[str, Path] = {}

    def checkpoint(model: str) -> Path:
        if model not in made:
            family, shape = MODELS[model]
            made[model] = save_uneven(tmp_path_factory.mktemp(family), family, **shape)
        return made[model]

    return checkpoint


@pytest.mark.parametrize(
    ("model", "layout"),
    [
        ("glm4_moe_lite", "tp2 sp"),
        ("glm4_moe_lite", "cp2"),
        ("deepseek_v3 yarn", "one"),
        ("kimi_k2 yarn", "one"),
        ("deepseek_v3 dense", "tp2"),
        *(
            pytest.param(model, layout, marks=SLOW)
            for model in ("glm4_moe_lite", "deepseek_v3 yarn")
            for layout in LAYOUTS
            if layout != "tp2"
        ),
        *(pytest.param(model, layout, marks=SLOW) for model in ("deepseek_v3 dense", "deepseek_v3 direct queries") for layout in LAYOUTS),
    ],
)
def test_gradients_are_those_of_the_torch_trainer(pool: RankPool, checkpoints, model: str, layout: str) -> None:
    directory, shape = checkpoints(model), LAYOUTS[layout]
    batch = train_batches.batch(train_batches.samples(LENGTHS))
    is_dense = MODELS[model][1].get("first_k_dense_replace") == 2
    settings = settings_of(
        directory,
        shape,
        flags={"num_experts": None} if is_dense else None,  # then TP needs no sequence parallelism
        capacity=Capacity(max_tokens=34),
        loss=LOSS,
        dispatcher="alltoall",
        optimizer_place=OptimizerFlags(use_distributed_optimizer=False),
    )
    got, *_ = pool.run(shape.num_ranks, megatron_gradients, settings, batch)
    assert_gradients_agree(got, torch_gradients(directory, batch, LOSS))
