"""Parallel sizes of the Megatron trainer: its GPUs and the model's matrices.

Sources: Megatron-Core 0.16.1, `parallel_state.initialize_model_parallel`, `TransformerConfig.__post_init__`, `MoELayer`.
"""

from collections.abc import Iterator
from itertools import product
from math import log, prod

from fuligo.config import Config
from fuligo.config.findings import Severity
from fuligo.config.rules.rule import set_flag, unset_flag
from fuligo.models.architecture import GroupedAttention
from fuligo.planner.rules.rule import Fix, Violation, divisors, nearest_first, rule
from fuligo.planner.subject import Subject
from fuligo.quantities import count

_GPUS = ("--actor-num-nodes", "--actor-num-gpus-per-node")
_TP, _PP, _CP = "tensor_model_parallel_size", "pipeline_model_parallel_size", "context_parallel_size"
_FLAG_COSTS = 1.0
"""Cost of changing one more flag; changing a size by a factor of e costs 1."""
_MAX_FIXES = 24
_EP, _ETP = "expert_model_parallel_size", "expert_tensor_parallel_size"


def expert_tensor_parallel_size(config: Config) -> int:
    """Return ETP as Megatron resolves it: TP unless given."""
    return config.parallel.expert_tensor_parallel_size or config.parallel.tensor_model_parallel_size


def trainer_gpus(config: Config) -> str:
    """Return `the trainer's 8 GPUs (--actor-num-nodes 1 x --actor-num-gpus-per-node 8)`."""
    nodes, each = config.cluster.actor_num_nodes, config.resolved_actor_num_gpus_per_node
    return f"the trainer's {count(config.num_train_gpus, 'GPU')} (--actor-num-nodes {nodes} x --actor-num-gpus-per-node {each})"


def _other_tp(subject: Subject, sizes: list[int]) -> tuple[Fix, ...]:
    """Return fixes that resize the tensor-parallel group, with sequence parallelism adjusted."""
    config, now = subject.config, subject.config.parallel.tensor_model_parallel_size
    others = config.parallel.pipeline_model_parallel_size * config.parallel.context_parallel_size
    fixes: list[Fix] = []
    for size in sorted(nearest_first(now, sizes), key=lambda size: config.num_train_gpus % (size * others) != 0):
        change = (set_flag(_TP, size),)
        if size == 1 and config.parallel.sequence_parallel:
            change = (*change, unset_flag("sequence_parallel"))
        if size > 1 and subject.architecture.experts is not None and not config.parallel.sequence_parallel:
            change = (*change, set_flag("sequence_parallel", True))
        fixes.append(change)
    return tuple(fixes)


def _nearest_of_several(subject: Subject, sizes: dict[str, int], *, fixed: int = 1) -> tuple[Fix, ...]:
    """Return fixes after which the sizes times `fixed` divide the trainer's GPUs, the smallest changes first."""
    gpus = subject.config.num_train_gpus
    found: list[tuple[float, Fix]] = []
    for chosen in product(divisors(gpus), repeat=len(sizes)):
        if gpus % (prod(chosen) * fixed):
            continue
        changed = {name: new for (name, old), new in zip(sizes.items(), chosen, strict=True) if new != old}
        distance = sum(abs(log(new / sizes[name])) + _FLAG_COSTS for name, new in changed.items())
        fix = tuple(set_flag(name, new) for name, new in changed.items())
        if changed.get(_TP) == 1 and subject.config.parallel.sequence_parallel:
            fix = (*fix, unset_flag("sequence_parallel"))
        found.append((distance, fix))
    return tuple(fix for _, fix in sorted(found, key=lambda each: each[0])[:_MAX_FIXES])


def dense_sizes_divide(config: Config) -> bool:
    """Return whether TP x PP x CP divides the trainer's GPUs."""
    sizes = config.parallel
    product = sizes.tensor_model_parallel_size * sizes.pipeline_model_parallel_size * sizes.context_parallel_size
    return config.num_train_gpus % product == 0


