"""Convert a Hugging Face checkpoint into a distributed one, under torchrun on any number of nodes.

    torchrun --nproc-per-node 8 tools/convert_hf_to_torch_dist.py ${MODEL_ARGS[@]} --hf-checkpoint DIR --save DIR

Takes the Megatron flags of the model and of a parallel layout; `--plan` says what would be done, `--world-size N` on how many processes.
"""

from __future__ import annotations

import argparse
import sys

from fuligo.convert.hf_to_dist import describe, plan_hf_to_dist
from fuligo.convert.tool import run, world_size


def main() -> None:
    options = argparse.ArgumentParser(allow_abbrev=False, usage=__doc__)
    options.add_argument("--plan", action="store_true", help="say what would be done, and end")
    options.add_argument("--world-size", type=int, default=world_size(), help="processes to plan for (default: torchrun's)")
    own, flags = options.parse_known_args(sys.argv[1:])
    run(lambda: describe(plan_hf_to_dist(flags, own.world_size)), own.plan)


if __name__ == "__main__":
    main()
