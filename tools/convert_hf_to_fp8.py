"""Quantize a Hugging Face checkpoint to FP8, file by file. Same as `fuligo convert fp8`.

python tools/convert_hf_to_fp8.py --model-dir DIR --save-dir DIR --strategy block --block-size 128 128 --max-workers 4
"""

import sys

from fuligo.cli import program

if __name__ == "__main__":
    program(["convert", "fp8", *sys.argv[1:]])
