"""Settings of slime, TRL and verl that fuligo names differently or lacks, each with what to use instead."""

import functools
from pathlib import Path

import yaml

from fuligo.config.flags import flags, passthrough_flags
from fuligo.config.schemas import schema

GROUPS_OF_VERL = frozenset({"actor_rollout_ref", "critic", "custom_reward_function", "global_profiler", "reward_model", "trainer"})
"""Groups of verl's config files that fuligo's do not have."""


@functools.cache
def other_settings() -> dict[str, dict[str, str]]:
    """Return the advice in `other_frameworks.yaml`: section -> name -> advice. The file is read at the first call."""
    sections = yaml.safe_load(Path(__file__).with_suffix(".yaml").read_text(encoding="utf-8"))
    return {section: {name: advice for names, advice in table.items() for name in names.split()} for section, table in sections.items()}


@functools.cache
def moved() -> dict[str, str]:
    """Return setting -> what to use instead, for settings of slime, TRL and verl (those without dots) and for names that people guess."""
    tables = other_settings()
    flat = {name: advice for name, advice in tables["verl"].items() if "." not in name}
    return tables["slime"] | flat | tables["trl"] | tables["guessed"]


def elsewhere(name: str) -> str:
    """Return `; use --lr` for `learning_rate` or verl's `actor_rollout_ref.actor.optim.lr`; an empty string if the name is unknown."""
    name = name.lstrip("+").replace("-", "_")
    advice = _of_verl(name.split(".")) if "." in name else moved().get(name)
    return f"; {advice}" if advice is not None else ""


def value_elsewhere(name: str, value: object) -> str:
    """Return `; use --calculate-per-token-loss` for another framework's value of a flag, such as TRL's `dapo` of `loss_type`; else ''."""
    advice = other_settings()["values"].get(f"{name.replace('-', '_')}={value}")
    return f"; {advice}" if advice is not None else ""


def _of_verl(parts: list[str]) -> str:
    """Return the advice for the longest known suffix of a dotted name, for its innermost section, or for a flag of the same name."""
    settings, sections = other_settings()["verl"], other_settings()["sections_of_verl"]
    for first, part in enumerate(parts):
        ending = ".".join(parts[first:])
        if ending in settings:
            return settings[ending]
        if part in sections:
            return sections[next(section for section in reversed(parts) if section in sections)]
    ours = flags().get(parts[-1]) or passthrough_flags("megatron").get(parts[-1])
    if ours is not None and ours.name != "name":  # verl's `name` in a section names a class, not the run
        return f"use {ours.option}"
    return schema("megatron").hints.get(parts[-1]) or "docs/coming-from.md translates the settings of other frameworks"
