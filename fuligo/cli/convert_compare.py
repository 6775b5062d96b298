"""`fuligo convert compare`: whether two checkpoints, of either format, hold the same tensors, value models included."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path


def main(arguments: Sequence[str]) -> int:
    """Print what differs, and a summary; 0 where nothing does, else 1.

    Raises:
        CheckpointError: one is damaged, or no checkpoint.
        ConfigError: a distributed checkpoint's model is not known.
    """
    options = _parser().parse_args(list(arguments))

    from fuligo.convert.compare import compare

    num_equal, differing, largest = 0, 0, 0.0
    for result in compare(options.first, options.second, options.hf_checkpoint):
        if result.difference:
            differing, largest = differing + 1, max(largest, result.largest)
            print(f"{result.name}: {result.difference}", flush=True)
        else:
            num_equal += 1
            if options.all:
                print(f"{result.name}: equal", flush=True)
    if not differing:
        print(f"all {num_equal} tensors are equal to the bit")
        return 0
    print(f"{differing} of {num_equal + differing} tensors differ" + (f", by up to {largest:.3g}" if largest < float("inf") else ""))
    return 1


def _parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser("fuligo convert compare", description=__doc__, allow_abbrev=False)
    for name in ("first", "second"):
        made.add_argument(name, type=Path, help="Hugging Face directory, distributed checkpoint, or directory of checkpoints")
    made.add_argument("--hf-checkpoint", type=Path, help="directory with config.json of a distributed checkpoint that does not have it")
    made.add_argument("--all", action="store_true", help="name equal tensors, too")
    return made
