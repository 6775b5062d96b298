"""Ranks join layouts one after another and start from the same random weights every time."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from fuligo.layout.megatron import Layout
from fuligo.trainer.megatron_backend.settings import MegatronTrainerSettings
from fuligo.trainer.ranks.world import World
from tests import tiny
from tests.megatron.policies import settings_of
from tests.megatron.ranks import RankPool


def places(world: World, layouts: list[Layout]) -> list[tuple[int, int, int, int]]:
    """Return (tp, cp, dp, pp) of this rank under each layout."""
    from megatron.core import parallel_state

    from fuligo.trainer.megatron_backend.worker import join_megatron

    found = []
    for layout in layouts:
        join_megatron(layout, world, seed=1)
        assert parallel_state.get_data_parallel_world_size() == layout.dp
        assert parallel_state.get_data_parallel_rank() == layout.replica_of(world.rank)
        found.append(
            (
                parallel_state.get_tensor_model_parallel_rank(),
                parallel_state.get_context_parallel_rank(),
                parallel_state.get_data_parallel_rank(),
                parallel_state.get_pipeline_model_parallel_rank(),
            )
        )
        parallel_state.destroy_model_parallel()
    return found


def random_weights(world: World, settings: MegatronTrainerSettings) -> dict[str, Tensor]:
    from fuligo.trainer.megatron_backend.model import build_chunks
    from fuligo.trainer.megatron_backend.worker import join_megatron

    join_megatron(settings.layout, world, settings.seed)
    (chunk,) = build_chunks(settings, trained=False)
    return dict(chunk.named_parameters())


def test_tp_is_fastest_then_cp_then_dp_and_pp_is_slowest(pool: RankPool):
    layouts = [Layout(tp=2, cp=2, num_ranks=4), Layout(tp=2, num_ranks=4), Layout(cp=2, num_ranks=4), Layout(pp=2, num_ranks=4)]
    by_layout = list(zip(*pool.run(4, places, layouts)))
    assert by_layout == [
        ((0, 0, 0, 0), (1, 0, 0, 0), (0, 1, 0, 0), (1, 1, 0, 0)),
        ((0, 0, 0, 0), (1, 0, 0, 0), (0, 0, 1, 0), (1, 0, 1, 0)),
        ((0, 0, 0, 0), (0, 1, 0, 0), (0, 0, 1, 0), (0, 1, 1, 0)),
        ((0, 0, 0, 0), (0, 0, 1, 0), (0, 0, 0, 1), (0, 0, 1, 1)),
    ]


def test_ranks_that_cannot_be_arranged_are_refused(pool: RankPool):
    with pytest.raises(AssertionError, match=r"ConfigError: cannot arrange 2 trainer ranks as Layout\(tp=3"):
        pool.run(2, places, [Layout(tp=3, num_ranks=2)])


def test_random_weights_depend_only_on_the_seed_and_the_place(pool: RankPool, tmp_path):
    settings = settings_of(tiny.save_checkpoint(tmp_path, "qwen3"), Layout(tp=2, num_ranks=4))
    first, second, other_replica, _ = pool.run(4, random_weights, settings)
    again = pool.run(4, random_weights, settings)[0]
    other_seed = pool.run(4, random_weights, replace(settings, seed=99))[0]
    matrix = "decoder.layers.0.mlp.linear_fc1.weight"
    for name, weight in first.items():
        torch.testing.assert_close(weight, other_replica[name], rtol=0, atol=0)
        torch.testing.assert_close(weight, again[name], rtol=0, atol=0)
    assert not torch.equal(first[matrix], second[matrix])
    assert not torch.equal(first[matrix], other_seed[matrix])
