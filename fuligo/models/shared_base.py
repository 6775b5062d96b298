"""Base weights shared by several models, each with its own adapter."""

from torch import nn

from fuligo.errors import CheckpointError
from fuligo.formats.adapter_config import is_adapter_name, stored_name


class SharedBase:
    """Frozen base weights held in memory once, for models that differ only in their adapters."""

    def __init__(self) -> None:
        self._weights: dict[str, nn.Parameter] = {}
        """Parameters of the first model, by their names without an adapter; a tied parameter under each of its names."""
        self._digest: str | None = None

    def give_to(self, model: nn.Module, *, digest: str | None = None) -> None:
        """Replace the base weights of a model by those of the first model given; the first model keeps its own.

        `digest` of the base weights is passed for all models or for none, whose names alone are then compared. Raises CheckpointError if
        they differ.
        """
        parameters = dict(model.named_parameters(remove_duplicate=False))
        own = {stored_name(name): name for name in parameters if not is_adapter_name(stored_name(name))}
        if not self._weights:
            self._weights = {stored: parameters[name] for stored, name in own.items()}
            self._digest = digest
            return
        if digest != self._digest or own.keys() != self._weights.keys():
            raise CheckpointError(
                "cannot share base weights: this run's differ from the first run's; give all runs the same --hf-checkpoint"
            )
        for stored, name in own.items():
            module, _, attribute = name.rpartition(".")
            setattr(model.get_submodule(module), attribute, self._weights[stored])

    def parameters(self) -> set[nn.Parameter]:
        """Return the shared parameters, each once."""
        return set(self._weights.values())
