"""Sizes of the trainer's parallel dimensions, derived from the flags."""

from dataclasses import dataclass

from fuligo.config import Config
from fuligo.errors import ConfigError


@dataclass(frozen=True, slots=True)
class TrainerShape:
    """Sizes of the trainer's parallel dimensions; with the torch backend, which shards over all ranks, only `dp` exceeds 1."""

    is_megatron: bool
    num_ranks: int
    tp: int
    cp: int
    pp: int
    vpp: int
    """Virtual pipeline stages per pipeline rank; 1 without interleaving."""
    dp: int
    ep: int
    etp: int
    expert_dp: int
    """Number of ranks that hold the same experts."""
    sequence_parallel: bool

    @property
    def shards_dense_optimizer(self) -> int:
        """Ranks that share the distributed optimizer's state of non-expert weights (DP x CP)."""
        return self.dp * self.cp

    @property
    def shards_sequence(self) -> int:
        """Ranks that share the activations between attention and MLP: TP with sequence parallelism, else 1."""
        return self.tp if self.sequence_parallel else 1


def trainer_shape(config: Config) -> TrainerShape:
    """Return the sizes that the flags give.

    Raises:
        ConfigError: the sizes do not divide the trainer's number of GPUs.
    """
    num_ranks = config.num_train_gpus
    if config.resolved_train_backend != "megatron":
        return TrainerShape(False, num_ranks, 1, 1, 1, 1, dp=num_ranks, ep=1, etp=1, expert_dp=1, sequence_parallel=False)
    flags = config.parallel
    tp, cp, pp = flags.tensor_model_parallel_size, flags.context_parallel_size, flags.pipeline_model_parallel_size
    ep, etp = flags.expert_model_parallel_size, flags.expert_tensor_parallel_size or tp
    _must_divide(num_ranks, {"--tensor-model-parallel-size": tp, "--context-parallel-size": cp, "--pipeline-model-parallel-size": pp})
    _must_divide(
        num_ranks, {"--expert-tensor-parallel-size": etp, "--expert-model-parallel-size": ep, "--pipeline-model-parallel-size": pp}
    )
    return TrainerShape(
        is_megatron=True,
        num_ranks=num_ranks,
        tp=tp,
        cp=cp,
        pp=pp,
        vpp=flags.virtual_pipeline_model_parallel_size or 1,
        dp=num_ranks // (tp * cp * pp),
        ep=ep,
        etp=etp,
        expert_dp=num_ranks // (etp * ep * pp),
        sequence_parallel=flags.sequence_parallel and tp > 1,
    )


def _must_divide(num_ranks: int, sizes: dict[str, int]) -> None:
    product = 1
    for size in sizes.values():
        product *= size
    if num_ranks % product:
        named = " x ".join(f"{flag} {size}" for flag, size in sizes.items())
        raise ConfigError(f"{named} = {product} does not divide the trainer's {num_ranks} GPUs")
