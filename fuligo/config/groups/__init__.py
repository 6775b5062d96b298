"""Groups of typed flags, one file per concern. `Config` joins them."""

from __future__ import annotations

from fuligo.config.group import FlagGroup
from fuligo.config.groups.algorithm import AlgorithmFlags
from fuligo.config.groups.checkpoint import CheckpointFlags
from fuligo.config.groups.cluster import ClusterFlags
from fuligo.config.groups.data import DataFlags
from fuligo.config.groups.debug import DebugFlags
from fuligo.config.groups.engine import EngineFlags
from fuligo.config.groups.eval import EvalFlags
from fuligo.config.groups.model import ModelFlags
from fuligo.config.groups.observability import ObservabilityFlags
from fuligo.config.groups.optimizer import OptimizerFlags
from fuligo.config.groups.parallel import ParallelFlags
from fuligo.config.groups.reward import RewardFlags
from fuligo.config.groups.rollout import RolloutFlags
from fuligo.config.groups.train import TrainFlags
from fuligo.config.groups.weight_sync import WeightSyncFlags

GROUPS: dict[str, type[FlagGroup]] = {
    "cluster": ClusterFlags,
    "model": ModelFlags,
    "checkpoint": CheckpointFlags,
    "data": DataFlags,
    "rollout": RolloutFlags,
    "reward": RewardFlags,
    "eval": EvalFlags,
    "algorithm": AlgorithmFlags,
    "train": TrainFlags,
    "parallel": ParallelFlags,
    "optimizer": OptimizerFlags,
    "engine": EngineFlags,
    "weight_sync": WeightSyncFlags,
    "observability": ObservabilityFlags,
    "debug": DebugFlags,
}
"""Section of a config file -> its flags, in the order of `--help`."""
