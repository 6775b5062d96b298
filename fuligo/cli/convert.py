"""`fuligo convert`: conversion of a checkpoint from one format to another, or comparison of two.

Each conversion has its own parser; heavy packages are imported after its arguments have been checked.
"""

import argparse
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from fuligo.config.launcher import world_size
from fuligo.convert import fp8_plan
from fuligo.errors import ConfigError, FuligoError
from fuligo.models.hub import HubModel, model_directory
from fuligo.planner import conversion

_TORCHRUN_TIMEOUT_S = 7200.0
"""Seconds that a process waits for the others, the slowest of which may still be writing its share."""


@dataclass(frozen=True, slots=True)
class Conversion:
    """One subcommand."""

    summary: str
    run: Callable[[Sequence[str]], int]
    """Arguments -> exit code."""
    parser: Callable[[], argparse.ArgumentParser]


def main(arguments: Sequence[str]) -> int:
    """Run one conversion and return its exit code."""
    if not arguments or arguments[0] in ("-h", "--help", "help"):
        print(overview())
        return 0
    name, *rest = arguments
    if name not in CONVERSIONS:
        raise ConfigError(f"fuligo convert: there is no conversion {name!r}; choose one of {', '.join(CONVERSIONS)}")
    return CONVERSIONS[name].run(rest)


def overview() -> str:
    """List the conversions, one line each."""
    width = max(map(len, CONVERSIONS))
    lines = [f"  fuligo convert {name:<{width}}  {conversion.summary}" for name, conversion in CONVERSIONS.items()]
    return "\n".join(["fuligo convert: convert a checkpoint from one format to another, or compare two", "", *lines])


def _parser(name: str, description: str, *positional: tuple[str, str], save: bool = True, model: str) -> argparse.ArgumentParser:
    """Build the parser that most conversions share.

    Args:
        positional: names and help texts of the positional arguments.
        save: add `--save`.
        model: help text of `--hf-checkpoint`.
    """
    made = argparse.ArgumentParser(f"fuligo convert {name}", description=description, allow_abbrev=False)
    for argument, text in positional:
        made.add_argument(argument, type=Path, help=text)
    if save:
        made.add_argument("--save", type=Path, required=True, help="new or empty directory")
    made.add_argument("--hf-checkpoint", type=Path, help=model)
    return made


def _hf_to_dist_parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        allow_abbrev=False,
        usage="""fuligo convert hf-to-dist [MODEL_ARGS] --hf-checkpoint DIR|ORG/NAME --save DIR
    torchrun --nproc-per-node N -m fuligo convert hf-to-dist [MODEL_ARGS] --hf-checkpoint DIR|ORG/NAME --save DIR

Takes the Megatron flags of the model and of a parallel layout, as fuligo train does.""",
    )
    made.add_argument("--plan", action="store_true", help="print the plan of the conversion and exit")
    made.add_argument("--world-size", type=int, help="with --plan: number of processes to plan for (default: torchrun's)")
    return made


def hf_to_dist(arguments: Sequence[str]) -> int:
    """Convert a Hugging Face checkpoint in this process, or in all processes of torchrun; only the first process prints.

    The first process raises errors (FuligoError), the others return their exit code.
    """
    own, flags = _hf_to_dist_parser().parse_known_args(list(arguments))
    if own.world_size is not None and not own.plan:
        raise ConfigError(
            f"--world-size {own.world_size} has no effect without --plan; a conversion runs on the processes that torchrun starts"
        )
    is_first = os.environ.get("RANK", "0") == "0"
    try:
        plan = conversion.plan_hf_to_dist(flags, own.world_size or world_size())
        if is_first:
            for line in conversion.describe(plan):
                print(line, flush=True)
        if not own.plan:
            model = HubModel.parse(plan.source)
            _convert_hf_to_dist(replace(plan, source=str(Path(plan.source) if model is None else model.download())))
            if is_first:
                print(f"{plan.target} is complete; use it with --ref-load or --load", flush=True)
    except FuligoError as error:
        if is_first:
            raise
        return error.exit_code
    return 0


def _small_model(path: Path | None) -> Path | None:
    """Return the directory of `--hf-checkpoint`, downloaded without weights if it is a name on the Hub; None without the flag."""
    return None if path is None else model_directory(path, weights=False)


