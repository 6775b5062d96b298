"""Flags: how a group declares one, and its description for command line, file and help."""

import difflib
import functools
import re
from collections.abc import Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from fuligo.config.secret import is_secret_option

PREFIXES = {"sglang": "sglang_", "router": "router_"}
"""Group -> prefix of its flags on the command line; a config file has no prefixes."""
_WORD = re.compile(r"[a-z0-9]+")


class FlagGroup(BaseModel):
    """Base class of the groups: frozen; field names are flag names; rejects unknown keys, NaN and infinity."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)


def flag(default: Any, doc: str, *, unit: str | None = None, source: str | None = None, path: bool = False, **constraints: Any) -> Any:
    """Declare a flag.

    Args:
        default: value if the flag is not given.
        doc: one line for `--help`.
        unit: `tokens`, `s`, `bytes`, `samples`, ...
        source: project whose name and meaning the flag keeps, if not fuligo's own.
        path: True for a path (or a list of paths); in a YAML file, `./` and `../` are relative to the file.
        constraints: pydantic's `gt`, `ge`, `lt`, `le`, `min_length`, ...
    """
    return Field(default, description=doc, json_schema_extra={"unit": unit, "source": source, "path": path}, **constraints)


slime = functools.partial(flag, source="slime")
"""Declare a flag with slime's name and meaning."""
megatron = functools.partial(flag, source="megatron")
"""Declare a flag with Megatron's name and meaning."""


class Kind(StrEnum):
    """Type of a flag's value, in words."""

    BOOL = "true or false"
    INT = "an integer"
    SIZE = "an integer, such as 4096, 4k or 4Ki"
    FLOAT = "a number"
    TEXT = "text"
    CHOICE = "a choice"
    TEXT_LIST = "a list"
    INT_LIST = "a list of integers"
    FLOAT_LIST = "a list of numbers"
    JSON = "a JSON object"
    JSON_LIST = "a JSON list"
    LAYERS = "an integer, or one per layer such as [0]*3+[1]*45"
    TOPOLOGY = "a YAML file of engine groups"

    @property
    def is_list(self) -> bool:
        return self in (Kind.TEXT_LIST, Kind.INT_LIST, Kind.FLOAT_LIST)

    @property
    def is_json(self) -> bool:
        return self in (Kind.JSON, Kind.JSON_LIST)


@dataclass(frozen=True, slots=True)
class Flag:
    """Field of a typed group, or argument of a backend's schema."""

    name: str
    """Name of the field: the key in a config file."""
    group: str
    """Name of the group: the section of a config file."""
    kind: Kind
    choices: tuple[str, ...]
    optional: bool
    """True if None is a value."""
    bounds: str
    """Bounds of the value as text, such as `>= 1`; empty if it has none."""
    default: Any
    doc: str
    unit: str | None
    """Unit of the value; None for a value without one."""
    source: str | None = None
    """Project whose name and meaning the flag keeps; None for fuligo's own."""
    is_path: bool = False
    """True for a path or a list of paths."""

    @property
    def flat_name(self) -> str:
        """Name that is unique across groups: `sglang_dp_size`."""
        return PREFIXES.get(self.group, "") + self.name

    @property
    def option(self) -> str:
        """Flag as typed on the command line."""
        return option_name(self.flat_name)

    @property
    def is_secret(self) -> bool:
        """True if its value is never shown."""
        return is_secret_option(self.flat_name)

    @property
    def rule(self) -> str:
        """Rule for values, in words: `an integer >= 1`, `one of auto, cpu, cuda`."""
        many = "a list of " if self.kind.is_list else ""
        allowed = f"{many}one of {', '.join(self.choices)}" if self.choices else f"{self.kind} {self.bounds}".strip()
        return f"{allowed} or none" if self.optional and self.kind is not Kind.TEXT else allowed


@functools.lru_cache(maxsize=4096)
def option_name(name: str) -> str:
    """Return `--rollout-batch-size` for `rollout_batch_size`."""
    return "--" + name.replace("_", "-")


def nearest(name: str, candidates: Iterable[str]) -> list[str]:
    """Return up to three candidates that `name` may have meant, the closest first.

    Unless the names are nearly equal, every word of `name` must resemble a word of the candidate, since names that only share letters
    mislead: `offload` is not `load`.
    """
    return [near for near in difflib.get_close_matches(name, list(candidates), n=10, cutoff=0.6) if _resembles(name, near)][:3]


def _resembles(name: str, candidate: str) -> bool:
    """Return whether `name` may be `candidate` with a mistyped letter or word, or with words left out."""
    words, typed = _WORD.findall(candidate.lower()), _WORD.findall(name.lower())
    wanted, given = "".join(words), "".join(typed)
    similarity = difflib.SequenceMatcher(None, given, wanted).ratio()
    num_wrong = (1 - similarity) * (len(given) + len(wanted))
    if abs(len(words) - len(typed)) <= 1 and (num_wrong < 2.5 or similarity >= 0.85):
        return True
    return all(difflib.get_close_matches(word, words, n=1, cutoff=0.75) for word in typed)


def did_you_mean(names: Iterable[str]) -> str:
    """Return `; did you mean a or b?`, or an empty string without names."""
    shown = " or ".join(names)
    return f"; did you mean {shown}?" if shown else ""
