"""Pipeline stages, and placement of trainer ranks (in Megatron's order) and engines (group by group) on nodes of GPUs."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate

from fuligo.config.topology import EngineGroupSpec, engine_groups
from fuligo.errors import ConfigError
from fuligo.layout.megatron import Layout, layout_of
from fuligo.layout.slots import engine_slots, trainer_slots
from fuligo.models.architecture import Architecture, Layer
from fuligo.planner.plan import ClusterLayout, EngineGroup, EngineRank, PlacedGpu, Stage, TrainerRank
from fuligo.planner.subject import Subject
from fuligo.quantities import count

ACCOUNTING = ("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split")


@dataclass(frozen=True, slots=True)
class Cut:
    """Flags that split the layers into stages."""

    num_layers: int
    embedding: bool
    """True if the embedding counts as a layer of the first stage."""
    loss: bool
    """True if the loss counts as a layer of the last stage."""
    pp: int
    """Pipeline-parallel size."""
    vpp: int
    """Virtual stages per pipeline rank."""
    first: int | None
    """Layers of the first pipeline rank; None: an equal share."""
    last: int | None
    """Layers of the last pipeline rank; None: an equal share."""

    @property
    def num_extra(self) -> int:
        """Number of extra layers: the embedding and the loss, if they count as layers."""
        return self.embedding + self.loss

    def counts(self) -> list[int] | None:
        """Return the layers of each pipeline rank, extra ones included, or None if they cannot be split this way."""
        num_middle = self.pp - (self.first is not None) - (self.last is not None)
        rest = self.num_layers + self.num_extra - (self.first or 0) - (self.last or 0)
        if num_middle < 0 or rest < 0 or bool(rest) != bool(num_middle) or (num_middle and rest % num_middle):
            return None
        middle = [rest // num_middle] * num_middle if num_middle else []
        return ([] if self.first is None else [self.first]) + middle + ([] if self.last is None else [self.last])

    def starts(self) -> list[int]:
        """Return the first layer of every virtual stage, from 0, extra ones not counted; empty if the layers cannot be split this way."""
        counts = self.counts()
        if counts is None or any(number % self.vpp for number in counts):
            return []
        return list(accumulate(self.chunks(counts)[:-1], initial=0))

    def chunks(self, counts: Sequence[int]) -> list[int]:
        """Return the number of layers of every virtual stage, extra ones excluded, for the layers of each pipeline rank."""
        chunks = [number // self.vpp for _ in range(self.vpp) for number in counts]
        chunks[0] -= self.embedding
        chunks[-1] -= self.loss
        return chunks

    def shown(self) -> str:
        """Return ` with --decoder-first-pipeline-num-layers 14`; an empty string without these flags."""
        named = {"--decoder-first-pipeline-num-layers": self.first, "--decoder-last-pipeline-num-layers": self.last}
        given = [f"{option} {number}" for option, number in named.items() if number is not None]
        return f" with {' and '.join(given)}" if given else ""

    def why_uneven(self) -> str:
        extra = f" ({self.num_extra} counted for embedding and loss)" if self.num_extra else ""
        total, given = self.num_layers + self.num_extra, (self.first or 0) + (self.last or 0)
        num_middle = self.pp - (self.first is not None) - (self.last is not None)
        if num_middle > 0 and given < total:
            stages = f"{num_middle} middle stages" if given else f"{num_middle} stages"
            return f"{stages} cannot share {total - given}{f' of {total}' if given else ''} layers{extra} equally"
        left = "1 stage is" if num_middle == 1 else f"{max(num_middle, 0) or 'no'} stages are"
        return f"the given stages have {given} layers, but the model has {total}{extra}, and {left} left"


def stages(subject: Subject) -> tuple[Stage, ...]:
    """Return the stages in the order in which a token passes them: all pipeline ranks for each virtual rank.

    Raises ConfigError if the layers cannot be split this way, or a flag is not supported.
    """
    shape, megatron = layout_of(subject.config), subject.config.megatron
    if megatron.get("pipeline_model_parallel_layout") is not None:
        raise ConfigError(
            "--pipeline-model-parallel-layout is not supported; use --decoder-first-pipeline-num-layers "
            "and --decoder-last-pipeline-num-layers"
        )
    embedding, loss = (bool(megatron.get(name)) for name in ACCOUNTING)
    first, last = shape.num_layers_first_stage, shape.num_layers_last_stage
    if (embedding or loss) and (first, last) != (None, None):
        raise ConfigError(
            "--account-for-embedding-in-pipeline-split and --account-for-loss-in-pipeline-split cannot be combined with "
            "--decoder-first-pipeline-num-layers and --decoder-last-pipeline-num-layers; remove either pair"
        )
    cut = Cut(subject.architecture.num_layers, embedding, loss, shape.pp, shape.vpp, first, last)
    counts = cut.counts() if shape.pp > 1 else [cut.num_layers + cut.num_extra]
    if counts is None:
        problem = f"{cut.shown()}: {cut.why_uneven()}; choose stages that add up to {cut.num_layers} layers"
        raise ConfigError(f"--pipeline-model-parallel-size {shape.pp}{problem}")
    if uneven := [(rank, num_layers) for rank, num_layers in enumerate(counts) if num_layers % shape.vpp]:
        rank, num_layers = uneven[0]
        problem = f"does not divide the {count(num_layers, 'layer')} of pipeline rank {rank}; choose a divisor of {num_layers}"
        raise ConfigError(f"--virtual-pipeline-model-parallel-size {shape.vpp} {problem}")
    chunks = cut.chunks(counts)
    starts = list(accumulate(chunks, initial=0))
    return tuple(
        Stage(
            pipeline_rank=number % shape.pp,
            virtual_rank=number // shape.pp,
            first_layer=first,
            num_layers=num_layers,
            index_layers=tuple(layer.number for layer in subject.architecture.layers[first : first + num_layers] if layer.computes_index),
            has_embedding=number == 0,
            has_head=number == len(chunks) - 1,
        )
        for number, (first, num_layers) in enumerate(zip(starts, chunks))
    )


def stage_layers(architecture: Architecture, stage: Stage) -> tuple[Layer, ...]:
    """Return the layers of a stage, without MTP layers."""
    return architecture.layers[stage.first_layer : stage.first_layer + stage.num_layers]


MAX_GPUS = 32768
"""Limit of a plan; every GPU is placed and drawn, and more than this takes minutes and is most likely a typo."""
EMBEDDED_RANK = EngineRank(group=0, engine=0, rank=0, tp=0, pp=0, dp=0, ep=0)
EMBEDDED_GROUP = EngineGroup("default", "regular", num_engines=1, num_gpus_per_engine=1, tp=1, pp=1, dp=1, ep=1, num_gpus=1)
"""Embedded engine: one process on the trainer's first GPU."""


