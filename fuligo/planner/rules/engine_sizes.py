"""Split of the model over an engine's GPUs: attention replicas, heads, matrices, experts.

Sources: SGLang 0.5.15.post1, `ServerArgs._handle_data_parallelism`, `check_server_args`, `arg_groups/overrides.py`, `models/*.py`,
`layers/moe/fused_moe_triton/layer.py`, `eplb/expert_location.py`.
"""

from collections.abc import Iterator

from fuligo.config.findings import Severity
from fuligo.config.topology import EngineGroupSpec
from fuligo.planner.rules.rule import Fix, Violation, divisors, nearest_first
from fuligo.planner.rules.servers import engine_size, group_rule, option, placed, resizes, set_argument, set_each, shown, where
from fuligo.planner.subject import Subject
from fuligo.quantities import count


def _attention_split(subject: Subject, spec: EngineGroupSpec, size: int) -> str:
    """Return the text for `size` GPUs that share the heads of one attention replica."""
    split = "" if spec.dp_size == 1 else f" / {placed(spec, 'dp_size')} = {size} GPUs share attention"
    return f"{engine_size(subject, spec)}{split}"


def _attention_fixes(subject: Subject, spec: EngineGroupSpec) -> tuple[Fix, ...]:
    """Return fixes with other numbers of replicas, then with other sizes of the engine."""
    heads = subject.rollout_architecture.attention.num_heads
    replicas = nearest_first(spec.dp_size, [size for size in divisors(spec.tp_size) if heads % (spec.tp_size // size) == 0])
    fixes = list(set_each(subject, spec, "dp_size", *replicas)) if spec.dp_size > 1 else []
    return (*fixes, *_sizes(subject, spec))


@group_rule("PLAN-DP-SIZE", "--sglang-dp-size", "--rollout-num-gpus-per-engine")
def replicas_are_whole(subject: Subject, spec: EngineGroupSpec) -> Iterator[Violation]:
    """The number of attention replicas must divide the number of an engine's tensor-parallel GPUs."""
    heads = subject.rollout_architecture.attention.num_heads
    if spec.tp_size % spec.dp_size:
        fitting = [size for size in divisors(spec.tp_size) if heads % (spec.tp_size // size) == 0]
        yield Violation(
            f"{placed(spec, 'dp_size')} does not divide an engine's {count(spec.tp_size, 'tensor-parallel GPU')} "
            f"({engine_size(subject, spec)})",
            set_each(subject, spec, "dp_size", *nearest_first(spec.dp_size, fitting)),
        )


@group_rule("PLAN-DP-ALONE", "--sglang-enable-dp-attention", "--sglang-dp-size")
def replicas_are_several(subject: Subject, spec: EngineGroupSpec) -> Iterator[Violation]:
    """SGLang silently disables DP attention with a single replica."""
    if spec.arguments.get("enable_dp_attention") and spec.arguments.value("dp_size") == 1:
        heads = subject.rollout_architecture.attention.num_heads
        fitting = [size for size in divisors(spec.tp_size) if size > 1 and heads % (spec.tp_size // size) == 0]
        fixes = list(set_each(subject, spec, "dp_size", *nearest_first(spec.tp_size + 1, fitting)))
        text = f"--sglang-enable-dp-attention{where(spec)} has no effect with --sglang-dp-size 1"
        yield Violation(text, (*fixes, (set_argument(subject, spec, "enable_dp_attention", None),)))


@group_rule("PLAN-ENGINE-HEADS", "--rollout-num-gpus-per-engine", "--sglang-dp-size")
def heads_divide(subject: Subject, spec: EngineGroupSpec) -> Iterator[Violation]:
    """The GPUs of an attention replica share its heads equally."""
    heads = subject.rollout_architecture.attention.num_heads
    size = spec.tp_size // spec.dp_size
    if spec.tp_size % spec.dp_size == 0 and heads % size:
        text = f"{_attention_split(subject, spec, size)}: {size} does not divide the model's {heads} attention heads"
        yield Violation(text, _attention_fixes(subject, spec), f"choose sizes such that the GPUs of one replica divide {heads}")


@group_rule("PLAN-ENGINE-KV-HEADS", "--rollout-num-gpus-per-engine", "--sglang-dp-size")
def kv_heads_divide(subject: Subject, spec: EngineGroupSpec) -> Iterator[Violation]:
    """The GPUs of a replica split the key-value heads evenly, or each head is copied to equally many GPUs."""
    heads = subject.rollout_architecture.grouped_attentions
    size = spec.tp_size // spec.dp_size
    if spec.tp_size % spec.dp_size or any(each.num_heads % size for each in heads):
        return
    for groups in sorted({each.num_kv_heads for each in heads if each.num_kv_heads % size and size % each.num_kv_heads}):
        text = f"{_attention_split(subject, spec, size)}: {size} neither divides nor is a multiple of the model's {groups} key-value heads"
        yield Violation(text, _attention_fixes(subject, spec))


@group_rule("PLAN-DP-LM-HEAD", "--sglang-enable-dp-lm-head", "--sglang-enable-dp-attention")
def head_has_replicas(subject: Subject, spec: EngineGroupSpec) -> Iterator[Violation]:
    """The head is computed per attention replica, which requires DP attention."""
    if spec.arguments.get("enable_dp_lm_head") and not spec.arguments.get("enable_dp_attention"):
        text = f"--sglang-enable-dp-lm-head{where(spec)} needs --sglang-enable-dp-attention"
        yield Violation(text, set_each(subject, spec, "enable_dp_lm_head", None))


@group_rule("PLAN-DENSE-TP", "--sglang-moe-dense-tp-size")
def dense_layers_are_whole_or_split(subject: Subject, spec: EngineGroupSpec) -> Iterator[Violation]:
    """SGLang either splits the dense layers of an MoE model over all tensor-parallel GPUs of an engine or replicates them."""
    given = spec.arguments.get("moe_dense_tp_size")
    if given not in (None, 1, spec.tp_size):
        text = f"{placed(spec, 'moe_dense_tp_size')} is neither 1 nor the number of the engine's tensor-parallel GPUs ({spec.tp_size})"
        yield Violation(text, set_each(subject, spec, "moe_dense_tp_size", 1, None))


@group_rule("PLAN-ENGINE-MLP", "--rollout-num-gpus-per-engine", "--sglang-ep-size", "--sglang-moe-dense-tp-size")
def matrices_divide(subject: Subject, spec: EngineGroupSpec) -> Iterator[Violation]:
    """The GPUs of an engine share the columns of MLPs and experts equally."""
    architecture = subject.rollout_architecture
    experts = architecture.experts
    widths = sorted({width for layer in architecture.layers if (width := architecture.dense_size_of(layer))})
    dense = spec.arguments.get("moe_dense_tp_size") or spec.tp_size
    if dense in (1, spec.tp_size) and (uneven := [width for width in widths if width % dense]):
        fixes = (set_argument(subject, spec, "moe_dense_tp_size", 1),) if experts else ()
        text = f"{engine_size(subject, spec)}: {dense} GPUs do not divide the {uneven[0]} columns of a dense MLP"
        yield Violation(text, ((fixes,) if fixes else ()) + _sizes(subject, spec))
    if experts is None or spec.tp_size % spec.ep_size:
        return
    share = spec.tp_size // spec.ep_size
    if experts.intermediate_size % share:
        yield Violation(
            f"{engine_size(subject, spec)} / {placed(spec, 'ep_size', spec.ep_size)} = {share} GPUs share an expert, but "
            f"{share} does not divide its {experts.intermediate_size} columns",
            ((set_argument(subject, spec, "ep_size", spec.tp_size),), *_sizes(subject, spec)),
        )


def _sizes(subject: Subject, spec: EngineGroupSpec) -> tuple[Fix, ...]:
    sizes = nearest_first(spec.num_gpus_per_engine, divisors(spec.num_gpus))
    return tuple(resizes(subject, spec, sizes))


@group_rule("PLAN-ENGINE-MOE-DENSE", "--sglang-ep-size", "--sglang-moe-a2a-backend", "--sglang-ep-num-redundant-experts")
def experts_exist(subject: Subject, spec: EngineGroupSpec) -> Iterator[Violation]:
    """Expert flags have no effect on a model without experts."""
    if subject.rollout_architecture.experts is not None:
        return
    neutral = {
        "ep_size": 1,
        "moe_a2a_backend": "none",
        "ep_num_redundant_experts": 0,
        "moe_dense_tp_size": None,
        "moe_runner_backend": "auto",
    }
    if given := [name for name, value in neutral.items() if spec.arguments.value(name) not in (value, None)]:
        yield Violation(
            f"{' and '.join(shown(spec, name) for name in given)}{where(spec)}: the model has no experts",
            (tuple(set_argument(subject, spec, name, None) for name in given),),
            flags=tuple(option(name) for name in given),
        )


@group_rule("PLAN-ENGINE-EP", "--sglang-ep-size", "--rollout-num-gpus-per-engine")
def expert_ranks_divide_engine(subject: Subject, spec: EngineGroupSpec) -> Iterator[Violation]:
    """The expert-parallel size must divide the number of an engine's tensor-parallel GPUs."""
    if subject.rollout_architecture.experts is not None and spec.tp_size % spec.ep_size:
        yield Violation(
            f"{placed(spec, 'ep_size')} does not divide an engine's {count(spec.tp_size, 'tensor-parallel GPU')} "
            f"({engine_size(subject, spec)})",
            set_each(subject, spec, "ep_size", *nearest_first(spec.ep_size, divisors(spec.tp_size))),
        )


@group_rule("PLAN-ENGINE-EP-FORCED", "--sglang-ep-size", "--sglang-moe-a2a-backend", severity=Severity.WARNING)
def all_to_all_takes_all_gpus(subject: Subject, spec: EngineGroupSpec) -> Iterator[Violation]:
    """With an all-to-all backend SGLang spreads experts over all of an engine's GPUs and ignores --sglang-ep-size."""
    given = spec.arguments.get("ep_size")
    if subject.rollout_architecture.experts is not None and given is not None and given != spec.ep_size:
        yield Violation(
            f"{placed(spec, 'ep_size')} is ignored: {shown(spec, 'moe_a2a_backend')} spreads the experts over all "
            f"GPUs of an engine ({spec.ep_size})",
            set_each(subject, spec, "ep_size", spec.ep_size),
        )


@group_rule("PLAN-ENGINE-EXPERTS", "--sglang-ep-size", "--sglang-ep-num-redundant-experts")
def experts_divide(subject: Subject, spec: EngineGroupSpec) -> Iterator[Violation]:
    """Every expert rank holds equally many experts, redundant copies included."""
    experts = subject.rollout_architecture.experts
    if experts is None:
        return
    redundant = spec.arguments.value("ep_num_redundant_experts")
    total = experts.num_experts + redundant
    if total % spec.ep_size == 0:
        return
    fewest = -experts.num_experts % spec.ep_size
    copies = [fewest, fewest + spec.ep_size] if fewest else []
    fixes: list[Fix] = [] if fewest else [(set_argument(subject, spec, "ep_num_redundant_experts", None),)]
    fixes += list(set_each(subject, spec, "ep_num_redundant_experts", *copies))
    fixes += list(set_each(subject, spec, "ep_size", *nearest_first(spec.ep_size, divisors(spec.tp_size))))
    shown_copies = f" + {redundant} redundant ({shown(spec, 'ep_num_redundant_experts')}) = {total}" if redundant else ""
    text = f"{experts.num_experts} experts{shown_copies} are not divisible by {placed(spec, 'ep_size', spec.ep_size)}"
    yield Violation(text, tuple(fixes), "add redundant experts, or choose another size")


@group_rule("PLAN-ENGINE-TP-EXPERTS", "--rollout-num-gpus-per-engine")
def engine_is_not_wider_than_its_experts(subject: Subject, spec: EngineGroupSpec) -> Iterator[Violation]:
    """SGLang's mixture-of-experts models cannot use more tensor-parallel GPUs than there are experts."""
    experts = subject.rollout_architecture.experts
    if experts is not None and spec.tp_size > experts.num_experts:
        text = f"{engine_size(subject, spec)}: {spec.tp_size} tensor-parallel GPUs are more than the {experts.num_experts} experts"
        yield Violation(text, _sizes(subject, spec))
