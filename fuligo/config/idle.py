"""Flags of a config file that the command line leaves without an effect."""

from fuligo.config import Config
from fuligo.config.assignments import Given, build_config, file_places
from fuligo.config.changes import apply_changes
from fuligo.config.rules import effects
from fuligo.errors import ConfigError


def without_idle(config: Config, file: Given, line: Given) -> tuple[Config, list[str]]:
    """Unset flags of the file that lost their effect to the command line (`kl_loss_coef` to `--no-use-kl-loss`), with a warning per rule.

    Flags that have no effect in the file by itself stay: they are mistakes, which the run reports.
    """
    places = file_places(file, line)
    if not places or not line.assignments:
        return config, []
    try:
        alone = build_config(file.assignments)
    except ConfigError:  # the command line corrects a value of the file
        return config, []
    idle_alone = {option for rule in effects.RULES for violation in rule.check(alone) for option in violation.flags}
    warnings: list[str] = []
    for rule in effects.RULES:
        for violation in rule.check(config):
            if all(option in places and option not in idle_alone for option in violation.flags):
                config = apply_changes(config, violation.fix)
                warnings.append(f"left out: {violation.text} ({'; '.join(places[option] for option in violation.flags)})")
    return config, warnings
