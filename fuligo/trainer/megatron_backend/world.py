"""Megatron's process groups and random states, for a layout of ranks."""

import math

from megatron.core import parallel_state, tensor_parallel

from fuligo.errors import ConfigError
from fuligo.layout.megatron import Layout
from fuligo.trainer.megatron_backend.cpu import run_on_cpu
from fuligo.trainer.ranks.world import World


def join_megatron(layout: Layout, world: World, seed: int, *, timeout_s: float = 1800.0) -> None:
    """Form the groups of the parallel dimensions, inside the default process group. A collective.

    Args:
        seed: seed of Megatron's random states; weights that are not read from a checkpoint depend only on it and on the rank's place.
        timeout_s: deadline of every operation of a group, rounded up to minutes.

    Raises:
        ConfigError: the ranks cannot be arranged in this layout.
    """
    assert layout.num_ranks == world.size
    if world.device.type == "cpu":
        run_on_cpu()
    try:
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=layout.tp,
            pipeline_model_parallel_size=layout.pp,
            virtual_pipeline_model_parallel_size=layout.vpp if layout.vpp > 1 else None,
            context_parallel_size=layout.cp,
            expert_model_parallel_size=layout.ep,
            expert_tensor_parallel_size=layout.etp,
            distributed_timeout_minutes=math.ceil(timeout_s / 60),
            create_gloo_process_groups=False,
        )
    except (RuntimeError, AssertionError) as error:
        raise ConfigError(f"{layout.num_ranks} trainer ranks cannot be arranged as {layout}: {error}") from error
    tensor_parallel.model_parallel_cuda_manual_seed(seed, force_reset_rng=True)


def leave_megatron() -> None:
    """Release the groups, so that the process can use another layout; call it before the default process group ends."""
    parallel_state.destroy_model_parallel()
