"""The model's description, its checkpoints, and the environment of the run."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from fuligo.config.findings import Change, Severity
from fuligo.config.rules.rule import set_flag
from fuligo.errors import ConfigError
from fuligo.models.megatron_flags import disagreements
from fuligo.planner.rules.parallel import is_megatron
from fuligo.planner.rules.rule import Broken, Fix, rule
from fuligo.planner.rules.servers import running
from fuligo.planner.subject import Subject

_ALLOCATORS = ("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF")
_CONNECTIONS = "CUDA_DEVICE_MAX_CONNECTIONS"


@rule("PLAN-MODEL-ARGS", "--override-model-config")
def flags_agree_with_config_json(subject: Subject) -> Iterator[Broken]:
    """MODEL_ARGS describe the model of the checkpoint; the same structure has other values in other variants."""
    config, found = subject.config, subject.trainer_config_json
    if found is None or config.model.override_model_config or not is_megatron(config):
        return
    try:
        differing = list(disagreements(config, found.values, found.source))
    except ConfigError as error:
        yield Broken(
            f"--train-backend megatron: {error}",
            ((set_flag("train_backend", "torch"),),),
            "train it with --train-backend torch",
            flags=("--train-backend",),
        )
        return
    for option, given, expected in differing:
        name = option.removeprefix("--").replace("-", "_")
        said = f"{option} {given}" if given is not True else option
        other = "has no place with such a model" if expected is None else "is off" if expected is False else f"is {expected}"
        right: Fix = (Change(("megatron", name), None if expected in (None, False) else expected),)
        yield Broken(
            f"{said}: by {found.source} it {other}",
            (right, (Change(("megatron", name), None),), (set_flag("override_model_config", True),)),
            flags=(option, "--override-model-config"),
            advice="--override-model-config makes the flags win, where they are meant",
        )


@rule("PLAN-QUANTISED-WEIGHTS", "--hf-checkpoint", "--ref-load")
def training_starts_from_full_weights(subject: Subject) -> Iterator[Broken]:
    """An FP8 checkpoint is for engines; training starts from the weights that it was made from."""
    config = subject.config
    starts_elsewhere = config.checkpoint.load is not None and not config.needs_reference
    if not subject.rollout_architecture.is_quantised or config.checkpoint.ref_load is not None or starts_elsewhere:
        return
    if config.debug.debug_rollout_only:
        return
    yield Broken(
        f"--hf-checkpoint {config.model.hf_checkpoint} holds FP8 weights, which training cannot start from, and --ref-load is not given",
        advice="give the BF16 checkpoint that it was made from by --ref-load",
    )


@rule("PLAN-STOP-TOKEN", "--rollout-stop-token-ids")
def stop_tokens_are_in_the_vocabulary(subject: Subject) -> Iterator[Broken]:
    """A token that the model cannot give ends no response."""
    given, num_tokens = subject.config.rollout.rollout_stop_token_ids, subject.rollout_architecture.vocab_size
    problem = unknown_tokens(given, num_tokens)
    if problem is not None:
        kept = [token for token in given if token < num_tokens]
        yield Broken(problem, ((set_flag("rollout_stop_token_ids", kept or None),),))


def unknown_tokens(given: Sequence[int], vocab_size: int) -> str | None:
    """What is wrong with stop tokens that the model does not have."""
    unknown = " ".join(str(token) for token in given if token >= vocab_size)
    return f"--rollout-stop-token-ids {unknown}: the model's {vocab_size} tokens end at {vocab_size - 1}" if unknown else None


@rule("PLAN-ENV-ALLOCATOR", "--env", "--colocate")
def offloading_finds_its_memory(subject: Subject) -> Iterator[Broken]:
    """Engines that give their memory back to a trainer cannot do so from expandable segments."""
    config = subject.config
    if not config.cluster.colocate or not running(subject):
        return
    for name in _ALLOCATORS:
        settings = config.cluster.env.get(name, "").replace(" ", "").split(",")
        if "expandable_segments:True" in settings:
            left = ",".join(setting for setting in settings if setting != "expandable_segments:True")
            yield Broken(
                f"--env {name}={config.cluster.env[name]} with --colocate: engines cannot release memory of expandable segments",
                ((Change(("cluster", "env", name), left or None),),),
            )


@rule("PLAN-ENV-CONNECTIONS", "--env", "--tensor-model-parallel-size", "--context-parallel-size", severity=Severity.WARNING)
def communication_keeps_its_order(subject: Subject) -> Iterator[Broken]:
    """Before Blackwell, Megatron's TP and CP need the kernels of a GPU in one queue."""
    config, sizes = subject.config, subject.config.parallel
    given = config.cluster.env.get(_CONNECTIONS)
    splits = sizes.tensor_model_parallel_size > 1 or sizes.context_parallel_size > 1
    if is_megatron(config) and splits and given not in (None, "1") and not subject.gpu.name.startswith("b"):
        yield Broken(
            f"--env {_CONNECTIONS}={given}: --tensor-model-parallel-size {sizes.tensor_model_parallel_size} and --context-parallel-size "
            f"{sizes.context_parallel_size} need 1 on {subject.gpu.name}",
            ((Change(("cluster", "env", _CONNECTIONS), "1"),),),
        )


RULES = (
    flags_agree_with_config_json,
    training_starts_from_full_weights,
    stop_tokens_are_in_the_vocabulary,
    offloading_finds_its_memory,
    communication_keeps_its_order,
)
