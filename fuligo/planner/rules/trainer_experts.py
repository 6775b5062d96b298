"""Mixture of experts in the Megatron trainer: placement of experts and dispatch of tokens.

Sources: Megatron-Core 0.16.1, `TransformerConfig.__post_init__`, `MoELayer`, `token_dispatcher.MoEFlexTokenDispatcher`.
"""

from collections.abc import Iterator

from fuligo.config.findings import Change, Rule, Severity, simple_rule
from fuligo.config.flag import option_name
from fuligo.config.rules.rule import set_flag, unset_flag
from fuligo.planner.rules.parallel import expert_tensor_parallel_size
from fuligo.planner.rules.rule import Fix, Violation, divisors, nearest_first, rule
from fuligo.planner.subject import Subject
from fuligo.quantities import count


def _has_experts(subject: Subject) -> bool:
    return subject.is_megatron and subject.architecture.experts is not None


@rule("PLAN-MOE-DENSE", "--expert-model-parallel-size", "--moe-enable-deepep", "--moe-token-dispatcher-type")
def experts_exist(subject: Subject) -> Iterator[Violation]:
    """Expert flags have no effect on a model without experts, and Megatron rejects expert parallelism for it."""
    if not subject.is_megatron or subject.architecture.experts is not None:
        return
    sizes, algorithm = subject.config.parallel, subject.config.algorithm
    typed = {
        "expert_model_parallel_size": sizes.expert_model_parallel_size > 1 and f" {sizes.expert_model_parallel_size}",
        "moe_token_dispatcher_type": sizes.moe_token_dispatcher_type != "allgather" and f" {sizes.moe_token_dispatcher_type}",
        "moe_enable_deepep": sizes.moe_enable_deepep and " ",
        "use_routing_replay": algorithm.use_routing_replay and " ",
        "use_rollout_routing_replay": algorithm.use_rollout_routing_replay and " ",
    }
    if given := {name: f"{option_name(name)}{value}".strip() for name, value in typed.items() if value}:
        text = f"{', '.join(given.values())}: the model ({subject.architecture.model_type}) has no experts"
        yield Violation(text, (tuple(unset_flag(name) for name in given),), flags=tuple(option_name(name) for name in given))


@rule("PLAN-EP-EXPERTS", "--expert-model-parallel-size")
def experts_divide(subject: Subject) -> Iterator[Violation]:
    """Expert parallelism gives each rank equally many whole experts."""
    config, experts = subject.config, subject.architecture.experts
    ep = config.parallel.expert_model_parallel_size
    if subject.is_megatron and experts is not None and experts.num_experts % ep:
        yield Violation(
            f"--expert-model-parallel-size {ep} does not divide the model's {experts.num_experts} experts",
            tuple((set_flag("expert_model_parallel_size", size),) for size in nearest_first(ep, divisors(experts.num_experts))),
            f"choose a divisor of {experts.num_experts}",
        )


@rule("PLAN-ETP-WIDTH", "--expert-tensor-parallel-size")
def expert_width_divides(subject: Subject) -> Iterator[Violation]:
    """Expert tensor parallelism gives each GPU an equal share of an expert's columns."""
    config, experts = subject.config, subject.architecture.experts
    etp = expert_tensor_parallel_size(config)
    if subject.is_megatron and experts is not None and experts.intermediate_size % etp:
        yield Violation(
            f"--expert-tensor-parallel-size {etp} does not divide the {experts.intermediate_size} columns of an expert",
            tuple((set_flag("expert_tensor_parallel_size", size),) for size in nearest_first(etp, divisors(experts.intermediate_size))),
            f"choose a divisor of {experts.intermediate_size}",
        )


@rule("PLAN-DISPATCHER", "--moe-token-dispatcher-type", "--expert-model-parallel-size", severity=Severity.WARNING)
def dispatcher_scales(subject: Subject) -> Iterator[Violation]:
    """The allgather dispatcher sends every token to every expert rank and rejects micro-batches of varying length in a pipeline."""
    config, experts = subject.config, subject.architecture.experts
    ep, pp = config.parallel.expert_model_parallel_size, config.parallel.pipeline_model_parallel_size
    deepep = config.parallel.moe_enable_deepep  # PLAN-DEEPEP-FLEX reports the dispatcher
    if not subject.is_megatron or experts is None or ep == 1 or deepep or config.parallel.moe_token_dispatcher_type != "allgather":
        return
    lengths = f", and it rejects the micro-batches of varying length of --pipeline-model-parallel-size {pp}" if pp > 1 else ""
    yield Violation(
        f"--moe-token-dispatcher-type allgather (the default) sends every token to all {ep} ranks of --expert-model-parallel-size, "
        f"but a token uses only {count(experts.num_experts_per_token, 'expert')}{lengths}",
        ((set_flag("moe_token_dispatcher_type", "alltoall"),),),
    )


