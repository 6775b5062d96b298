"""Plan of a conversion to FP8: command-line options, tensors to quantize, and checks of both directories.

Norms, embeddings, the head, routers, the projection of MTP layers and `weights_proj` of sparse indexers are not quantized.
"""

import argparse
import json
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import prod
from pathlib import Path

from fuligo.errors import ConfigError
from fuligo.formats.fp8_shards import Shard, plan_shards, shard_problems, unquantized_modules
from fuligo.formats.hugging_face import DamagedFileError, is_weight_file, read_config_json, read_stored_tensors
from fuligo.formats.quantization import DEFAULT_BLOCK, STRATEGIES, Quantization
from fuligo.formats.stored_experts import StoredExperts
from fuligo.models.architecture import Architecture
from fuligo.models.hub import model_directory
from fuligo.models.registry import architecture_of, family_of
from fuligo.quantities import amount, count, magnitude

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"
UNFINISHED = ".tmp_"
"""Prefix of files that are being written; a crash leaves them behind."""


@dataclass(frozen=True, slots=True)
class Fp8Plan:
    """Plan of a conversion to FP8."""

    source: Path
    target: Path
    quantization: Quantization
    num_workers: int
    """Number of files to convert concurrently."""
    num_quantized: int
    """Number of parameters to quantize."""
    num_kept: int
    """Number of parameters to copy unchanged."""
    source_bytes: int
    target_bytes: int
    shards: tuple[Shard, ...]
    """Files to write. Empty if the source has only a config.json: the plan is then an estimate and cannot be carried out."""
    other_files: tuple[str, ...]
    """Paths of the files to copy, relative to the source: tokenizer, chat template, license, ..."""

    def config_json(self) -> str:
        """Return the config.json of the new checkpoint."""
        described = self.quantization.quantization_config(unquantized_modules(self.shards))
        return json.dumps({**read_config_json(self.source), "quantization_config": described}, indent=2) + "\n"

    def index_json(self) -> str:
        """Return the index that names the file of each tensor."""
        weight_map = {entry.name: shard.file for shard in self.shards for entry in shard.entries}
        total = sum(shard.num_bytes for shard in self.shards)
        return json.dumps({"metadata": {"total_size": total}, "weight_map": dict(sorted(weight_map.items()))}, indent=2) + "\n"


def parser() -> argparse.ArgumentParser:
    """Return the parser of the conversion's options."""
    made = argparse.ArgumentParser("fuligo convert fp8", description="Quantize a Hugging Face checkpoint to FP8.", allow_abbrev=False)
    made.add_argument("--model-dir", type=Path, required=True, help="Hugging Face directory in bf16, or ORG/NAME on the Hub")
    made.add_argument(
        "--save-dir", type=Path, required=True, help="new or empty directory, or one with an interrupted conversion to continue"
    )
    made.add_argument("--strategy", choices=STRATEGIES, default="block", help="granularity of the scales (default: %(default)s)")
    made.add_argument(
        "--block-size", type=int, nargs=2, metavar=("ROWS", "COLUMNS"), help="block size for --strategy block (default: 128 128)"
    )
    made.add_argument("--max-workers", type=int, default=1, help="files to convert concurrently (default: %(default)s)")
    made.add_argument("--plan", action="store_true", help="print the plan and exit")
    return made


def plan_hf_to_fp8(arguments: Sequence[str]) -> Fp8Plan:
    """Return the plan of a conversion with the command-line `arguments`. Downloads a model from the Hub if --model-dir names one.

    Raises ConfigError if options cannot be combined, or the source or the target cannot be used.
    """
    options = parser().parse_args(arguments)
    options.model_dir = model_directory(options.model_dir, weights=not options.plan)
    _raise(_option_problems(options))
    source, target = options.model_dir, options.save_dir
    values = read_config_json(source)
    architecture = architecture_of(values, str(source / CONFIG))
    if architecture.is_quantized or architecture.is_mxfp4:
        raise ConfigError(f"cannot convert --model-dir {source}: it is already quantized; use the bf16 checkpoint it was made from")
    if family_of(architecture).stored_experts is not StoredExperts.APART:
        what = "layers" if architecture.experts is None else "experts"
        raise ConfigError(
            f"cannot convert --model-dir {source}: {what} of a {architecture.model_type} model are not supported in FP8; "
            "serve the checkpoint as it is"
        )
    rows, columns = options.block_size or DEFAULT_BLOCK
    quantization = Quantization(options.strategy, (rows, columns) if options.strategy == "block" else None)
    if any(source.glob("*.safetensors")):
        plan = _plan_of_files(source, target, quantization, options.max_workers)
    else:
        plan = _estimate(source, target, quantization, options.max_workers, architecture)
    _raise(_target_problems(plan))
    return plan


