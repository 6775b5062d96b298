"""`fuligo convert value-to-hf`: a checkpoint's value model to a Hugging Face directory, a token classifier with one label."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path


def main(arguments: Sequence[str]) -> int:
    """Convert; 0.

    Raises:
        CheckpointError: there is no value model, it is damaged, or the directory cannot be written.
        ConfigError: transformers has no token classifier of the model's family.
    """
    options = _parser().parse_args(list(arguments))

    from fuligo.convert.value_to_hf import value_to_hf

    source = value_to_hf(options.checkpoint, options.save, model=options.hf_checkpoint)
    print(f"{source} -> {options.save}")
    return 0


def _parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser("fuligo convert value-to-hf", description=__doc__, allow_abbrev=False)
    made.add_argument("checkpoint", type=Path, help="a checkpoint of either trainer, a directory of them (the newest), or its critic/")
    made.add_argument("--save", type=Path, required=True, help="new or empty directory")
    made.add_argument("--hf-checkpoint", type=Path, help="directory with config.json and tokenizer (default: those beside the weights)")
    return made
