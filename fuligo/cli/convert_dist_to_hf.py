"""`fuligo convert dist-to-hf`: a distributed checkpoint to a Hugging Face directory."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from fuligo.errors import ConfigError


def main(arguments: Sequence[str]) -> int:
    """Convert; 0.

    Raises:
        ConfigError: there is no distributed checkpoint, or its model is not known.
        CheckpointError: it is damaged, or the directory cannot be written.
    """
    options = _parser().parse_args(list(arguments))

    from fuligo.checkpoint.location import weights_directory
    from fuligo.convert.dist_to_hf import dist_to_hf
    from fuligo.formats.checkpoint_files import is_distributed

    source = weights_directory(options.checkpoint)
    if not is_distributed(source):
        raise ConfigError(
            f"{options.checkpoint} is no distributed checkpoint: give a directory with .metadata, or one of checkpoints with their tracker"
        )
    dist_to_hf(source, options.save, model=options.hf_checkpoint)
    print(f"{source} -> {options.save}")
    return 0


def _parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser("fuligo convert dist-to-hf", description=__doc__, allow_abbrev=False)
    made.add_argument("checkpoint", type=Path, help="a distributed checkpoint, or a directory of them, of which the newest is taken")
    made.add_argument("--save", type=Path, required=True, help="new or empty directory")
    made.add_argument("--hf-checkpoint", type=Path, help="directory with config.json and tokenizer (default: those in the checkpoint)")
    return made
