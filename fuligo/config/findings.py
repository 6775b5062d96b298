"""Findings of rules, and the changes of a config that resolve them."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, Generic, TypeVar

S = TypeVar("S")
"""Type of a rule's subject."""


class Severity(StrEnum):
    """Severity of a finding."""

    ERROR = "error"
    """The run would fail or give wrong results; it does not start."""
    WARNING = "warning"
    """The setting is allowed but probably not intended."""


@dataclass(frozen=True, slots=True)
class Change:
    """New value for one entry of a Config."""

    path: tuple[str | int, ...]
    """Path into the Config: `("parallel", "tensor_model_parallel_size")`, `("sglang", "dp_size")`,
    `("engine", "sglang_config", 0, "server_groups", 1, "num_gpus")`."""
    value: Any
    """New value; None unsets the entry."""


@dataclass(frozen=True, slots=True)
class Finding:
    """Violated rule, with the numbers of this run."""

    id: str
    """Stable name of the rule, such as `PLAN-DSA-STAGE-START`."""
    severity: Severity
    text: str
    """Flags, values and rule in one or two sentences; names at least one flag."""
    flags: tuple[str, ...]
    """Options that the text is about, as typed: `--tensor-model-parallel-size`."""
    fix: tuple[Change, ...] = ()
    """Changes that resolve the finding together; shown only if the changed config has neither this finding nor a new one."""
    advice: str = ""
    """Remedy in words, where no change of flags resolves the finding."""


@dataclass(frozen=True, slots=True)
class Rule(Generic[S]):
    """Check with a stable id, a pure function of its subject (a config or a plan)."""

    id: str
    check: Callable[[S], Iterator[Finding]]
