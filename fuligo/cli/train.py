"""`fuligo train`: a training job."""

from __future__ import annotations

import os
from collections.abc import Sequence

from fuligo.cli.chosen import checked
from fuligo.cli.not_yet import refuse
from fuligo.config.command_line import parse
from fuligo.config.help import asked_for_help, help_text
from fuligo.config.validate import require_no_errors


def main(arguments: Sequence[str]) -> int:
    """Check everything that can be checked without a model, then run.

    Raises:
        FuligoError: bad input (exit code 2) or a failure at run time (1); the caller prints it.
    """
    topic = asked_for_help(arguments)
    if topic is not None:
        print(help_text(topic), end="")
        return 0
    parsed = parse(arguments)
    found = checked(parsed.config)
    config = found.config
    warnings = [*parsed.warnings, *require_no_errors(found.findings, config)]
    refuse(config)

    # Imported late: help and wrong flags should not wait for these imports.
    from fuligo.cli.console import show_choice, show_warning
    from fuligo.cli.preflight import preflight
    from fuligo.cli.slips import slips

    for warning in warnings:
        show_warning(warning)
    for choice in found.choices:
        show_choice(choice)
    preflight(config)
    for warning in slips(config):
        show_warning(warning)

    os.environ.update(config.cluster.env.reveal())
    from fuligo.job import run_job

    return run_job(config)
