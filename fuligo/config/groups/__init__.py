"""Groups of typed flags: the sections of a config file."""

from fuligo.config.flag import FlagGroup
from fuligo.config.groups.run import CheckpointFlags, ClusterFlags, DebugFlags, EngineFlags, ModelFlags, ObservabilityFlags, WeightSyncFlags
from fuligo.config.groups.sampling import DataFlags, EvalFlags, RewardFlags, RolloutFlags
from fuligo.config.groups.training import AlgorithmFlags, LoraFlags, OptimizerFlags, ParallelFlags, TrainFlags


class TypedFlags(FlagGroup):
    """All typed flags under their groups, in the order of `--help`."""

    cluster: ClusterFlags = ClusterFlags()
    model: ModelFlags = ModelFlags()
    checkpoint: CheckpointFlags = CheckpointFlags()
    data: DataFlags = DataFlags()
    rollout: RolloutFlags = RolloutFlags()
    reward: RewardFlags = RewardFlags()
    eval: EvalFlags = EvalFlags()
    algorithm: AlgorithmFlags = AlgorithmFlags()
    train: TrainFlags = TrainFlags()
    lora: LoraFlags = LoraFlags()
    parallel: ParallelFlags = ParallelFlags()
    optimizer: OptimizerFlags = OptimizerFlags()
    engine: EngineFlags = EngineFlags()
    weight_sync: WeightSyncFlags = WeightSyncFlags()
    observability: ObservabilityFlags = ObservabilityFlags()
    debug: DebugFlags = DebugFlags()


GROUPS: dict[str, type[FlagGroup]] = {name: type(field.default) for name, field in TypedFlags.model_fields.items()}
"""Section of a config file -> its flags."""


def group_doc(group: str) -> str:
    """Return the first line of a group's docstring, which the help shows."""
    return (GROUPS[group].__doc__ or "").strip().splitlines()[0]
