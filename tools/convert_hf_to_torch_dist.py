"""Convert a Hugging Face checkpoint into a distributed one, on any number of nodes. Same as `fuligo convert hf-to-dist`.

torchrun --nproc-per-node 8 tools/convert_hf_to_torch_dist.py ${MODEL_ARGS[@]} --hf-checkpoint DIR --save DIR
"""

import sys

from fuligo.cli import program

if __name__ == "__main__":
    program(["convert", "hf-to-dist", *sys.argv[1:]])