@rule("PLAN-EP-OVERLAP", "--overlap-moe-expert-parallel-comm")
def expert_communication_can_overlap(subject: Subject) -> Iterator[Violation]:
    """Megatron overlaps expert communication only without full recomputation, and in a pipeline only with interleaved stages."""
    config, sizes = subject.config, subject.config.parallel
    if not _has_experts(subject) or not config.megatron.get("overlap_moe_expert_parallel_comm"):
        return
    missing, refused = [], []
    if sizes.expert_model_parallel_size == 1:
        missing.append("--expert-model-parallel-size above 1")
    if sizes.moe_token_dispatcher_type == "allgather":
        missing.append("--moe-token-dispatcher-type alltoall or flex")
    if sizes.recompute_granularity == "full":
        refused.append("--recompute-granularity full")
    if sizes.pipeline_model_parallel_size > 1 and (sizes.virtual_pipeline_model_parallel_size or 1) == 1:
        missing.append("--virtual-pipeline-model-parallel-size")
    if config.megatron.get("moe_shared_expert_overlap"):
        refused.append("--moe-shared-expert-overlap")
    reasons = [f"{reason} {' and '.join(flags)}" for reason, flags in (("needs", missing), ("cannot be combined with", refused)) if flags]
    if reasons:
        text = f"--overlap-moe-expert-parallel-comm {' and '.join(reasons)}"
        yield Violation(text, ((Change(("megatron", "overlap_moe_expert_parallel_comm"), None),),))


def _dispatcher(subject: Subject) -> str:
    return subject.config.parallel.moe_token_dispatcher_type


# fmt: off
TABLE: tuple[Rule[Subject, Fix], ...] = (
    simple_rule("PLAN-DEEPEP-FLEX", "--moe-enable-deepep --moe-token-dispatcher-type", "DeepEP is a backend of Megatron's flex dispatcher.",
        lambda subject: _has_experts(subject) and subject.config.parallel.moe_enable_deepep and _dispatcher(subject) != "flex",
        lambda subject: f"--moe-enable-deepep needs --moe-token-dispatcher-type flex, but it is {_dispatcher(subject)}",
        (set_flag("moe_token_dispatcher_type", "flex"),), (unset_flag("moe_enable_deepep"),)),
    simple_rule("PLAN-DEEPEP-BACKEND", "--moe-enable-deepep --moe-flex-dispatcher-backend",
        "The flex dispatcher uses one backend at a time.",
        lambda subject: _has_experts(subject) and subject.config.parallel.moe_enable_deepep
        and subject.config.megatron.value("moe_flex_dispatcher_backend") == "hybridep",
        "--moe-enable-deepep and --moe-flex-dispatcher-backend hybridep select two backends for one dispatcher",
        (Change(("megatron", "moe_flex_dispatcher_backend"), None),), (unset_flag("moe_enable_deepep"),)),
    simple_rule("PLAN-FLEX-SIZE", "--moe-token-dispatcher-type --expert-model-parallel-size",
        "The flex dispatcher needs more than one GPU to send tokens to (ETP x EP).",
        lambda subject: _has_experts(subject) and _dispatcher(subject) == "flex"
        and subject.config.parallel.expert_model_parallel_size == expert_tensor_parallel_size(subject.config) == 1,
        "--moe-token-dispatcher-type flex with --expert-model-parallel-size 1: all experts are on one GPU",
        (set_flag("moe_token_dispatcher_type", "alltoall"), unset_flag("moe_enable_deepep"))),
    simple_rule("PLAN-SHARED-OVERLAP", "--moe-shared-expert-overlap --moe-token-dispatcher-type",
        "Only the alltoall dispatcher overlaps with the shared experts.",
        lambda subject: _has_experts(subject) and subject.config.megatron.get("moe_shared_expert_overlap")
        and _dispatcher(subject) != "alltoall",
        lambda subject: f"--moe-shared-expert-overlap needs --moe-token-dispatcher-type alltoall, but it is {_dispatcher(subject)}",
        (Change(("megatron", "moe_shared_expert_overlap"), None),), (set_flag("moe_token_dispatcher_type", "alltoall"),)),
)
# fmt: on
