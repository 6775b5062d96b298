"""Plan for converting a Hugging Face checkpoint to a distributed one: arguments and parallel layout.

The layout does not change what is written: a distributed checkpoint loads under any layout. Launch scripts still set one, and it is
checked here.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from fuligo.config.changes import apply_changes
from fuligo.config.command_line import parse, read_command_line
from fuligo.config.findings import Change
from fuligo.errors import ConfigError
from fuligo.layout.megatron import IndivisibleRanksError, Layout, layout_of
from fuligo.models.architecture import Architecture
from fuligo.models.find import find_trainer_config_json
from fuligo.models.hub import located
from fuligo.models.megatron_flags import describe_disagreement, disagreements
from fuligo.planner.layout import stages
from fuligo.planner.plan import Stage
from fuligo.planner.subject import Subject, read_subject
from fuligo.quantities import amount, magnitude

_USED = {
    "hf_checkpoint", "model_config_file", "override_model_config", "save", "mtp_num_layers", "tensor_model_parallel_size",
    "pipeline_model_parallel_size", "decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers",
    "expert_model_parallel_size", "expert_tensor_parallel_size", "allgather_cp", "sequence_parallel", "train_backend",
}  # fmt: skip
"""Flags that a conversion uses, or accepts along with MODEL_ARGS (`allgather_cp`, `sequence_parallel`)."""
_LAYOUT = {name for name in _USED if name.endswith(("_parallel_size", "_pipeline_num_layers"))}
"""Flags that set the parallel layout."""
_BYTES_PER_PARAMETER = 2
"""Bytes per parameter of the checkpoint (bf16)."""
_ANY_GPU = "h100-80"
"""Placeholder: the shapes of a checkpoint do not depend on the GPU."""


@dataclass(frozen=True, slots=True)
class DistPlan:
    """Plan of a conversion from a Hugging Face checkpoint to a distributed one."""

    source: str
    target: str
    architecture: Architecture
    shape: Layout
    stages: tuple[Stage, ...]
    is_chosen: bool
    """True if the conversion chose the layout, because no flag gives one."""
    warnings: tuple[str, ...]


def plan_hf_to_dist(arguments: Sequence[str], world_size: int) -> DistPlan:
    """Plan the conversion with these arguments on `world_size` processes.

    Raises ConfigError if flags are unknown or unused, MODEL_ARGS disagree with config.json, the layout does not fit, or the Hub lacks the
    model.
    """
    given = {assignment.flag.name: assignment for assignment in read_command_line(arguments).assignments}
    parsed = parse([*arguments, "--train-backend", "megatron"])
    problems = [
        f"{assignment.origin} has no effect on a conversion; remove it"
        for name, assignment in given.items()
        if assignment.flag.group != "megatron" and name not in _USED
    ]
    required = (("--hf-checkpoint", parsed.config.model.hf_checkpoint), ("--save", parsed.config.checkpoint.save))
    problems += [f"{option} must be given" for option, value in required if value is None]
    if problems:
        raise ConfigError(*problems)
    config = located(apply_changes(parsed.config, [Change(("cluster", "actor_num_gpus_per_node"), world_size)]))
    found = None if config.model.override_model_config else find_trainer_config_json(config)
    if found is not None:
        problems = [
            f"{describe_disagreement(option, given_value, expected, found.source)}; correct it, or use --override-model-config"
            for option, given_value, expected in disagreements(config, found.values, found.source)
        ]
        if problems:
            raise ConfigError(*problems)
    is_chosen = not _LAYOUT & set(given)
    subject = read_subject(config, _ANY_GPU)
    if is_chosen:
        subject = read_subject(apply_changes(config, _chosen_layout(subject.architecture, world_size)), _ANY_GPU)
    shape = _checked_shape(subject, world_size)
    source, target = config.model.hf_checkpoint, config.checkpoint.save
    assert source is not None and target is not None
    return DistPlan(source, target, subject.architecture, shape, stages(subject), is_chosen, parsed.warnings)


def describe(plan: DistPlan) -> Iterator[str]:
    """Yield the lines that summarize a plan: warnings, paths, model, layout and size."""
    shape, architecture = plan.shape, plan.architecture
    chosen = " (chosen: no layout was given)" if plan.is_chosen else ""
    num_bytes = _BYTES_PER_PARAMETER * architecture.num_parameters
    yield from (f"warning: {warning}" for warning in plan.warnings)
    yield f"{plan.source} -> {plan.target}"
    yield f"{architecture.model_type}, {magnitude(architecture.num_parameters)} parameters in {architecture.num_layers} layers"
    processes = "1 process" if shape.num_ranks == 1 else f"{shape.num_ranks} processes"
    yield f"{processes}: TP {shape.tp}, PP {shape.pp}, DP {shape.dp}, EP {shape.ep}, ETP {shape.etp}{chosen}"
    yield f"each writes about {amount(num_bytes // shape.num_ranks)}; the checkpoint loads under any layout"


def _chosen_layout(architecture: Architecture, world_size: int) -> list[Change]:
    """Return a layout with one stage per process; the last one takes the remaining layers.

    Raises ConfigError if there are fewer layers than processes.
    """
    if world_size > architecture.num_layers:
        raise ConfigError(
            f"{world_size} processes exceed the model's {architecture.num_layers} layers; start fewer, or use a layout with "
            "--tensor-model-parallel-size and --expert-model-parallel-size"
        )
    share = architecture.num_layers // world_size
    last = architecture.num_layers - share * (world_size - 1)
    changes = [Change(("parallel", "pipeline_model_parallel_size"), world_size)]
    return [*changes, Change(("parallel", "decoder_last_pipeline_num_layers"), last)] if last != share else changes


def _checked_shape(subject: Subject, world_size: int) -> Layout:
    try:
        shape = layout_of(subject.config)
    except IndivisibleRanksError as error:
        problem = f"does not divide the number of processes of the conversion ({world_size})"
        raise ConfigError(f"{error.sizes} {problem}; change either") from None
    heads, experts = subject.architecture.attention.num_heads, subject.architecture.experts
    for option, size, number, parts in (
        ("--tensor-model-parallel-size", shape.tp, heads, "attention heads"),
        ("--expert-model-parallel-size", shape.ep, 0 if experts is None else experts.num_experts, "experts"),
    ):
        if number % size:
            raise ConfigError(f"{option} {size} does not divide the model's {number} {parts}; choose a divisor of {number}")
    return shape
