"""Interface between a weight sync and the trainer."""

from typing import Protocol

from fuligo.formats.weight_manifest import WeightManifest, WeightTarget
from fuligo.types import FloatArray, TrainSample


class WeightSource(Protocol):
    """Part of `trainer.protocol.Trainer` that a weight sync uses."""

    @property
    def num_updates(self) -> int:
        """Number of `train` calls that have begun, each of which changes the weights."""
        ...

    async def send_weights(self, target: WeightTarget) -> WeightManifest:
        """Send the weights under Hugging Face names; return the manifest. Raises EngineError if an engine did not load them; try again."""
        ...

    async def logprobs(self, samples: list[TrainSample]) -> list[FloatArray]:
        """Return log-probabilities [R] of each sample's response tokens under the current policy, at the rollouts' temperature."""
        ...