def _convert_hf_to_dist(plan: conversion.DistPlan) -> None:
    if not any(Path(plan.source).glob("*.safetensors")):  # checked before the imports, which take seconds
        raise ConfigError(f"{plan.source} has no *.safetensors files with weights; --plan prints the plan without them")

    import torch.distributed as dist

    from fuligo.convert.hf_to_dist import hf_to_dist
    from fuligo.trainer.ranks.torchrun import share_key, torchrun_place
    from fuligo.trainer.ranks.world import World, join_world, leave_world

    place = torchrun_place()
    if place is None:
        hf_to_dist(Path(plan.source), Path(plan.target), World())
        return
    server = place.host_store() if place.rank == 0 else None
    try:
        key = share_key(place)
        world = join_world(place.rank, place.size, "cpu", store=place.rendezvous.connect(), key=key, timeout_s=_TORCHRUN_TIMEOUT_S)
        hf_to_dist(Path(plan.source), Path(plan.target), world)
        dist.barrier()
    finally:
        leave_world()
        del server


def _dist_to_hf_parser() -> argparse.ArgumentParser:
    return _parser(
        "dist-to-hf",
        "Convert a distributed checkpoint to a Hugging Face directory.",
        ("checkpoint", "distributed checkpoint, or a directory of them (the newest is used)"),
        model="directory or ORG/NAME on the Hub with config.json and tokenizer (default: those in the checkpoint)",
    )


def dist_to_hf(arguments: Sequence[str]) -> int:
    """Convert a distributed checkpoint to a Hugging Face directory."""
    options = _dist_to_hf_parser().parse_args(list(arguments))

    from fuligo.checkpoint.location import weights_directory
    from fuligo.convert.dist_to_hf import dist_to_hf
    from fuligo.formats.adapter_config import adapter_directory, is_adapter
    from fuligo.formats.checkpoint_files import is_distributed

    source = weights_directory(options.checkpoint)
    if is_adapter(adapter := adapter_directory(source)):
        raise ConfigError(
            f"{source} holds a LoRA adapter but no model; merge it into its base model: fuligo convert merge-adapter {adapter} --save DIR"
        )
    if not is_distributed(source):
        raise ConfigError(
            f"cannot convert {options.checkpoint}: it is not a distributed checkpoint; use a directory with .metadata, or a directory of "
            "checkpoints"
        )
    dist_to_hf(source, options.save, model=_small_model(options.hf_checkpoint))
    print(f"{source} -> {options.save}")
    return 0


def _value_to_hf_parser() -> argparse.ArgumentParser:
    return _parser(
        "value-to-hf",
        "Convert the value model of a checkpoint to a Hugging Face directory, a token classifier with one label.",
        ("checkpoint", "checkpoint of either trainer, its critic/ directory, or a directory of checkpoints (the newest is used)"),
        model="directory or ORG/NAME on the Hub with config.json and tokenizer (default: those next to the weights)",
    )


def value_to_hf(arguments: Sequence[str]) -> int:
    """Convert the value model of a checkpoint to a Hugging Face token classifier."""
    options = _value_to_hf_parser().parse_args(list(arguments))

    from fuligo.convert.dist_to_hf import value_to_hf

    source = value_to_hf(options.checkpoint, options.save, model=_small_model(options.hf_checkpoint))
    print(f"{source} -> {options.save}")
    return 0


def _merge_adapter_parser() -> argparse.ArgumentParser:
    return _parser(
        "merge-adapter",
        "Merge a LoRA adapter into the weights of its base model, for engines and tools that do not support adapters.",
        ("adapter", "PEFT directory, checkpoint of a LoRA run, or a directory of checkpoints (the newest is used)"),
        model="base model (default: the one that adapter_config.json names)",
    )


def merge_adapter(arguments: Sequence[str]) -> int:
    """Merge an adapter into its base model; print how many elements of the adapted matrices changed."""
    options = _merge_adapter_parser().parse_args(list(arguments))

    from fuligo.checkpoint.location import weights_directory
    from fuligo.convert.merge_adapter import merge_adapter
    from fuligo.formats.adapter_config import AdapterConfig, adapter_directory
    from fuligo.formats.quantized_base import QuantizedBase

    adapter = adapter_directory(weights_directory(options.adapter))
    base = options.hf_checkpoint or Path(AdapterConfig.read(adapter).base)
    if not (base / "config.json").is_file():
        raise ConfigError(
            f"cannot merge {adapter}: its base model {base} is not a model directory on this machine; name one with --hf-checkpoint"
        )
    rounding = merge_adapter(base, adapter, options.save)
    print(f"{base} + {adapter} -> {options.save}")
    if (quantized := QuantizedBase.read(adapter)) is not None:
        print(f"merged into the base as it was in training: linear layers in {quantized.precision}, dequantized to {quantized.dtype}")
    if rounding.num_elements:
        print(f"{rounding.share_changed:.1%} of the elements of the adapted matrices changed; the update of the others was rounded away")
    return 0