@rule("PLAN-TRAINER-GPUS", "--tensor-model-parallel-size", "--pipeline-model-parallel-size", "--context-parallel-size", *_GPUS)
def sizes_divide_gpus(subject: Subject) -> Iterator[Violation]:
    """A replica of the model takes TP x PP x CP GPUs, and the GPUs must hold whole replicas."""
    config, sizes = subject.config, subject.config.parallel
    if not subject.is_megatron or dense_sizes_divide(config):
        return
    tp, pp, cp = sizes.tensor_model_parallel_size, sizes.pipeline_model_parallel_size, sizes.context_parallel_size
    yield Violation(
        f"--tensor-model-parallel-size {tp} x --pipeline-model-parallel-size {pp} x --context-parallel-size {cp} = {tp * pp * cp} "
        f"does not divide {trainer_gpus(config)}",
        _nearest_of_several(subject, {_TP: tp, _PP: pp, _CP: cp}),
        "choose sizes whose product divides the GPUs, or change the number of GPUs",
    )


@rule("PLAN-EXPERT-GPUS", "--expert-tensor-parallel-size", "--expert-model-parallel-size", "--pipeline-model-parallel-size", *_GPUS)
def expert_sizes_divide_gpus(subject: Subject) -> Iterator[Violation]:
    """Experts have their own rank grid over the same GPUs, so ETP x EP x PP must divide them too."""
    config = subject.config
    if not subject.is_megatron or not dense_sizes_divide(config):
        return
    etp, ep, pp = (
        expert_tensor_parallel_size(config),
        config.parallel.expert_model_parallel_size,
        config.parallel.pipeline_model_parallel_size,
    )
    if config.num_train_gpus % (etp * ep * pp) == 0:
        return
    default = "" if config.parallel.expert_tensor_parallel_size else " (by default --tensor-model-parallel-size)"
    yield Violation(
        f"--expert-tensor-parallel-size {etp}{default} x --expert-model-parallel-size {ep} x --pipeline-model-parallel-size {pp} = "
        f"{etp * ep * pp} does not divide {trainer_gpus(config)}",
        _nearest_of_several(subject, {_ETP: etp, _EP: ep}, fixed=pp),
        "choose expert sizes whose product with the pipeline's divides the GPUs",
    )


@rule("PLAN-TP-HEADS", "--tensor-model-parallel-size")
def heads_divide(subject: Subject) -> Iterator[Violation]:
    """Tensor parallelism gives each GPU whole attention heads."""
    config, heads = subject.config, subject.architecture.attention.num_heads
    tp = config.parallel.tensor_model_parallel_size
    if subject.is_megatron and heads % tp:
        text = f"--tensor-model-parallel-size {tp} does not divide the model's {heads} attention heads"
        yield Violation(text, _other_tp(subject, divisors(heads)), f"choose a size that divides both {heads} and {trainer_gpus(config)}")


@rule("PLAN-TP-KV-HEADS", "--tensor-model-parallel-size")
def kv_heads_divide(subject: Subject) -> Iterator[Violation]:
    """The GPUs split the key-value heads evenly, or each head is copied to equally many GPUs."""
    config, attention = subject.config, subject.architecture.attention
    tp = config.parallel.tensor_model_parallel_size
    if not subject.is_megatron or not isinstance(attention, GroupedAttention) or attention.num_heads % tp:
        return
    groups = attention.num_kv_heads
    if groups % tp and tp % groups:
        text = f"--tensor-model-parallel-size {tp} neither divides nor is a multiple of the model's {groups} key-value heads"
        yield Violation(text, _other_tp(subject, divisors(attention.num_heads)), f"choose a divisor or a multiple of {groups}")


