"""The pool of ranks that all other tests here use."""

import os
from contextlib import closing

import pytest
import torch
import torch.distributed as dist

from fuligo.trainer.ranks.world import World
from tests.megatron.ranks import RankPool


def sum_of_ranks(world: World, offset: int) -> tuple[int, int, int]:
    total = torch.tensor(world.rank + offset)
    dist.all_reduce(total)
    return int(total), dist.get_world_size(), os.getpid()


def fail_on_rank_1(world: World) -> None:
    if world.rank == 1:
        raise ValueError("rank one is not well")
    dist.barrier()


def test_runs_of_different_sizes_use_the_same_processes():
    with closing(RankPool()) as new:  # a pool of its own, since the shared one restarts its ranks now and then
        of_two = new.run(2, sum_of_ranks, 10)
        of_four = new.run(4, sum_of_ranks, offset=10)
    assert [r[:2] for r in of_two] == [(21, 2)] * 2
    assert [r[:2] for r in of_four] == [(46, 4)] * 4
    assert [r[2] for r in of_four[:2]] == [r[2] for r in of_two]


def test_a_failure_names_the_rank_with_its_traceback_and_the_pool_continues(pool: RankPool):
    with pytest.raises(AssertionError, match=r"(?s)rank 1: Traceback.*ValueError: rank one is not well"):
        pool.run(2, fail_on_rank_1)
    assert [r[0] for r in pool.run(2, sum_of_ranks, 0)] == [1, 1]