def _mxfp4_parser() -> argparse.ArgumentParser:
    made = argparse.ArgumentParser(
        "fuligo convert mxfp4-to-bf16", description="Convert a checkpoint with experts in MXFP4 to bfloat16.", allow_abbrev=False
    )
    made.add_argument("--hf-checkpoint", type=Path, required=True, help="Hugging Face directory in MXFP4, or ORG/NAME on the Hub")
    made.add_argument("--save", type=Path, required=True, help="new or empty directory")
    return made


def mxfp4_to_bf16(arguments: Sequence[str]) -> int:
    """Convert a checkpoint with experts in MXFP4 to bfloat16."""
    options = _mxfp4_parser().parse_args(list(arguments))
    source = model_directory(options.hf_checkpoint, weights=True)

    from fuligo.convert.mxfp4 import mxfp4_to_bf16

    mxfp4_to_bf16(source, options.save)
    print(f"{source} -> {options.save}")
    return 0


def _compare_parser() -> argparse.ArgumentParser:
    kinds = "Hugging Face directory or ORG/NAME on the Hub, distributed checkpoint, or directory of checkpoints"
    made = _parser(
        "compare",
        "Compare the tensors of two checkpoints of either format, value models included.",
        ("first", kinds),
        ("second", kinds),
        save=False,
        model="directory or ORG/NAME on the Hub with the config.json of a distributed checkpoint that has none",
    )
    made.add_argument("--all", action="store_true", help="also list equal tensors")
    return made


def compare(arguments: Sequence[str]) -> int:
    """Print the tensors that differ, and a summary; return 0 if all are equal, else 1."""
    options = _compare_parser().parse_args(list(arguments))

    from fuligo.convert.compare import compare

    num_equal, differing, largest = 0, 0, 0.0
    first, second = (model_directory(path, weights=True) for path in (options.first, options.second))
    for result in compare(first, second, _small_model(options.hf_checkpoint)):
        if result.difference:
            differing, largest = differing + 1, max(largest, result.largest)
            print(f"{result.name}: {result.difference}", flush=True)
        else:
            num_equal += 1
            if options.all:
                print(f"{result.name}: equal", flush=True)
    if not differing:
        print(f"all {num_equal} tensors are bitwise equal")
        return 0
    print(
        f"{differing} of {num_equal + differing} tensors differ{'s' if differing == 1 else ''}"
        + (f", by up to {largest:.3g}" if largest < float("inf") else "")
    )
    return 1


def fp8(arguments: Sequence[str]) -> int:
    """Convert a Hugging Face checkpoint to FP8, file by file; the same command resumes after an error."""
    options = fp8_plan.parser().parse_args(arguments)
    plan = fp8_plan.plan_hf_to_fp8(arguments)
    for line in fp8_plan.describe(plan):
        print(line, flush=True)
    if options.plan:
        return 0
    if not plan.shards:
        raise ConfigError(f"--model-dir {plan.source} has no *.safetensors files with weights; --plan prints the plan without them")
    from fuligo.convert.fp8 import convert

    convert(plan, lambda line: print(line, flush=True))
    print(f"{plan.target} is complete and was compared with {plan.source}")
    return 0


CONVERSIONS = {
    "hf-to-dist": Conversion("a Hugging Face checkpoint to a distributed one, also under torchrun", hf_to_dist, _hf_to_dist_parser),
    "dist-to-hf": Conversion("a distributed checkpoint to a Hugging Face directory", dist_to_hf, _dist_to_hf_parser),
    "value-to-hf": Conversion("the value model of a checkpoint to a Hugging Face token classifier", value_to_hf, _value_to_hf_parser),
    "merge-adapter": Conversion("a LoRA adapter and its base model to a Hugging Face directory", merge_adapter, _merge_adapter_parser),
    "mxfp4-to-bf16": Conversion("a Hugging Face checkpoint with experts in MXFP4 (gpt-oss) to bfloat16", mxfp4_to_bf16, _mxfp4_parser),
    "compare": Conversion("compare two checkpoints bitwise, tensor by tensor", compare, _compare_parser),
    "fp8": Conversion("a Hugging Face checkpoint to FP8 for engines, with scales per block, channel or tensor", fp8, fp8_plan.parser),
}
