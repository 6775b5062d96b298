"""Quantise a Hugging Face checkpoint to FP8, file by file.

python tools/convert_hf_to_fp8.py --model-dir DIR --save-dir DIR --strategy block --block-size 128 128 --max-workers 4
"""

from __future__ import annotations

import sys

from fuligo.convert.hf_to_fp8 import describe, parser, plan_hf_to_fp8
from fuligo.convert.tool import run


def main() -> None:
    arguments = sys.argv[1:]
    plan_only = parser().parse_args(arguments).plan
    run(lambda: describe(plan_hf_to_fp8(arguments)), plan_only)


if __name__ == "__main__":
    main()
