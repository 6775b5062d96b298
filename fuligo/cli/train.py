"""`fuligo train`: a training job."""

from collections.abc import Callable, Iterable, Mapping, Sequence

from fuligo.cli.chosen import checked, trainer_choice
from fuligo.cli.environment import apply_environment
from fuligo.cli.megatron_arguments import require_read_arguments
from fuligo.config import Config
from fuligo.config.command_line import Parsed, parse
from fuligo.config.files import yaml_text
from fuligo.config.help import asked_for_help, help_text
from fuligo.config.validate import require_no_errors, with_places
from fuligo.errors import ConfigError
from fuligo.limits import collector_paused
from fuligo.models.hub import located, with_weights

PRINT_CONFIG = "--print-config"
"""Option that prints the final config in the format of `--config` files and starts nothing."""


def main(arguments: Sequence[str]) -> int:
    """Check everything that can be checked without a model, then run."""
    if (topic := asked_for_help(arguments)) is not None:
        print(help_text(topic), end="")
        return 0
    parsed = parse([argument for argument in arguments if argument != PRINT_CONFIG])
    if PRINT_CONFIG in arguments:
        _print_config(parsed)
        return 0
    with collector_paused():
        config = prepare(parsed.config, parsed.warnings, parsed.places)
    from fuligo.job import run_job

    return run_job(config)


def _print_config(parsed: Parsed) -> None:
    """Print the final config on stdout, and on stderr what the command line replaces and what is chosen."""
    from fuligo.cli.console import show_choice, show_warning

    found = checked(located(parsed.config))
    for warning in parsed.warnings:
        show_warning(warning)
    for choice in (*trainer_choice(found.config), *found.choices):
        show_choice(choice)
    print(yaml_text(found.config), end="")


def prepare(
    config: Config,
    warnings: Sequence[str] = (),
    places: Mapping[str, str] | None = None,
    *,
    sharing: Sequence[Config] = (),
    shown: set[str] | None = None,
) -> Config:
    """Check a config and everything that it names on disk, show warnings and choices, and return the config to run.

    Also set the variables of `--env` in this process.

    Args:
        warnings: shown first.
        places: file and line of the flags that the config file sets, as in `Parsed`.
        sharing: other runs that use the same engines.
        shown: warnings and choices that were shown for other runs, which are not repeated; those of this run are added.
    """
    found = checked(located(config), sharing)
    config = found.config
    try:
        warnings = [*warnings, *require_no_errors(with_places(found.findings, places or {}), config)]
        require_read_arguments(config)
    except ConfigError:
        # The trainer may be the cause: --bf16 needs GPUs for engines, because it is a flag of Megatron.
        from fuligo.cli.console import show_choice

        for choice in trainer_choice(config):
            show_choice(choice)
        raise

    # Imported late: help and wrong flags should not wait for these imports.
    from fuligo.cli.console import show_choice, show_warning
    from fuligo.cli.preflight import likely_mistakes, preflight

    known = set[str]() if shown is None else shown

    def show(texts: Iterable[str], one: Callable[[str], None]) -> None:
        for text in texts:
            if text not in known:
                known.add(text)
                one(text)

    show((*warnings, *found.warnings), show_warning)
    show((*trainer_choice(config), *found.choices), show_choice)
    config = with_weights(config)
    apply_environment(config)
    preflight(config)
    show(likely_mistakes(config), show_warning)
    return config