def describe(plan: Fp8Plan) -> Iterator[str]:
    """Yield the lines that describe the plan."""
    strategy, block_size = plan.quantization.strategy, plan.quantization.block_size
    block = "" if block_size is None else f" of {block_size[0]} x {block_size[1]}"
    share = plan.num_quantized / (plan.num_quantized + plan.num_kept)
    yield f"{plan.source} -> {plan.target}"
    yield f"strategy {strategy}: {STRATEGIES[strategy]}{block}; {count(plan.num_workers, 'file')} at a time"
    yield f"{magnitude(plan.num_quantized)} parameters ({share:.1%}) to FP8, {magnitude(plan.num_kept)} unchanged"
    yield f"{amount(plan.source_bytes)} -> {'' if plan.shards else 'about '}{amount(plan.target_bytes)}"


def _plan_of_files(source: Path, target: Path, quantization: Quantization, num_workers: int) -> Fp8Plan:
    try:
        stored = read_stored_tensors(source)
    except DamagedFileError as error:
        raise ConfigError(f"cannot convert --model-dir {source}: {error}") from None
    shards = plan_shards(stored, quantization)
    _raise(f"--model-dir {source}: {problem}" for problem in shard_problems(shards, quantization))
    tensors = [tensor for shard in shards for tensor in shard.tensors]
    return Fp8Plan(
        source,
        target,
        quantization,
        num_workers,
        num_quantized=sum(prod(tensor.shape) for tensor in tensors if tensor.is_quantized),
        num_kept=sum(prod(tensor.shape) for tensor in tensors if not tensor.is_quantized),
        source_bytes=sum(tensor.end - tensor.start for tensor in stored.values()),
        target_bytes=sum(shard.num_bytes for shard in shards),
        shards=shards,
        other_files=tuple(_other_files(source)),
    )


def _estimate(source: Path, target: Path, quantization: Quantization, num_workers: int, architecture: Architecture) -> Fp8Plan:
    """Return a plan estimated from config.json alone, for a source in bf16; of the scales, only those of whole blocks are counted."""
    layers = (*architecture.layers, *architecture.mtp_layers)
    parts = (*architecture.outer_parts, *(part for layer in layers for part in layer.parts))
    num_quantized = sum(part.num_parameters for part in parts if part.quantizable)
    num_kept = sum(part.num_parameters for part in parts if not part.quantizable)
    scales = num_quantized // prod(quantization.block_size) if quantization.block_size is not None else 0
    return Fp8Plan(
        source,
        target,
        quantization,
        num_workers,
        num_quantized,
        num_kept,
        source_bytes=2 * (num_quantized + num_kept),
        target_bytes=num_quantized + 4 * scales + 2 * num_kept,
        shards=(),
        other_files=(),
    )


def _other_files(source: Path) -> Iterator[str]:
    """Yield the relative paths of the files other than weights and config.json; skip hidden files, which downloaders leave."""
    for path in sorted(source.rglob("*")):
        relative = path.relative_to(source)
        hidden = any(part.startswith(".") for part in relative.parts)
        if path.is_file() and not hidden and not is_weight_file(path) and str(relative) != CONFIG:
            yield str(relative)


def _option_problems(options: argparse.Namespace) -> Iterator[str]:
    if options.block_size is not None and options.strategy != "block":
        yield f"--block-size has no effect with --strategy {options.strategy}; remove it, or use --strategy block"
    if options.block_size is not None and min(options.block_size) < 1:
        yield f"--block-size {' '.join(map(str, options.block_size))} is invalid: both numbers must be at least 1"
    if options.max_workers < 1:
        yield f"--max-workers {options.max_workers} is invalid: it must be at least 1"
    source, target = options.model_dir.resolve(), options.save_dir.resolve()
    if source == target:
        yield f"--save-dir {options.save_dir} is the model's own directory; use another one"
    elif source in target.parents or target in source.parents:
        yield f"--save-dir {options.save_dir} and --model-dir {options.model_dir} are nested; use separate directories"
    if not (source / CONFIG).is_file():
        yield f"--model-dir {options.model_dir} has no config.json; use a Hugging Face checkpoint directory"


def _target_problems(plan: Fp8Plan) -> Iterator[str]:
    """Yield the reasons why the plan's target cannot be used; it may hold only files of the same conversion, interrupted."""
    target = plan.target
    if target.exists() and not target.is_dir():
        yield f"--save-dir {target} is a file; use a directory"
        return
    ours = {*plan.other_files, *(shard.file for shard in plan.shards), CONFIG, INDEX}
    files = [path for path in target.rglob("*") if path.is_file() and not path.name.startswith(UNFINISHED)] if target.exists() else []
    others = sorted(name for path in files if (name := str(path.relative_to(target))) not in ours)
    config = target / CONFIG
    if others or (config.exists() and config.read_text() != plan.config_json()):
        held = others[0] if others else "the config.json of another model or conversion"
        yield f"--save-dir {target} holds {held}; use a new or empty directory, or one with an interrupted run of this conversion"
        return
    if not plan.shards:
        return
    missing = plan.target_bytes - sum(path.stat().st_size for path in files)
    existing = next(parent for parent in [target, *target.resolve().parents] if parent.exists())
    free = shutil.disk_usage(existing).free
    if free < missing:
        yield f"--save-dir {target} needs {amount(missing)}, but only {amount(free)} are free; use another disk"


def _raise(problems: Iterator[str]) -> None:
    if found := list(problems):
        raise ConfigError(*found)
