"""LoRA adapters: layers and ranks that fit the model, and engines that can apply them."""

from collections.abc import Iterator

from fuligo.config.flag import did_you_mean, nearest, option_name
from fuligo.config.rules.rule import set_flag, unset_flag
from fuligo.formats.adapter_config import is_target
from fuligo.layout.adapter import AdapterShape
from fuligo.models.adapter_names import adapter_of
from fuligo.models.registry import family_of
from fuligo.planner.rules.rule import Fix, Violation, rule
from fuligo.planner.subject import Subject

_USUAL_RANK = 16


@rule("PLAN-LORA-MODULES", "--lora-target-modules", "--lora-adapter")
def adapted_layers_exist(subject: Subject) -> Iterator[Violation]:
    """Every target module must match a linear layer of the model; otherwise it trains nothing."""
    adapter = _adapter(subject)
    if adapter is None:
        return
    targets, layers, model = adapter.config.target_modules, adapter.layers, subject.architecture.model_type
    kinds = sorted({layer.rpartition(".")[2] for layer in layers})
    for target in targets:
        if any(is_target(layer, target) for layer in layers):
            continue
        near = nearest(target, kinds)
        others = [*(other for other in targets if other != target), *(near if len(near) == 1 else ())]
        fixes = [set_flag("lora_target_modules", others)] if others else []
        yield _violation(
            subject,
            "lora_target_modules",
            f"target module {target}",
            f"--lora-target-modules {target}",
            f"matches no linear layer of {model} that can be adapted ({', '.join(kinds)}){did_you_mean(near)}",
            tuple((fix,) for fix in (*fixes, unset_flag("lora_target_modules"))),
        )


@rule("PLAN-LORA-RANK", "--lora-rank", "--lora-adapter")
def rank_fits_the_layers(subject: Subject) -> Iterator[Violation]:
    """The rank must not exceed the largest number of inputs or outputs of a layer that can be adapted: no update can have a higher rank."""
    adapter = _adapter(subject)
    if adapter is not None and adapter.config.rank > adapter.widest:
        rank, model = adapter.config.rank, subject.architecture.model_type
        problem = f"exceeds the {adapter.widest} inputs or outputs of the widest layer of {model} that can be adapted"
        fix = (set_flag("lora_rank", min(_USUAL_RANK, adapter.widest)),)
        yield _violation(subject, "lora_rank", f"rank {rank}", f"--lora-rank {rank}", problem, (fix,))


@rule("PLAN-LORA-EXPERTS", "--lora-experts", "--lora-adapter")
def adapted_experts_exist(subject: Subject) -> Iterator[Violation]:
    """Only an MoE model has experts to adapt, and their matrices must be plain: not transposed and without biases."""
    adapter, architecture = _adapter(subject), subject.architecture
    are_plain = architecture.experts is not None and family_of(architecture).has_plain_experts
    if adapter is not None and adapter.config.adapts_experts and not are_plain:
        reason = f"{architecture.model_type} has no experts" if architecture.experts is None else _not_plain(subject)
        fix = (unset_flag("lora_experts"),)
        yield _violation(subject, "lora_experts", "adapter of experts", "--lora-experts", f"cannot be used: {reason}", (fix,))


@rule("PLAN-LORA-BASE", "--lora-base-precision")
def quantized_experts_are_plain_matrices(subject: Subject) -> Iterator[Violation]:
    """Experts with biases or transposed matrices cannot be quantized."""
    architecture, precision = subject.architecture, subject.config.lora.lora_base_precision
    if precision != "full" and subject.config.trains and architecture.experts is not None and not family_of(architecture).has_plain_experts:
        yield Violation(f"--lora-base-precision {precision} cannot be used: {_not_plain(subject)}", ((unset_flag("lora_base_precision"),),))


def _not_plain(subject: Subject) -> str:
    return f"the experts of {subject.architecture.model_type} have transposed matrices and biases"


def _adapter(subject: Subject) -> AdapterShape | None:
    """Return the adapter that the flags describe, which a fix may have changed since the subject was read; None without one."""
    if subject.adapter_config is None or subject.config.lora.lora_adapter is not None:
        return subject.adapter
    given = adapter_of(subject.config)
    return None if given is None else AdapterShape(given, subject.architecture)


def _violation(subject: Subject, name: str, part: str, given: str, problem: str, fixes: tuple[Fix, ...]) -> Violation:
    """Return the violation of the flag `name`, or of --lora-adapter if it is set, because no flag can change that adapter's shape.

    Args:
        part: the part of the adapter that does not fit, such as `rank 64`
        given: the flag that sets this part, with its value
        problem: why the part does not fit; continues the sentence that `part` or `given` begins
    """
    directory = subject.config.lora.lora_adapter
    if directory is not None:
        text = f"--lora-adapter {directory}: its {part} {problem}"
        return Violation(text, (), "use the model that the adapter was trained on", flags=("--lora-adapter",))
    return Violation(f"{given} {problem}", fixes, flags=(option_name(name),))


@rule("PLAN-VISION-ADAPTER", "--lora-sync")
def adapters_of_models_with_a_tower_are_merged(subject: Subject) -> Iterator[Violation]:
    """SGLang's LoRA adapters have not been tested with models that have a vision tower."""
    config, model = subject.config, subject.rollout_architecture
    if model.vision_tower is not None and config.syncs_adapter and config.engine_capabilities.names_adapters:
        text = f"--lora-sync adapter: SGLang's LoRA adapters have not been tested with a vision tower, which {model.model_type} has"
        yield Violation(text, ((set_flag("lora_sync", "merged"),),))
