"""`fuligo train`: a training job."""

from collections.abc import Iterator, Sequence

from fuligo.cli.chosen import checked
from fuligo.cli.environment import apply_environment
from fuligo.cli.not_yet import refuse
from fuligo.config import Config
from fuligo.config.command_line import parse
from fuligo.config.config import MEGATRON_FLAGS
from fuligo.config.files import yaml_text
from fuligo.config.help import asked_for_help, help_text
from fuligo.config.validate import require_no_errors
from fuligo.limits import collector_paused
from fuligo.models.hub import located, with_weights

PRINT_CONFIG = "--print-config"
"""Option that prints the final config, as `--config` reads it, and starts nothing."""


def main(arguments: Sequence[str]) -> int:
    """Check everything that can be checked without a model, then run.

    Raises:
        FuligoError: bad input (exit code 2) or a failure at run time (1); the caller prints it.
    """
    topic = asked_for_help(arguments)
    if topic is not None:
        print(help_text(topic), end="")
        return 0
    parsed = parse([argument for argument in arguments if argument != PRINT_CONFIG])
    if PRINT_CONFIG in arguments:
        print(yaml_text(checked(located(parsed.config)).config), end="")
        return 0
    with collector_paused():
        config = prepare(parsed.config, parsed.warnings)
    from fuligo.job import run_job

    return run_job(config)


def prepare(config: Config, warnings: Sequence[str] = ()) -> Config:
    """Check a config and everything that it names on disk, show warnings and choices, and return the config to run.

    Raises:
        ConfigError: the run cannot start; names all problems found.
    """
    found = checked(located(config))
    config = found.config
    warnings = [*warnings, *require_no_errors(found.findings, config)]
    refuse(config)

    # Imported late: help and wrong flags should not wait for these imports.
    from fuligo.cli.console import show_choice, show_warning
    from fuligo.cli.preflight import preflight
    from fuligo.cli.slips import slips

    for warning in warnings:
        show_warning(warning)
    for choice in (*trainer_choice(config), *found.choices):
        show_choice(choice)
    config = with_weights(config)
    apply_environment(config)
    preflight(config)
    for warning in slips(config):
        show_warning(warning)
    return config


def trainer_choice(config: Config) -> Iterator[str]:
    """Yield a line that names the flags by which a run got the Megatron trainer without asking for it."""
    if config.cluster.train_backend != "auto" or config.resolved_train_backend != "megatron":
        return
    given = config.given_options(MEGATRON_FLAGS, ["megatron"])
    torch = " (for the torch trainer use --precision bf16)" if "--bf16" in given else ""
    shown = ", ".join(given[:5]) + (f" and {len(given) - 5} more" if len(given) > 5 else "")
    yield f"--train-backend megatron: {shown} {'is a flag' if len(given) == 1 else 'are flags'} of the Megatron trainer{torch}"