@rule("PLAN-TP-MLP", "--tensor-model-parallel-size")
def mlp_divides(subject: Subject) -> Iterator[Violation]:
    """Tensor parallelism gives each GPU an equal share of a dense MLP's columns."""
    config, architecture = subject.config, subject.architecture
    tp, width = config.parallel.tensor_model_parallel_size, architecture.intermediate_size
    if subject.is_megatron and architecture.attention.num_heads % tp == 0 and width % tp:
        text = f"--tensor-model-parallel-size {tp} does not divide the {width} columns of the model's MLP"
        yield Violation(text, _other_tp(subject, divisors(architecture.attention.num_heads)), f"choose a divisor of {width}")


@rule("PLAN-SP-WITHOUT-TP", "--sequence-parallel", "--tensor-model-parallel-size", severity=Severity.WARNING)
def sequence_is_split_over_tp(subject: Subject) -> Iterator[Violation]:
    """Sequence parallelism splits over the tensor-parallel GPUs and has no effect with only one."""
    config = subject.config
    if subject.is_megatron and config.parallel.sequence_parallel and config.parallel.tensor_model_parallel_size == 1:
        yield Violation("--sequence-parallel has no effect with --tensor-model-parallel-size 1", ((unset_flag("sequence_parallel"),),))


@rule("PLAN-MOE-SEQUENCE-PARALLEL", "--sequence-parallel", "--tensor-model-parallel-size")
def mixture_splits_its_sequence(subject: Subject) -> Iterator[Violation]:
    """Without sequence parallelism every tensor-parallel GPU would send the same tokens to the experts; Megatron rejects this."""
    config, tp = subject.config, subject.config.parallel.tensor_model_parallel_size
    if subject.is_megatron and subject.architecture.experts is not None and tp > 1 and not config.parallel.sequence_parallel:
        text = f"--tensor-model-parallel-size {tp} with an MoE model needs --sequence-parallel"
        yield Violation(text, ((set_flag("sequence_parallel", True),),))


@rule("PLAN-TP-NODES", "--tensor-model-parallel-size", "--num-gpus-per-node", severity=Severity.WARNING)
def tensor_parallel_stays_in_a_node(subject: Subject) -> Iterator[Violation]:
    """Tensor parallelism communicates in every layer, which is slow across nodes."""
    config, tp = subject.config, subject.config.parallel.tensor_model_parallel_size
    here = config.resolved_actor_num_gpus_per_node
    if not subject.is_megatron or config.cluster.actor_num_nodes == 1 or not dense_sizes_divide(config) or here % tp == 0:
        return
    text = f"--tensor-model-parallel-size {tp} spans nodes with {here} trainer GPUs each: every layer waits for the network"
    yield Violation(text, _other_tp(subject, divisors(here)), f"choose a divisor of {here}")


@rule("PLAN-UNEVEN-BATCH", "--global-batch-size", severity=Severity.WARNING)
def ranks_have_equally_many_samples(subject: Subject) -> Iterator[Violation]:
    """If samples do not divide evenly, some replicas wait for others that have one sample more."""
    config = subject.config
    if config.samples_per_rollout % config.resolved_num_steps_per_rollout:
        return
    size, ranks = config.resolved_global_batch_size, config.resolved_data_parallel_size
    if size < ranks or size % ranks == 0 or not dense_sizes_divide(config):
        return
    samples = config.samples_per_rollout
    fitting = [divisor for divisor in divisors(samples) if divisor % ranks == 0]
    yield Violation(
        f"the {size} samples of an optimizer step (--global-batch-size) cannot be divided evenly among {ranks} data-parallel ranks: "
        f"{count(size % ranks, 'rank')} would have {size // ranks + 1} and the others {size // ranks}",
        tuple((unset_flag("num_steps_per_rollout"), set_flag("global_batch_size", near)) for near in nearest_first(size, fitting)),
        f"choose a --rollout-batch-size such that the samples of a step are a multiple of {ranks}",
    )
