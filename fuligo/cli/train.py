"""`fuligo train`: a training job."""

from __future__ import annotations

import os
from collections.abc import Sequence

from fuligo.cli.not_yet import refuse
from fuligo.config import Config
from fuligo.config.command_line import parse
from fuligo.config.findings import Finding
from fuligo.config.help import asked_for_help, help_text
from fuligo.config.validate import findings, require_no_errors
from fuligo.errors import ConfigError


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
    config = parsed.config
    warnings = [*parsed.warnings, *require_no_errors(planned(config), config)]
    refuse(config)

    # Imported late: help and wrong flags should not wait for these imports.
    from fuligo.cli.console import show_warning
    from fuligo.cli.preflight import preflight
    from fuligo.cli.slips import slips

    for warning in warnings:
        show_warning(warning)
    preflight(config)
    for warning in slips(config):
        show_warning(warning)

    os.environ.update(config.cluster.env.reveal())
    from fuligo.job import run_job

    return run_job(config)


def planned(config: Config) -> tuple[Finding, ...]:
    """Return the findings of the rules of `fuligo plan`.

    If the planner does not know the model, which the torch trainer may still train, only the rules about flags apply.
    """
    from fuligo.planner.check import check
    from fuligo.planner.gpus import GPUS
    from fuligo.planner.subject import read_subject

    try:
        subject = read_subject(config, next(iter(GPUS)))
    except ConfigError:
        return findings(config)
    # Rules that depend on the GPU only warn; memory is an estimate of `fuligo plan`.
    return check(subject)
