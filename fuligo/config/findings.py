"""What a rule found in a config, and the change that mends it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Generic, TypeVar

S = TypeVar("S")
"""What a rule looks at."""


class Severity(StrEnum):
    """How bad it is."""

    ERROR = "error"
    """The run would fail or be wrong: nothing is started."""
    WARNING = "warning"
    """Allowed, and probably not meant."""


@dataclass(frozen=True, slots=True)
class Change:
    """One value of a Config that is to become another."""

    path: tuple[str | int, ...]
    """Into the Config: `("parallel", "tensor_model_parallel_size")`, `("sglang", "dp_size")`,
    `("engine", "sglang_config", 0, "server_groups", 1, "num_gpus")`."""
    value: Any
    """None unsets."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A broken rule, with the numbers of this run."""

    id: str
    """Stable name of the rule: `PLAN-DSA-STAGE-START`."""
    severity: Severity
    text: str
    """The flags and values, the rule, in one or two sentences; names at least one flag."""
    flags: tuple[str, ...]
    """The options that the text is about, as typed: `--tensor-model-parallel-size`."""
    fix: tuple[Change, ...] = ()
    """Changes which together mend it; shown only where the changed config is free of this finding and of new ones."""
    advice: str = ""
    """What to do, in words, where no change of flags mends it."""


@dataclass(frozen=True, slots=True)
class Rule(Generic[S]):
    """A named check of one subject: pure, touches nothing outside."""

    id: str
    check: Callable[[S], Iterator[Finding]]
