"""Rules on training in FP8 (--fp8-format): recipes whose scales a checkpoint does not need, and the parts of a run that support it."""

from collections.abc import Iterator

from fuligo.config import Config
from fuligo.config.findings import Change, Severity
from fuligo.config.flags import flags
from fuligo.config.rules.rule import Violation, rule

RECIPES = ("blockwise", "tensorwise")
_SIZES = ("tensor_model_parallel_size", "context_parallel_size", "pipeline_model_parallel_size", "expert_model_parallel_size")
_OFF = tuple(Change(("megatron", name), None) for name in ("fp8_format", "fp8_recipe"))


@rule("CFG-FP8-RECIPE", "--fp8-recipe", "--fp8-format")
def scales_are_of_this_step(config: Config) -> Iterator[Violation]:
    """Require scales that each step computes from its own values: checkpoints lack those of delayed scaling, Megatron's default."""
    kind, given = config.megatron.get("fp8_format"), config.megatron.get("fp8_recipe")
    if kind is None and given is not None:
        yield Violation(f"--fp8-recipe {given} has no effect without --fp8-format", _OFF, "or add --fp8-format e4m3", ("--fp8-recipe",))
    elif kind is not None and given not in RECIPES:
        recipe = "delayed, Megatron's default," if given is None else given
        reason = "scales by values of earlier steps, which no checkpoint contains" if given in (None, "delayed") else "is not tested"
        text = f"--fp8-format {kind}: --fp8-recipe {recipe} {reason}"
        yield Violation(text, (Change(("megatron", "fp8_recipe"), RECIPES[0]),), f"or use {RECIPES[1]}", ("--fp8-format", "--fp8-recipe"))


@rule("CFG-FP8-PARTS", "--fp8-format", "--lora-rank", "--lora-adapter", "--mtp-num-layers")
def all_layers_train_in_fp8(config: Config) -> Iterator[Violation]:
    """Reject FP8 training of adapters and MTP layers: neither is tested."""
    kind = config.megatron.get("fp8_format")
    for name in ("lora_rank", "lora_adapter", "mtp_num_layers") if kind is not None else ():
        if value := config.value_of(name):
            option = flags()[name].option
            yield Violation(f"--fp8-format {kind} with {option} {value} is not tested", _OFF, flags=("--fp8-format", option))


@rule("CFG-FP8-LAYOUT", "--fp8-format", *(flags()[name].option for name in _SIZES), severity=Severity.WARNING)
def fp8_is_tested_in_this_layout(config: Config) -> Iterator[Violation]:
    """Warn about FP8 training of a model that is split over GPUs, which has not been tested on GPUs."""
    kind = config.megatron.get("fp8_format")
    split = [f"{flags()[name].option} {size}" for name in _SIZES if (size := getattr(config.parallel, name)) > 1]
    if kind is not None and split:
        text = f"--fp8-format {kind} with {', '.join(split)} has not been tested on GPUs; check train/logprob_abs_diff and train/grad_norm"
        yield Violation(text, advice="compare with a run without --fp8-format")
