"""Settings of the torch trainer."""

from dataclasses import dataclass

from fuligo.trainer.ranks.settings import TrainerSettings


@dataclass(slots=True, frozen=True)
class TorchTrainerSettings(TrainerSettings):
    gradient_checkpointing: bool = False

    @property
    def needs_process_group(self) -> bool:
        """FSDP2, which casts to half precision, needs a process group even for a single rank."""
        return self.num_ranks > 1 or self.device == "cuda" or self.precision == "bf16"
