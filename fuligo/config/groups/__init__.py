"""The groups of flags, one concern a file. Read a file to know a topic; `Config` joins them."""

from __future__ import annotations

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

__all__ = [
    "AlgorithmFlags",
    "CheckpointFlags",
    "ClusterFlags",
    "DataFlags",
    "DebugFlags",
    "EngineFlags",
    "EvalFlags",
    "ModelFlags",
    "ObservabilityFlags",
    "OptimizerFlags",
    "ParallelFlags",
    "RewardFlags",
    "RolloutFlags",
    "TrainFlags",
    "WeightSyncFlags",
]