def make_layout(subject: Subject) -> ClusterLayout:
    """Return the cluster with every trainer and engine rank in its place.

    Trainer ranks fill `--actor-num-gpus-per-node` GPUs of each of the first `--actor-num-nodes` nodes. With `--colocate` (and always
    for the embedded engine) engines take the same GPUs in the same order, then the free ones; without it the free ones, node by node.
    Raises ConfigError if sizes do not divide, an engine group cannot be split into engines, or there are more than `MAX_GPUS`.
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
        engine_groups=(EMBEDDED_GROUP,) if embedded else tuple(map(EngineGroup.of, specs)),
        **{name: getattr(shape, name) for name in ("tp", "cp", "pp", "ep", "etp", "dp")},
    )


def trainer_ranks(shape: Layout) -> tuple[TrainerRank, ...]:
    """Return the coordinates of every rank, in the order of the ranks.

    Megatron-Core's order is tp-cp-ep-dp-pp, the first varying fastest (`parallel_state.RankGenerator`). Experts have a separate grid
    over the same ranks, etp-ep-dp-pp, with the same pipeline ranks.
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

    As in SGLang, an engine's GPUs are split into pipeline stages, and the tensor-parallel ranks of a stage into attention replicas
    (`layers/dp_attention.py`) and, separately, into expert-parallel ranks. Each part consists of consecutive ranks.
    """
    engine = 0
    for group, spec in enumerate(specs):
        if spec.worker_type == "placeholder":
            yield from [None] * spec.num_gpus
            continue
        tp_size, dp_size, ep_size = spec.tp_size, spec.dp_size, spec.ep_size
        gpus, per_engine, pp_size = spec.num_gpus, spec.num_gpus_per_engine, spec.arguments.value("pp_size")
        for whole, size, problem in (
            (gpus, per_engine, f"its number of GPUs ({gpus}) is not a multiple of --rollout-num-gpus-per-engine {per_engine}"),
            (per_engine, pp_size, f"--sglang-pp-size {pp_size} does not divide --rollout-num-gpus-per-engine {per_engine}"),
            (tp_size, dp_size, f"--sglang-dp-size {dp_size} does not divide an engine's {count(tp_size, 'tensor-parallel GPU')}"),
            (tp_size, ep_size, f"--sglang-ep-size {ep_size} does not divide an engine's {count(tp_size, 'tensor-parallel GPU')}"),
        ):
            if size < 1 or whole % size:
                raise ConfigError(f"engine group {group + 1} ({spec.worker_type}): {problem}; change one")
        for _ in range(spec.num_engines):
            for rank in range(per_engine):
                pp, tp = divmod(rank, tp_size)
                yield EngineRank(group, engine, rank, tp=tp, pp=pp, dp=tp * dp_size // tp_size, ep=tp * ep_size // tp_size)
            engine += 1
