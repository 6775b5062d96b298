"""Selection of the parameters to train, by regular expressions. Pure Python."""

import re
from collections.abc import Iterable, Mapping, Sequence
from itertools import chain

from fuligo.errors import ConfigError
from fuligo.trainer.ranks.settings import TrainedParameters


def trained_names(names: Mapping[str, Sequence[str]], trained: TrainedParameters) -> set[str]:
    """Return the names of the parameters to train.

    Args:
        names: for each parameter of the model, the names that the regexes may match.

    Raises:
        ConfigError: both lists are given, a regex matches nothing or is malformed, or nothing is left to train.
    """
    if trained.only and trained.frozen:
        raise ConfigError("--only-train-params-name-list and --freeze-params-name-list exclude each other; give one of them")
    if not (trained.only or trained.frozen):
        return set(names)
    flag = "--only-train-params-name-list" if trained.only else "--freeze-params-name-list"
    every = set(chain.from_iterable(names.values()))
    matching = {name for pattern in trained.only or trained.frozen for name in _matching(pattern, every, flag)}
    found = {name for name, aliases in names.items() if not matching.isdisjoint(aliases)}
    chosen = found if trained.only else set(names) - found
    if not chosen:
        raise ConfigError(f"{flag} leaves no parameter to train")
    return chosen


def _matching(pattern: str, names: Iterable[str], flag: str) -> list[str]:
    try:
        matching = [name for name in names if re.search(pattern, name)]
    except re.error as error:
        raise ConfigError(f"{flag}: {pattern!r} is not a regular expression: {error}") from error
    if not matching:
        examples = ", ".join(sorted(names)[:3])
        raise ConfigError(f"{flag}: {pattern!r} matches no parameter of the model; its parameters are named {examples}, ...")
    return matching
