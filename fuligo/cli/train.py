"""`fuligo train`: the job."""

from __future__ import annotations

import os
from collections.abc import Sequence

from fuligo.cli.not_yet import refuse
from fuligo.config import Config
from fuligo.config.findings import Finding
from fuligo.config.help import asked_for_help, help_text
from fuligo.config.parse import parse
from fuligo.config.validate import findings, require_no_errors
from fuligo.errors import ConfigError


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
    warnings = [*parsed.warnings, *require_no_errors(planned(config), config)]
    refuse(config)

    # Imports cost time: what help and wrong flags do not need comes only now.
    from fuligo.cli.console import show_warning
    from fuligo.cli.preflight import preflight
    from fuligo.cli.slips import slips

    for warning in warnings:
        show_warning(warning)
    preflight(config)
    for warning in slips(config):
        show_warning(warning)

    os.environ.update(config.cluster.env)
    from fuligo.job import run_job

    return run_job(config)


def planned(config: Config) -> tuple[Finding, ...]:
    """What `fuligo plan` finds by its rules.

    Where the shape of the model is not known, those of the flags alone: the torch trainer takes models that the planner does not know.
    """
    from fuligo.planner.check import check
    from fuligo.planner.gpus import GPUS
    from fuligo.planner.subject import read_subject

    try:
        subject = read_subject(config, next(iter(GPUS)))
    except ConfigError:
        return findings(config)
    # Rules that depend on the GPU only warn; whether the run fits its memory is an estimate of `fuligo plan`.
    return check(subject)
