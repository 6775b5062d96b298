"""An attacker in the place of a rank: rendezvous and gloo do not authenticate it, but its objects run no code on other ranks."""

from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException

from fuligo.errors import CheckpointError
from fuligo.formats.shards import Shard, write_shards
from fuligo.trainer.ranks.signed_objects import ForgedObjectError, sign_objects
from fuligo.trainer.ranks.world import World
from tests.megatron.ranks import RankPool


class Trap:
    """Object that creates a file when it is unpickled."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def __reduce__(self) -> tuple[object, ...]:
        return Path.touch, (self.file,)


def _beside_a_stranger(world: World, exchange: str, mark: Path) -> str | None:
    """Exchange an object with rank 1, which has no key and sends one that creates `mark` when it is unpickled."""
    if world.rank == 1:
        sign_objects(None)
        if exchange == "broadcast":
            dist.broadcast_object_list([Trap(mark)], src=1, group=world.objects)
        else:
            dist.gather_object(Trap(mark), None, dst=0, group=world.objects)
        return None
    try:
        if exchange == "gather":
            world.gather("own")
        elif exchange == "broadcast":
            dist.broadcast_object_list([None], src=1, group=world.objects)
        else:
            write_shards(mark.parent, [Shard("w", (4,), (0,), torch.ones(4))], world.objects)
    except (ForgedObjectError, CheckpointError, CheckpointException) as error:
        return repr(error)
    return None


@pytest.mark.parametrize("exchange", ["gather", "broadcast", "save a checkpoint"])
def test_a_process_that_took_a_ranks_place_runs_no_code_in_the_others(pool: RankPool, tmp_path: Path, exchange: str):
    refusal, _ = pool.run(2, _beside_a_stranger, exchange, tmp_path / "ran")
    assert refusal is not None and "it is not signed by a rank of this trainer" in refusal
    assert not (tmp_path / "ran").exists()
