"""Layers with windows on Megatron-Core (Gemma 3): gradients against the torch trainer, refusals."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch.nn.functional as F

from fuligo.config.groups import OptimizerFlags
from fuligo.errors import ConfigError
from fuligo.formats.hugging_face import read_config_json
from fuligo.layout.megatron import Layout
from fuligo.models.stated_flags import stated_flags
from fuligo.trainer.megatron_backend.model_config import gelu_tanh, transformer_config
from fuligo.trainer.megatron_backend.settings import MegatronTrainerSettings
from fuligo.trainer.objective import LossSettings
from fuligo.trainer.packing import Capacity
from fuligo.trainer.ranks.world import World
from fuligo.types import TrainBatch
from tests import tiny, train_batches
from tests.megatron.checkpoints import save_uneven
from tests.megatron.gradients import assert_gradients_agree, megatron_gradients, torch_gradients
from tests.megatron.policies import settings_of
from tests.megatron.ranks import RankPool
from tests.prefix_trees import tree_samples

LENGTHS = [(4, 9), (1, 3), (6, 9), (2, 1), (5, 14), (12, 20)]
"""(prompt, response) lengths; most are longer than a window."""
LOSS = LossSettings(loss_type="sft_loss")
SLOW = pytest.mark.slow
LAYOUTS = {
    "one": Layout(),
    "tp2": Layout(tp=2, num_ranks=2),
    "cp2": Layout(cp=2, num_ranks=2),
    "tp2 sp pp2": Layout(tp=2, pp=2, sequence_parallel=True, num_ranks=4),
}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    kinds = ["sliding_attention", "full_attention"]
    return save_uneven(tmp_path_factory.mktemp("gemma"), "gemma3_text", layer_types=kinds, sliding_window=5, query_pre_attn_scalar=40)


def batch() -> TrainBatch:
    return train_batches.batch(train_batches.samples(LENGTHS))


@pytest.mark.parametrize("layout", ["cp2", "tp2 sp pp2", *(pytest.param(layout, marks=SLOW) for layout in ("one", "tp2"))])
def test_gradients_are_those_of_the_torch_trainer(pool: RankPool, checkpoint: Path, layout: str) -> None:
    place = OptimizerFlags(use_distributed_optimizer=False)
    settings = settings_of(checkpoint, LAYOUTS[layout], loss=LOSS, capacity=Capacity(max_tokens=34), optimizer_place=place)
    got, *_ = pool.run(LAYOUTS[layout].num_ranks, megatron_gradients, settings, batch())
    assert_gradients_agree(got, torch_gradients(checkpoint, batch(), LOSS))


@pytest.mark.parametrize("layout", ["cp2", pytest.param("tp2 sp pp2", marks=SLOW)])
def test_windows_and_their_rotary_base_follow_the_branches_of_a_tree(pool: RankPool, checkpoint: Path, layout: str) -> None:
    samples = train_batches.batch(tree_samples())
    place = OptimizerFlags(use_distributed_optimizer=False)
    settings = settings_of(
        checkpoint, LAYOUTS[layout], loss=LOSS, capacity=Capacity(max_tokens=150), optimizer_place=place, shares_prefixes=True
    )
    got, *_ = pool.run(LAYOUTS[layout].num_ranks, megatron_gradients, settings, samples)
    assert_gradients_agree(got, torch_gradients(checkpoint, samples, LOSS))


def test_the_published_270m_is_stated_as_flags() -> None:
    """Layers with and without a window are distinguished, and neither scales positions."""
    config = tiny.model_config("gemma3_text", layers=18, head_dim=256, sliding_window=512).to_dict()
    flags = stated_flags(config)
    assert flags["window_size"] == [511, 0]
    assert flags["window_attn_skip_freq"] == "[1]*5+[0]*1+[1]*5+[0]*1+[1]*5+[0]*1"
    assert flags["softmax_scale"] == 256**-0.5
    assert flags["rotary_base"] == 1_000_000
    assert flags["apply_layernorm_1p"] and flags["qk_layernorm"] and flags["post_mlp_layernorm"]
    assert "swiglu" not in flags and "rotary_seq_len_interpolation_factor" not in flags


def test_every_layer_has_its_window(checkpoint: Path) -> None:
    config = transformer_config(settings_of(checkpoint, Layout()))
    assert (config.window_size, config.window_attn_skip_freq) == ((4, 0), [1, 0])


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"final_logit_softcapping": 30.0}, "final_logit_softcapping is 30.0; only null"),
        ({"hidden_activation": "silu"}, "hidden_activation is silu; only gelu_pytorch_tanh"),
        (
            {"rope_parameters": {"sliding_attention": {"rope_type": "yarn", "factor": 2.0}}},
            "rope_parameters of sliding_attention have rope_type 'yarn'",
        ),
        ({"attention_bias": True}, "Megatron has no flags for the biases of this gemma3_text model"),
    ],
)
def test_what_the_layers_do_not_compute_is_refused(checkpoint: Path, changes: dict[str, object], reason: str) -> None:
    config = json.loads(json.dumps(dict(read_config_json(checkpoint)) | changes))
    with pytest.raises(ConfigError, match=reason):
        stated_flags(config)


def count_rotaries(world: World, settings: MegatronTrainerSettings) -> tuple[int, int]:
    """Return the number of layers with a separate rotary embedding, and of different embeddings among them."""
    from fuligo.trainer.megatron_backend.rotated_attention import WindowRotaryAttention
    from fuligo.trainer.megatron_backend.worker import MegatronRankWorker

    [chunk] = MegatronRankWorker(settings, world).chunks
    own = [module._own_rotary for module in chunk.modules() if isinstance(module, WindowRotaryAttention)]
    return len(own), len(set(own))


def test_layers_with_windows_share_their_angles(pool: RankPool, tmp_path: Path) -> None:
    """Megatron caches the angles of 32 calls in total; with one embedding per layer, more layers would recompute them all."""
    kinds = ["sliding_attention", "sliding_attention", "full_attention", "sliding_attention"]
    checkpoint = tiny.save_checkpoint(tmp_path, "gemma3_text", layers=4, layer_types=kinds, sliding_window=5)
    assert pool.run(1, count_rotaries, settings_of(checkpoint, Layout())) == [(3, 1)]


def test_the_flag_of_another_activation_overrides_the_models(checkpoint: Path) -> None:
    settings = settings_of(checkpoint, Layout())
    assert transformer_config(settings).activation_func is gelu_tanh
    overridden = replace(settings, model_flags={**settings.model_flags, "swiglu": True})
    assert transformer_config(overridden).activation_func is F.silu
