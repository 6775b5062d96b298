"""Settings of the torch trainer."""

from dataclasses import dataclass

from fuligo.trainer.mtp import MTPTraining
from fuligo.trainer.ranks.settings import TrainerSettings


@dataclass(slots=True, frozen=True)
class TorchTrainerSettings(TrainerSettings):
    gradient_checkpointing: bool = False
    torch_compile: bool = False
    exact_on_policy: bool = False
    """Policy and reference compute by `models.batch_invariant`, as the engine does."""
    engine_tp_size: int = 1
    """Tensor-parallel GPUs of an engine: exact log-probabilities repeat its roundings."""
    takes_images: bool = True
    """Prompts may have images; False: a vision tower is neither run nor trained, only saved and sent with the rest of the model."""
    has_mtp: bool = False
    """The policy's MTP layer is loaded, saved and sent with the rest of the model; otherwise checkpoints keep its tensors as they were."""
    mtp: MTPTraining | None = None
    """Training of the MTP layer; None: it stays frozen."""

    @property
    def compiles_dense_layers(self) -> bool:
        """True if layers without experts are compiled: on CUDA in bf16, where one attention kernel takes packed sequences."""
        return self.torch_compile and self.device == "cuda" and self.precision == "bf16"

    @property
    def needs_process_group(self) -> bool:
        """FSDP2, which casts to half precision, needs a process group even for a single rank."""
        return self.num_ranks > 1 or self.device == "cuda" or self.precision == "bf16"
