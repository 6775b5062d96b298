"""Which flags a config changes. A config knows values, not who gave them: a flag counts as given where its value is not its default."""

from __future__ import annotations

from collections.abc import Iterable

from fuligo.config import Config
from fuligo.config.flag import PREFIXES, option_name
from fuligo.config.flags import flags


def given_options(config: Config, names: Iterable[str], pass_through: Iterable[str] = ()) -> list[str]:
    """The options of the flags among `names` whose value is not the default, and of all arguments in these pass-through groups."""
    ours = [flags()[name].option for name in names if value_of(config, name) != flags()[name].default]
    return [*ours, *(option_name(PREFIXES.get(group, "") + name) for group in pass_through for name in getattr(config, group))]


def value_of(config: Config, name: str) -> object:
    """The value of a typed flag of ours."""
    return getattr(getattr(config, flags()[name].group), name)
