"""Typed access to a model's config.json; every error names its key. Imports neither numpy nor torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

from fuligo.errors import ConfigError

T = TypeVar("T")
MAX_LAYERS = 10**4
"""Limit of num_hidden_layers, because an object is built for each layer."""
MAX_COUNT = 10**9
MAX_NUMBER = 1e30


@dataclass(frozen=True, slots=True)
class ConfigJson:
    """Keys of a config.json, or of the language model's part of a multimodal one.

    An absent or null key has the family's default, if there is one.
    """

    values: Mapping[str, Any]
    source: str = "config.json"
    """Path of the file, for errors."""

    @classmethod
    def of(cls, values: Mapping[str, Any], source: str = "config.json") -> ConfigJson:
        """Wrap the language model's part of a config.json: `text_config`, or all of it without that key."""
        text = values.get("text_config")
        if not isinstance(text, Mapping):
            return cls(values, source)
        return cls({"tie_word_embeddings": values.get("tie_word_embeddings"), **text}, source)

    def part(self, key: str) -> ConfigJson | None:
        """Return the nested config under `key`, such as a vision tower's; None if there is none."""
        value = self.values.get(key)
        return ConfigJson(value, f"{self.source}, {key}") if isinstance(value, Mapping) else None

    def count(self, key: str, default: int | None = None) -> int:
        """Return a positive integer. Raises ConfigError if it is malformed or absurdly large, or absent without a default."""
        value = self.values.get(key)
        if value is None:
            if default is None:
                raise ConfigError(
                    f"{self.source} has no {key}, which a {self.model_type} model needs; use the config.json of a published model"
                )
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise ConfigError(f"{self.source}: {key} is {value!r:.80}; it must be a positive integer")
        most = MAX_LAYERS if key.endswith("layers") else MAX_COUNT
        if value > most:
            raise ConfigError(f"{self.source}: {key} is {value!r:.80}; it must be an integer from 1 to {most:,}")
        return value

    def index(self, key: str, default: int) -> int:
        """Return a non-negative integer, or the default if the key is absent or null. Raises ConfigError if it is malformed."""
        return 0 if self.values.get(key) == 0 and self.values[key] is not False else self.count(key, default)

    def number(self, key: str, default: float) -> float:
        """Return a finite number, or the default if the key is absent or null. Raises ConfigError if it is malformed."""
        value = self.values.get(key)
        return default if value is None else self._checked_number(key, value)

    def switch(self, key: str, default: bool) -> bool:
        """Return a boolean, or the default if the key is absent or null. Raises ConfigError if it is malformed."""
        return self._given(key, default, bool, "true or false")

    def text(self, key: str, default: str) -> str:
        """Return a string, or the default if the key is absent or null. Raises ConfigError if it is malformed."""
        return self._given(key, default, str, "a string")

    def _given(self, key: str, default: T, kind: type[T], must_be: str) -> T:
        value = self.values.get(key)
        if value is not None and not isinstance(value, kind):
            raise ConfigError(f"{self.source}: {key} is {value!r}; it must be {must_be}")
        return default if value is None else value

    def per_layer(self, key: str, words: tuple[str, ...]) -> tuple[str, ...] | None:
        """Return one of `words` per layer, or None if the key is absent or null. Raises ConfigError if it is malformed."""
        value = self.values.get(key)
        if value is None:
            return None
        num_layers = self.count("num_hidden_layers")
        if not isinstance(value, list) or len(value) != num_layers or any(word not in words for word in value):
            raise ConfigError(f"{self.source}: {key} must be a list of {num_layers} strings (num_hidden_layers), each {' or '.join(words)}")
        return tuple(value)

    def indices(self, key: str) -> tuple[int, ...]:
        """Return non-negative integers; none if the key is absent or null. Raises ConfigError if it is malformed."""
        value = self.values.get(key)
        if value is None:
            return ()
        if not isinstance(value, list) or any(isinstance(item, bool) or not isinstance(item, int) or item < 0 for item in value):
            raise ConfigError(f"{self.source}: {key} is {value!r}; it must be a list of non-negative integers")
        return tuple(value)

    def rotary_number(self, key: str) -> float | None:
        """Return a number in the rotary settings, or None if it is absent. Raises ConfigError if it is malformed."""
        value = self._rotary(key)
        return None if value is None else self._checked_number(key, value)

    @property
    def rotary_kind(self) -> str:
        """Scaling of the rotary frequencies: `default` (none), `yarn`, `llama3`, ..."""
        return str(self._rotary("rope_type") or self._rotary("type") or "default")

    def _rotary(self, key: str) -> Any:
        """Return a value of `rope_parameters` (transformers 5; those of full attention), `rope_scaling`, or the top level."""
        for given in (self.values.get("rope_parameters"), self.values.get("rope_scaling")):
            group = given.get("full_attention", given) if isinstance(given, Mapping) else None
            if isinstance(group, Mapping) and group.get(key) is not None:
                return group[key]
        return self.values.get(key)

    def _checked_number(self, key: str, value: object) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float) or not -MAX_NUMBER < value < MAX_NUMBER:  # also false for NaN
            raise ConfigError(f"{self.source}: {key} is {value!r:.80}; it must be a number between -{MAX_NUMBER:g} and {MAX_NUMBER:g}")
        return value

    def contradiction(self, text: str) -> ConfigError:
        """Return an error about keys that contradict each other, or values that are not supported."""
        return ConfigError(f"{self.source}: {text}")

    @property
    def model_type(self) -> str:
        """Type of the model. Raises ConfigError if the key is missing."""
        value = self.values.get("model_type")
        if not isinstance(value, str):
            raise ConfigError(f"{self.source} has no model_type; use the config.json of a Hugging Face model")
        return value
