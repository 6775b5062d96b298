"""What the arguments of SGLang, of its router and of Megatron-Core are, so that checking them needs none of these packages.

`scripts/generate_schemas.py` writes the JSON files beside this one from the installed packages; docs/passthrough.md tells how.
"""

from __future__ import annotations

import functools
import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fuligo.config.flag import Flag, Kind

BACKENDS = {"sglang": "SGLang", "router": "sglang-router", "megatron": "Megatron-Core"}
"""Group of pass-through flags -> whose arguments they are."""


@dataclass(frozen=True, slots=True)
class Alias:
    """Another way to give an argument."""

    name: str
    """The argument that it stands for."""
    value: Any = None
    """What the alias means by itself, where it is a switch for one value; else None."""
    is_deprecated: bool = False


@dataclass(frozen=True, slots=True)
class Schema:
    """The arguments of one version of one package."""

    group: str
    package: str
    version: str
    flags: dict[str, Flag]
    aliases: dict[str, Alias]
    hints: dict[str, str]
    """Names that are no arguments (any more), and what to give instead."""
    options: dict[str, str]
    """Arguments whose command line option is not `--` and the name with dashes."""
    has_negation: frozenset[str]
    """Switches with a `--no-` form in the package's own parser."""

    @property
    def backend(self) -> str:
        """`SGLang`."""
        return BACKENDS[self.group]

    def canonical(self, name: str) -> str:
        """The argument that a name stands for: itself where it is no alias."""
        return self.aliases[name].name if name in self.aliases else name


@functools.cache
def schema(group: str) -> Schema:
    """The schema of `sglang`, `router` or `megatron`; read once."""
    content = json.loads((Path(__file__).parent / f"{group}.json").read_text(encoding="utf-8"))
    return Schema(
        group=group,
        package=content["package"],
        version=content["version"],
        flags={name: _flag(group, name, facts) for name, facts in content["arguments"].items()},
        aliases={alias: Alias(**facts) for alias, facts in content["aliases"].items()},
        hints=content["hints"],
        options={name: facts["option"] for name, facts in content["arguments"].items() if "option" in facts},
        has_negation=frozenset(name for name, facts in content["arguments"].items() if facts.get("negation")),
    )


def _flag(group: str, name: str, facts: dict[str, Any]) -> Flag:
    return Flag(
        name=name,
        group=group,
        kind=Kind[facts["kind"].upper()],
        choices=tuple(facts.get("choices", ())),
        optional=False,
        bounds=facts.get("bounds", ""),
        default=facts.get("default"),
        doc=facts.get("doc", ""),
        unit=facts.get("unit"),
    )
