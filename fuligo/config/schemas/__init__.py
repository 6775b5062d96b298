"""Schemas of the arguments of SGLang, sglang-router and Megatron-Core, so that checking them needs none of these packages.

`scripts/generate_schemas.py` writes the JSON files next to this one from the installed packages; see docs/passthrough.md.
"""

import functools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fuligo.config.flag import Flag, Kind, did_you_mean, nearest

_CLIENT = "fuligo talks to its engines over plain HTTP"

RESERVED: dict[str, dict[str, str]] = {
    "sglang": {
        "model_path": "--hf-checkpoint sets it (for one model of several: model_path in --sglang-config)",
        "tp_size": "--rollout-num-gpus-per-engine sets it (divided by --sglang-pp-size; in --sglang-config: num_gpus_per_engine)",
        "device": "--device sets it",
        "weight_version": "fuligo sets it to the policy version, with the number of the engine",
        "disaggregation_mode": "worker_type in --sglang-config sets it",
        "config": "fuligo passes every argument itself; engine groups go into --sglang-config",
        **dict.fromkeys(
            ("host", "port", "nccl_port", "dist_init_addr", "nnodes", "node_rank", "base_gpu_id", "gpu_id_step"),
            "fuligo chooses it for every engine",
        ),
        "grpc_mode": _CLIENT,
        "use_ray": "fuligo places the engines itself",
    },
    "router": {
        "host": "fuligo chooses it",
        "port": "fuligo chooses it",
        "worker_urls": "fuligo registers its engines",
        "prefill": "fuligo registers its engines (worker_type prefill in --sglang-config)",
        "decode": "fuligo registers its engines (worker_type decode in --sglang-config)",
        "pd_disaggregation": "worker types prefill and decode in --sglang-config set it",
        "mini_lb": "fuligo runs the full router",
        "service_discovery": "fuligo registers its engines",
    },
    "megatron": {},
}
"""Group -> argument that fuligo sets itself -> advice on what sets it."""


BACKENDS = {"sglang": "SGLang", "router": "sglang-router", "megatron": "Megatron-Core"}
"""Group of pass-through flags -> name of the program that receives them."""


@dataclass(frozen=True, slots=True)
class Alias:
    """Another name of an argument."""

    name: str
    """Argument that the alias stands for."""
    value: Any = None
    """Value that the alias sets, where it is a switch for one value; else None."""
    is_deprecated: bool = False


@dataclass(frozen=True, slots=True)
class Schema:
    """Arguments of one version of one package."""

    group: str
    package: str
    version: str
    flags: dict[str, Flag]
    aliases: dict[str, Alias]
    hints: dict[str, str]
    """Names that are not arguments, or no longer are -> what to use instead."""
    options: dict[str, str]
    """Argument -> command-line option, where that is not `--` and the name with dashes."""
    has_negation: frozenset[str]
    """Switches with a `--no-` form in the package's own parser."""

    @property
    def backend(self) -> str:
        """Name of the program, such as `SGLang`."""
        return BACKENDS[self.group]

    def canonical(self, name: str) -> str:
        """Return the argument that a name stands for: itself unless it is an alias."""
        return self.aliases[name].name if name in self.aliases else name

    def refusal(self, name: str) -> str | None:
        """Return the error text, with the remedy, for an argument that fuligo sets itself or that does not exist (`hints`); else None."""
        if self.canonical(name) in RESERVED[self.group]:
            return f"cannot be given; {RESERVED[self.group][self.canonical(name)]}"
        if name in self.hints:
            return f"{self.backend} {self.version} has no such argument; {self.hints[name]}"
        return None

    def unknown(self, name: str, elsewhere: Sequence[str] = ()) -> str:
        """Return the error text for an unknown argument. `elsewhere`: suggestions that are better than similar names of this backend."""
        near = elsewhere or nearest(name, [*self.flags, *self.aliases])
        return f"unknown argument of {self.backend} {self.version}{did_you_mean(near)}"


@functools.cache
def schema(group: str) -> Schema:
    """Return the schema of `sglang`, `router` or `megatron`; each file is read once."""
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
