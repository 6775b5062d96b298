"""Rules on training in FP8 (--fp8-format): recipes whose scales a checkpoint does not need, and the parts of a run that support it."""

from collections.abc import Iterator

from fuligo.config import Config
from fuligo.config.findings import Change, Severity
from fuligo.config.flags import flags
from fuligo.config.rules.rule import Violation, rule

RECIPES = ("blockwise", "tensorwise")
_OFF = tuple(Change(("megatron", name), None) for name in ("fp8_format", "fp8_recipe"))


@rule("CFG-FP8-RECIPE", "--fp8-recipe", "--fp8-format")
def scales_are_of_this_step(config: Config) -> Iterator[Violation]:
    """Require --fp8-recipe blockwise or tensorwise with --fp8-format: checkpoints lack the scales of delayed, Megatron's default."""
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


@rule("CFG-FP8-LAYOUT", "--fp8-format", "--pipeline-model-parallel-size", severity=Severity.WARNING)
def fp8_is_tested_in_this_layout(config: Config) -> Iterator[Violation]:
    """Warn about FP8 training with pipeline stages, which has not been tested on GPUs."""
    kind, num_stages = config.megatron.get("fp8_format"), config.parallel.pipeline_model_parallel_size
    if kind is not None and num_stages > 1:
        with_stages = f"--fp8-format {kind} with --pipeline-model-parallel-size {num_stages}"
        text = f"{with_stages} has not been tested on GPUs; check train/logprob_abs_diff and train/grad_norm"
        yield Violation(text, advice="compare with a run without --fp8-format")
