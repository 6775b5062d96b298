"""Groups of ranks that share weights."""

from dataclasses import dataclass

from megatron.core import parallel_state
from torch.distributed import ProcessGroup


@dataclass(slots=True, frozen=True)
class RankGroups:
    tensor: ProcessGroup
    """Ranks that share the matrices."""
    expert_tensor: ProcessGroup
    """Ranks that share each expert's matrices."""
    expert: ProcessGroup
    """Ranks that have other experts."""
    experts: ProcessGroup
    """Ranks that together have all experts, numbered by their place in `expert_tensor` first, then by that in `expert`."""
    pipeline: ProcessGroup
    """Ranks that have other stages."""


def rank_groups() -> RankGroups:
    """Return the groups of this rank."""
    return RankGroups(
        tensor=_group(parallel_state.get_tensor_model_parallel_group()),
        expert_tensor=_group(parallel_state.get_expert_tensor_parallel_group()),
        expert=_group(parallel_state.get_expert_model_parallel_group()),
        experts=_group(parallel_state.get_expert_tensor_and_model_parallel_group()),
        pipeline=_group(parallel_state.get_pipeline_model_parallel_group()),
    )


def _group(group: object) -> ProcessGroup:
    assert isinstance(group, ProcessGroup)
    return group
