"""`fuligo convert fp8`: a Hugging Face checkpoint to FP8, file by file."""

from __future__ import annotations

from collections.abc import Sequence

from fuligo.convert.fp8_plan import describe, parser, plan_hf_to_fp8
from fuligo.errors import ConfigError


def main(arguments: Sequence[str]) -> int:
    """Say what will be done, and do it unless `--plan` is given.

    Raises:
        ConfigError: arguments or directories are not fit for it; nothing was written.
        CheckpointError: a file cannot be read or written, or a weight is not finite; the same command goes on where it stopped.
    """
    options = parser().parse_args(arguments)
    plan = plan_hf_to_fp8(arguments)
    for line in describe(plan):
        print(line, flush=True)
    if options.plan:
        return 0
    if not plan.shards:
        raise ConfigError(f"--model-dir {plan.source} has no *.safetensors files with weights; --plan ends after the plan")
    from fuligo.convert.fp8 import convert

    convert(plan, lambda line: print(line, flush=True))
    print(f"{plan.target} is complete and was compared with {plan.source}")
    return 0
