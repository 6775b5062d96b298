"""Parallel layout of the trainer, derived from the flags, and the padding of packed rows that it requires. Pure Python."""

import math
from collections.abc import Iterable
from dataclasses import dataclass

from fuligo.config import Config
from fuligo.errors import ConfigError
from fuligo.quantities import count


@dataclass(slots=True, frozen=True)
class Layout:
    """Sizes of the parallel dimensions; with the torch backend, which shards over all ranks, all sizes but `dp` are 1.

    Ranks are numbered as in Megatron: TP fastest, then CP, (EP within DP x CP,) DP, PP slowest.
    """

    tp: int = 1
    """Tensor-parallel size: ranks that share each matrix."""
    pp: int = 1
    """Pipeline-parallel size: number of stages."""
    vpp: int = 1
    """Number of virtual pipeline stages per pipeline rank."""
    cp: int = 1
    """Context-parallel size: ranks that share each sequence."""
    ep: int = 1
    """Expert-parallel size: number of rank groups over which the experts are distributed."""
    etp: int = 1
    """Expert tensor-parallel size: ranks that share each expert's matrices."""
    sequence_parallel: bool = False
    """True to split norms and residuals along the sequence over the TP group; only with tp > 1."""
    num_layers_first_stage: int | None = None
    """Number of layers of the first stage; None: as many as in a middle stage."""
    num_layers_last_stage: int | None = None
    """Number of layers of the last stage; None: as many as in a middle stage."""
    num_ranks: int = 1

    @property
    def dp(self) -> int:
        """Number of data-parallel replicas."""
        return self.num_ranks // (self.tp * self.pp * self.cp)

    @property
    def expert_dp(self) -> int:
        """Number of ranks that hold the same experts."""
        return self.num_ranks // (self.etp * self.ep * self.pp)

    @property
    def shards_dense_optimizer(self) -> int:
        """Number of ranks that shard the distributed optimizer's state of non-expert weights (DP x CP)."""
        return self.dp * self.cp

    @property
    def shards_sequence(self) -> int:
        """Number of ranks that split the activations between attention and MLP: TP with sequence parallelism, else 1."""
        return self.tp if self.sequence_parallel else 1

    @property
    def row_multiple(self) -> int:
        """Multiple to which each sequence of a packed row is padded: 2 x CP, for two equal chunks per CP rank; 1 without CP."""
        return 2 * self.cp if self.cp > 1 else 1

    def total_multiple(self, pad_multiple: int) -> int:
        """Return the multiple to which a packed row is padded: the least common multiple of `pad_multiple` and the splits over ranks."""
        return math.lcm(pad_multiple, self.row_multiple, self.cp * self.shards_sequence)

    def padded_lengths(self, lengths: Iterable[int]) -> list[int]:
        return [math.ceil(length / self.row_multiple) * self.row_multiple for length in lengths]

    def row_tokens(self, lengths: Iterable[int], pad_multiple: int) -> int:
        """Return the length of a packed row of these sequences, with all padding."""
        multiple = self.total_multiple(pad_multiple)
        return math.ceil(sum(self.padded_lengths(lengths)) / multiple) * multiple

    def replica_of(self, rank: int) -> int:
        return rank // (self.tp * self.cp) % self.dp


class IndivisibleRanksError(ConfigError):
    """Raised if parallel sizes do not divide the trainer's number of GPUs."""

    def __init__(self, sizes: str, num_ranks: int) -> None:
        super().__init__(f"{sizes} does not divide the trainer's {count(num_ranks, 'GPU')}; change a size or the number of GPUs")
        self.sizes = sizes
        """Flags with their values, and the product: `--tensor-model-parallel-size 3 x ... = 3`."""


def layout_of(config: Config) -> Layout:
    """Return the trainer's layout. Raises IndivisibleRanksError if the sizes do not divide the trainer's number of GPUs."""
    num_ranks, sizes = config.num_train_gpus, config.parallel
    tp, cp, pp = sizes.tensor_model_parallel_size, sizes.context_parallel_size, sizes.pipeline_model_parallel_size
    ep, etp = sizes.expert_model_parallel_size, sizes.expert_tensor_parallel_size or tp
    dense = {"--tensor-model-parallel-size": tp, "--context-parallel-size": cp}
    experts = {"--expert-tensor-parallel-size": etp, "--expert-model-parallel-size": ep}
    for flags in (dense, experts):
        named = flags | {"--pipeline-model-parallel-size": pp}
        product = math.prod(named.values())
        if num_ranks % product:
            shown = " x ".join(f"{flag} {size}" for flag, size in named.items())
            raise IndivisibleRanksError(f"{shown} = {product}", num_ranks)
    return Layout(
        tp=tp,
        pp=pp,
        vpp=sizes.virtual_pipeline_model_parallel_size or 1,
        cp=cp,
        ep=ep,
        etp=etp,
        sequence_parallel=sizes.sequence_parallel and tp > 1,
        num_layers_first_stage=sizes.decoder_first_pipeline_num_layers,
        num_layers_last_stage=sizes.decoder_last_pipeline_num_layers,
        num_ranks=num_ranks,
    )
