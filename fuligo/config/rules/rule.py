"""Parts of the rules on a config: the decorator `rule`, and changes that set or unset flags."""

from collections.abc import Iterable
from typing import Any

from fuligo.config import Config
from fuligo.config.findings import Change, Violation, rule
from fuligo.config.flags import flags

__all__ = ["Violation", "rule", "set_flag", "unset_flag", "unset_given"]


def set_flag(name: str, value: Any) -> Change:
    """Return the change that sets a typed flag."""
    return Change((flags()[name].group, name), value)


def unset_flag(name: str) -> Change:
    """Return the change that restores the default of a typed flag."""
    return set_flag(name, None)


def unset_given(config: Config, names: Iterable[str]) -> tuple[Change, ...]:
    """Return the changes that restore the defaults of those flags that have other values."""
    return tuple(unset_flag(name) for name in names if config.given_options([name]))
