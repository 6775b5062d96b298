"""A Hugging Face checkpoint to FP8: its arguments, and how much of it would be quantised.

What stays as it is: norms, embeddings, the head, routers, the projection of MTP layers, the weights' projection of sparse indexers.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from fuligo.errors import ConfigError
from fuligo.models.architecture import Architecture, Part
from fuligo.models.registry import architecture_of, read_config_json

STRATEGIES = {"block": "a scale a block", "channel": "a scale an output channel", "tensor": "a scale a tensor"}
DEFAULT_BLOCK = (128, 128)
"""What DeepEP and DeepGEMM take."""
_SCALE_BYTES = 4


@dataclass(frozen=True, slots=True)
class Fp8Plan:
    """What a conversion would do."""

    source: Path
    target: Path
    strategy: str
    block_size: tuple[int, int] | None
    """Rows and columns that share a scale; None for the other strategies."""
    num_workers: int
    num_quantised: int
    """Parameters."""
    num_kept: int

    @property
    def source_bytes(self) -> int:
        """In bf16."""
        return 2 * (self.num_quantised + self.num_kept)

    @property
    def target_bytes(self) -> int:
        """Quantised ones take a byte, blocks a scale each; scales of channels and tensors are not counted."""
        scales = 0 if self.block_size is None else self.num_quantised // (self.block_size[0] * self.block_size[1]) * _SCALE_BYTES
        return self.num_quantised + scales + 2 * self.num_kept


def parser() -> argparse.ArgumentParser:
    """Of the tool's options."""
    made = argparse.ArgumentParser("convert_hf_to_fp8.py", description="Quantise a Hugging Face checkpoint to FP8.", allow_abbrev=False)
    made.add_argument("--model-dir", type=Path, required=True, help="Hugging Face directory in bf16")
    made.add_argument("--save-dir", type=Path, required=True, help="new or empty directory; a conversion that was cut off goes on there")
    made.add_argument("--strategy", choices=STRATEGIES, default="block", help="what shares a scale (%(default)s)")
    made.add_argument("--block-size", type=int, nargs=2, metavar=("ROWS", "COLUMNS"), help="of --strategy block (128 128)")
    made.add_argument("--max-workers", type=int, default=1, help="files that are converted at a time (%(default)s)")
    made.add_argument("--plan", action="store_true", help="say what would be done, and end")
    return made


def plan_hf_to_fp8(arguments: Sequence[str]) -> Fp8Plan:
    """What the conversion with these arguments would do.

    Raises:
        ConfigError: options that do not go together, no checkpoint, or one that is quantised already.
    """
    options = parser().parse_args(arguments)
    problems = list(_problems(options))
    if problems:
        raise ConfigError(*problems)
    values = read_config_json(options.model_dir)
    architecture = architecture_of(values, str(options.model_dir / "config.json"))
    if architecture.is_quantised:
        raise ConfigError(f"--model-dir {options.model_dir} is quantised already; give the bf16 checkpoint that it was made from")
    parts = list(_parts(architecture))
    rows, columns = options.block_size or DEFAULT_BLOCK
    return Fp8Plan(
        source=options.model_dir,
        target=options.save_dir,
        strategy=options.strategy,
        block_size=(rows, columns) if options.strategy == "block" else None,
        num_workers=options.max_workers,
        num_quantised=sum(part.num_parameters for part in parts if part.quantisable),
        num_kept=sum(part.num_parameters for part in parts if not part.quantisable),
    )


def describe(plan: Fp8Plan) -> Iterator[str]:
    """The plan, line by line."""
    block = "" if plan.block_size is None else f" of {plan.block_size[0]} x {plan.block_size[1]}"
    share = plan.num_quantised / (plan.num_quantised + plan.num_kept)
    yield f"{plan.source} -> {plan.target}"
    yield f"strategy {plan.strategy}: {STRATEGIES[plan.strategy]}{block}; {plan.num_workers} files at a time"
    yield f"{plan.num_quantised / 1e9:.2f} B parameters ({share:.1%}) to FP8, {plan.num_kept / 1e9:.2f} B stay in bf16"
    yield f"{plan.source_bytes / 2**30:.1f} GiB in bf16 -> about {plan.target_bytes / 2**30:.1f} GiB"


def _problems(options: argparse.Namespace) -> Iterator[str]:
    if options.block_size is not None and options.strategy != "block":
        yield f"--block-size has no effect with --strategy {options.strategy}; drop it, or choose --strategy block"
    if options.block_size is not None and min(options.block_size) < 1:
        yield f"--block-size {' '.join(map(str, options.block_size))}: both must be at least 1"
    if options.max_workers < 1:
        yield f"--max-workers {options.max_workers}: must be at least 1"
    if options.model_dir.absolute() == options.save_dir.absolute():
        yield f"--save-dir {options.save_dir} is the model's own directory; choose another"
    if not (options.model_dir / "config.json").is_file():
        yield f"--model-dir {options.model_dir}: there is no config.json; give a directory with a Hugging Face checkpoint"


def _parts(architecture: Architecture) -> Iterator[Part]:
    yield from architecture.outer_parts
    for layer in (*architecture.layers, *architecture.mtp_layers):
        yield from layer.parts
