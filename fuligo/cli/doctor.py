"""`fuligo doctor`: what this machine has, and whether the run that the arguments describe can work here."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fuligo.config.parse import parse
from fuligo.config.validate import validate
from fuligo.machine.facts import read_machine
from fuligo.machine.findings import Finding, machine_findings
from fuligo.machine.needs import needs

USAGE = """\
fuligo doctor [--config FILE] [--flag VALUE ...]

What this machine has: Python, packages, GPUs, memory, places to write to. With the arguments of fuligo train also what that run needs
of it, and what is missing. Starts nothing. Exit code 0 where the run can work, 1 where something is in its way, 2 after bad arguments.
"""


def main(arguments: Sequence[str]) -> int:
    """Print the report; 0 where a run can work, 1 where something is in its way.

    Raises:
        ConfigError: the arguments are none of `fuligo train`, or do not go together.
    """
    if any(argument in ("-h", "--help") for argument in arguments):
        print(USAGE, end="")
        return 0
    config = parse(arguments).config if arguments else None
    if config is not None:
        validate(config)
    machine = read_machine()
    sections = {"This machine": machine_findings(machine)}
    if config is not None:
        sections["What the run needs of it"] = needs(config, machine)
    console = Console()
    for title, findings in sections.items():
        console.print(Text(title, "bold"))
        console.print(_table(findings))
    return 1 if any(finding.problem for findings in sections.values() for finding in findings) else 0


def _table(findings: Sequence[Finding]) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    for finding in findings:
        mark, remark = Text("ok", "green"), None
        if finding.problem is not None:
            mark, remark = Text("!!", "bold red"), finding.problem
        elif finding.warning is not None:
            mark, remark = Text("?", "yellow"), finding.warning
        table.add_row(mark, Text(finding.name, "bold"), Text(finding.value if remark is None else f"{finding.value}: {remark}"))
    return table
