"""Source of the weights that are synchronized with the engines."""

from typing import Protocol

from fuligo.formats.weight_manifest import WeightManifest, WeightTarget
from fuligo.types import FloatArray, TrainSample


class WeightSource(Protocol):
    """Trainer as the weight sync sees it; `trainer.protocol.Trainer` is one."""

    @property
    def num_updates(self) -> int:
        """Number of calls of `train` that have begun; the weights change with each."""
        ...

    async def send_weights(self, target: WeightTarget) -> WeightManifest:
        """Send the current weights, in Hugging Face names, to `target`; return what was sent.

        Raises:
            EngineError: an engine did not take them; they can be sent again.
        """
        ...

    async def logprobs(self, samples: list[TrainSample]) -> list[FloatArray]:
        """Return [R] log-probabilities of each sample's response tokens under the current policy, at the rollouts' temperature."""
        ...
