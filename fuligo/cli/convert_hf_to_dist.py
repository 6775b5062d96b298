"""`fuligo convert hf-to-dist`: a Hugging Face checkpoint to a distributed one, by one process or those that torchrun started."""

from __future__ import annotations

import argparse
import os
from collections.abc import Sequence

from fuligo.errors import ConfigError, FuligoError
from fuligo.planner.conversion import DistPlan, describe, plan_hf_to_dist, torchrun_size

USAGE = """fuligo convert hf-to-dist [MODEL_ARGS] --hf-checkpoint DIR --save DIR
    torchrun --nproc-per-node N -m fuligo convert hf-to-dist [MODEL_ARGS] --hf-checkpoint DIR --save DIR

Takes the Megatron flags of the model and of a parallel layout, as fuligo train does."""
TIMEOUT_S = 7200.0
"""Until the last process has written its share."""


def main(arguments: Sequence[str]) -> int:
    """Say what will be done, and do it unless `--plan` is given; only the first process speaks.

    Raises:
        ConfigError: arguments that do not fit together or to the model; nothing was written.
        CheckpointError: the checkpoint is damaged, or cannot be written.
    """
    options = argparse.ArgumentParser(allow_abbrev=False, usage=USAGE)
    options.add_argument("--plan", action="store_true", help="say what would be done, and end")
    options.add_argument("--world-size", type=int, help="with --plan: processes to plan for (default: torchrun's)")
    own, flags = options.parse_known_args(list(arguments))
    if own.world_size is not None and not own.plan:
        raise ConfigError(f"--world-size {own.world_size} has no effect without --plan; a conversion runs on the processes of torchrun")
    is_first = os.environ.get("RANK", "0") == "0"
    try:
        plan = plan_hf_to_dist(flags, own.world_size or torchrun_size())
        if is_first:
            for line in describe(plan):
                print(line, flush=True)
        if not own.plan:
            _convert(plan)
            if is_first:
                print(f"{plan.target} is complete: give it by --ref-load or --load", flush=True)
    except FuligoError as error:
        if is_first:
            raise
        return error.exit_code
    return 0


def _convert(plan: DistPlan) -> None:
    from pathlib import Path

    import torch.distributed as dist

    from fuligo.convert.hf_to_dist import hf_to_dist
    from fuligo.trainer.ranks.torchrun import torchrun_place
    from fuligo.trainer.ranks.world import World, join_world

    place = torchrun_place()
    if place is None:
        hf_to_dist(Path(plan.source), Path(plan.target), World())
        return
    server = place.host_store() if place.rank == 0 else None
    try:
        world = join_world(place.rank, place.size, "cpu", store=place.rendezvous.connect(), timeout_s=TIMEOUT_S)
        hf_to_dist(Path(plan.source), Path(plan.target), world)
        dist.barrier()
    finally:
        if dist.is_initialized():
            dist.destroy_process_group()
        del server
