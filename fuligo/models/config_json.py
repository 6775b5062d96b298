"""Reading of a model's config.json: every value is checked for its type, and every error names its key. Pure Python."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import isfinite
from typing import Any

from fuligo.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ConfigJson:
    """The keys of one config.json; of a multi-modal model those of its language model.

    A key that is absent or null has the family's default, where there is one.
    """

    values: Mapping[str, Any]
    source: str = "config.json"
    """Where it was read, for errors."""

    @classmethod
    def of(cls, values: Mapping[str, Any], source: str = "config.json") -> ConfigJson:
        """The language model's part of `values`."""
        text = values.get("text_config")
        return cls(text if isinstance(text, Mapping) else values, source)

    def count(self, key: str, default: int | None = None) -> int:
        """A positive whole number."""
        value = self.values.get(key)
        if value is None:
            if default is None:
                raise ConfigError(f"{self.source} has no {key}, which a {self.model_type} model needs")
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"{self.source}: {key} is {value!r}; it must be a positive whole number")
        return value

    def optional_count(self, key: str) -> int | None:
        """A positive whole number, or None where the key is absent or null."""
        return None if self.values.get(key) is None else self.count(key)

    def index(self, key: str, default: int) -> int:
        """A whole number from 0."""
        return 0 if self.values.get(key) == 0 and self.values[key] is not False else self.count(key, default)

    def number(self, key: str, default: float) -> float:
        """Any number."""
        value = self.values.get(key)
        if value is None:
            return default
        return self._checked_number(key, value)

    def switch(self, key: str, default: bool) -> bool:
        """True or false."""
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise ConfigError(f"{self.source}: {key} is {value!r}; it must be true or false")
        return value

    def text(self, key: str, default: str) -> str:
        """A string."""
        value = self.values.get(key)
        if value is None:
            return default
        if not isinstance(value, str):
            raise ConfigError(f"{self.source}: {key} is {value!r}; it must be a string")
        return value

    def per_layer(self, key: str, words: tuple[str, ...]) -> tuple[str, ...] | None:
        """One of `words` for each layer, or None where the key is absent or null."""
        value = self.values.get(key)
        if value is None:
            return None
        num_layers = self.count("num_hidden_layers")
        if not isinstance(value, list) or len(value) != num_layers or any(word not in words for word in value):
            raise ConfigError(f"{self.source}: {key} must be a list of {num_layers} words (num_hidden_layers) of {' | '.join(words)}")
        return tuple(value)

    def indices(self, key: str) -> tuple[int, ...]:
        """A list of whole numbers from 0; empty where the key is absent or null."""
        value = self.values.get(key)
        if value is None:
            return ()
        if not isinstance(value, list) or any(isinstance(item, bool) or not isinstance(item, int) or item < 0 for item in value):
            raise ConfigError(f"{self.source}: {key} is {value!r}; it must be a list of whole numbers from 0")
        return tuple(value)

    def rotary_number(self, key: str) -> float | None:
        """A number among the rotary settings; None where it is nowhere."""
        value = self._rotary(key)
        return None if value is None else self._checked_number(key, value)

    @property
    def rotary_kind(self) -> str:
        """How the rotary frequencies are scaled: `default` for not at all, `yarn`, `llama3`, ..."""
        return str(self._rotary("rope_type") or self._rotary("type") or "default")

    def _rotary(self, key: str) -> Any:
        """Of `rope_parameters` (transformers 5), of `rope_scaling`, or of the top level."""
        for group in (self.values.get("rope_parameters"), self.values.get("rope_scaling")):
            if isinstance(group, Mapping) and group.get(key) is not None:
                return group[key]
        return self.values.get(key)

    def _checked_number(self, key: str, value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value):
            raise ConfigError(f"{self.source}: {key} is {value!r}; it must be a number")
        return value

    def contradiction(self, text: str) -> ConfigError:
        """An error about two keys that do not go together."""
        return ConfigError(f"{self.source}: {text}")

    @property
    def model_type(self) -> str:
        value = self.values.get("model_type")
        if not isinstance(value, str):
            raise ConfigError(f"{self.source} has no model_type; it must describe a Hugging Face model")
        return value

    @property
    def is_quantised(self) -> bool:
        """The checkpoint stores the weights in fewer bits than they were trained in."""
        return self.values.get("quantization_config") is not None
