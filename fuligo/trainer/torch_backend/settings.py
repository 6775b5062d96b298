"""Settings of the torch trainer."""

from dataclasses import dataclass

from fuligo.trainer.mtp import MTPTraining
from fuligo.trainer.ranks.settings import TrainerSettings


@dataclass(slots=True, frozen=True)
class TorchTrainerSettings(TrainerSettings):
    gradient_checkpointing: bool = False
    torch_compile: bool = False
    exact_on_policy: bool = False
    """True to compute policy and reference with `models.batch_invariant`, as the engine does."""
    engine_tp_size: int = 1
    """Number of tensor-parallel GPUs of an engine, whose rounding exact log-probabilities reproduce."""
    takes_images: bool = True
    """True if prompts may have images. False: a vision tower is neither run nor trained, but saved and sent with the rest of the model."""
    has_mtp: bool = False
    """True to load the policy's MTP layer, and save and send it with the rest of the model. False: checkpoints keep its tensors
    unchanged."""
    mtp: MTPTraining | None = None
    """Training of the MTP layer; None: the layer is frozen."""
    max_step_tokens: int | None = None
    """Largest number of tokens that the samples of an optimizer step can have on one rank, which bounds a row; None: unknown."""

    @property
    def compiles_dense_layers(self) -> bool:
        """True if layers without experts are compiled: on CUDA in bf16, where a single attention kernel supports packed sequences."""
        return self.torch_compile and self.device == "cuda" and self.precision == "bf16"

    @property
    def measures_precision_noise(self) -> bool:
        return self.precision == "bf16" and not self.exact_on_policy and self.loss.loss_type != "sft_loss"

    @property
    def needs_process_group(self) -> bool:
        """True on several ranks, on CUDA, and in bf16, because FSDP2 (which casts to bf16) needs a process group even for one rank."""
        return self.num_ranks > 1 or self.device == "cuda" or self.precision == "bf16"
