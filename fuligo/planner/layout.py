"""Placement of trainer ranks (in Megatron's order) and engines (group by group) on nodes of GPUs."""

from collections.abc import Iterator, Sequence

from fuligo.config.topology import EngineGroupSpec, engine_groups
from fuligo.errors import ConfigError
from fuligo.layout.megatron import Layout, layout_of
from fuligo.layout.slots import engine_slots, trainer_slots
from fuligo.planner.plan import ClusterLayout, EngineGroup, EngineRank, PlacedGpu, TrainerRank
from fuligo.planner.stages import stages
from fuligo.planner.subject import Subject

MAX_GPUS = 32768
"""Limit of a plan; every GPU is placed and drawn, and more than this takes minutes and is most likely a typo."""
EMBEDDED_RANK = EngineRank(group=0, engine=0, rank=0, tp=0, pp=0, dp=0, ep=0)
EMBEDDED_GROUP = EngineGroup("default", "regular", num_engines=1, num_gpus_per_engine=1, tp=1, pp=1, dp=1, ep=1)
"""Embedded engine: one process on the trainer's first GPU."""


def make_layout(subject: Subject) -> ClusterLayout:
    """Return the cluster with every trainer and engine rank in its place.

    Trainer ranks fill `--actor-num-gpus-per-node` GPUs of each of the first `--actor-num-nodes` nodes. With `--colocate` (and always
    for the embedded engine) engines take the same GPUs in the same order, then the free ones; without it the free ones, node by node.

    Raises:
        ConfigError: sizes do not divide, an engine group cannot be split into engines, or there are more than `MAX_GPUS`.
    """
    config = subject.config
    if config.total_num_gpus > MAX_GPUS:
        raise ConfigError(
            f"--actor-num-nodes {config.cluster.actor_num_nodes} x --actor-num-gpus-per-node {config.resolved_actor_num_gpus_per_node} "
            f"with the engines' own (--rollout-num-gpus) are {config.total_num_gpus} GPUs; plans support up to {MAX_GPUS}"
        )
    shape = layout_of(config)
    specs, embedded = engine_groups(config), config.needs_engine and config.engine_capabilities.beside_trainer
    per_node = max(config.cluster.num_gpus_per_node, config.resolved_actor_num_gpus_per_node)
    trainers_at = trainer_slots(shape.num_ranks, config.resolved_actor_num_gpus_per_node) if config.trains else []
    engine_ranks = [EMBEDDED_RANK] if embedded else list(_engine_ranks(specs))
    engines_at = engine_slots(trainers_at, len(engine_ranks), per_node, shares=config.shares_gpus or embedded)
    trainers = dict(zip(trainers_at, trainer_ranks(shape)))
    engines = dict(zip(engines_at, engine_ranks))
    num_nodes = 1 + max((node for node, _ in [*trainers_at, *engines_at]), default=0)
    return ClusterLayout(
        num_nodes=num_nodes,
        num_gpus_per_node=per_node,
        gpus=tuple(
            PlacedGpu(node, index, trainers.get((node, index)), engines.get((node, index)))
            for node in range(num_nodes)
            for index in range(per_node)
        ),
        stages=stages(subject),
        engine_groups=(EMBEDDED_GROUP,) if embedded else tuple(_engine_group(spec) for spec in specs),
        tp=shape.tp,
        cp=shape.cp,
        pp=shape.pp,
        ep=shape.ep,
        etp=shape.etp,
        dp=shape.dp,
    )


def trainer_ranks(shape: Layout) -> tuple[TrainerRank, ...]:
    """Return every rank's coordinates, by rank.

    Megatron-Core's order is tp-cp-ep-dp-pp, the first varying fastest (`parallel_state.RankGenerator`). Experts have a grid of their
    own over the same ranks, etp-ep-dp-pp, with the same pipeline ranks.
    """
    return tuple(
        TrainerRank(
            rank=rank,
            tp=rank % shape.tp,
            cp=rank // shape.tp % shape.cp,
            dp=rank // (shape.tp * shape.cp) % shape.dp,
            pp=rank // (shape.tp * shape.cp * shape.dp),
            ep=rank // shape.etp % shape.ep,
            etp=rank % shape.etp,
            expert_dp=rank // (shape.etp * shape.ep) % shape.expert_dp,
        )
        for rank in range(shape.num_ranks)
    )


def _engine_ranks(specs: Sequence[EngineGroupSpec]) -> Iterator[EngineRank | None]:
    """Yield the rank of every GPU of the engines; None for GPUs of a placeholder.

    Within an engine SGLang's tensor ranks are consecutive in each pipeline stage. Consecutive ranks share a data-parallel rank of
    attention (`layers/dp_attention.py`) and, of the expert ranks, those that share an expert's matrices.
    """
    engine = 0
    for group, spec in enumerate(specs):
        if spec.worker_type == "placeholder":
            yield from [None] * spec.num_gpus
            continue
        _must_divide(spec, f"engine group {group + 1} ({spec.worker_type})")
        tp_size, dp_size, ep_size = spec.tp_size, spec.dp_size, spec.ep_size
        for _ in range(spec.num_engines):
            for rank in range(spec.num_gpus_per_engine):
                pp, tp = divmod(rank, tp_size)
                yield EngineRank(
                    group=group,
                    engine=engine,
                    rank=rank,
                    tp=tp,
                    pp=pp,
                    dp=tp * dp_size // tp_size,
                    ep=tp * ep_size // tp_size,
                )
            engine += 1


def _must_divide(spec: EngineGroupSpec, owner: str) -> None:
    if spec.num_gpus % spec.num_gpus_per_engine:
        raise ConfigError(f"{owner}: {spec.num_gpus} GPUs are not a multiple of --rollout-num-gpus-per-engine {spec.num_gpus_per_engine}")
    pp_size = spec.arguments.value("pp_size")
    if pp_size < 1 or spec.num_gpus_per_engine % pp_size:
        raise ConfigError(f"{owner}: --sglang-pp-size {pp_size} does not divide --rollout-num-gpus-per-engine {spec.num_gpus_per_engine}")
    for option, size in (("--sglang-dp-size", spec.dp_size), ("--sglang-ep-size", spec.ep_size)):
        if size < 1 or spec.tp_size % size:
            raise ConfigError(f"{owner}: {option} {size} does not divide the {spec.tp_size} tensor-parallel GPUs of an engine")


def _engine_group(spec: EngineGroupSpec) -> EngineGroup:
    return EngineGroup(
        model=spec.model,
        worker_type=spec.worker_type,
        num_engines=spec.num_engines,
        num_gpus_per_engine=spec.num_gpus_per_engine,
        tp=spec.tp_size,
        pp=spec.pp_size,
        dp=spec.dp_size,
        ep=spec.ep_size,
    )
