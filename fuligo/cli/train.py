"""`fuligo train`: the job."""

from __future__ import annotations

import os
from collections.abc import Sequence

from fuligo.cli.not_yet import refuse
from fuligo.config.help import asked_for_help, help_text
from fuligo.config.parse import parse
from fuligo.config.validate import validate


def main(arguments: Sequence[str]) -> int:
    """Check everything that can be checked without a model, then run.

    Raises:
        FuligoError: bad input (exit code 2) or a failure at run time (1); the caller shows it.
    """
    topic = asked_for_help(arguments)
    if topic is not None:
        print(help_text(topic), end="")
        return 0
    parsed = parse(arguments)
    config = parsed.config
    warnings = [*parsed.warnings, *validate(config)]
    refuse(config)

    # Imports cost time: what help and wrong flags do not need comes only now.
    from fuligo.cli.console import show_warning
    from fuligo.cli.preflight import preflight

    for warning in warnings:
        show_warning(warning)
    preflight(config)

    os.environ.update(config.cluster.env)
    from fuligo.job import run_job

    return run_job(config)
