"""`fuligo doctor`: a check of this machine, and of what a job needs of it."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from fuligo.cli.chosen import checked
from fuligo.config.command_line import parse
from fuligo.config.validate import require_no_errors, with_places
from fuligo.machine.facts import read_machine
from fuligo.machine.findings import Finding, machine_findings
from fuligo.machine.needs import needs
from fuligo.models.hub import located

USAGE = """\
fuligo doctor [--config FILE] [--flag VALUE ...]

Checks this machine: Python, packages, GPUs, memory, writable directories. With the arguments of fuligo train, it also checks what that
run needs. It starts nothing. Exit code: 0 if the run can work, 1 if something is missing, 2 after bad arguments.
"""


def main(arguments: Sequence[str]) -> int:
    """Print the report; return 0 if a run can work, 1 if something is missing."""
    if any(argument in ("-h", "--help") for argument in arguments):
        print(USAGE, end="")
        return 0
    config = None
    if arguments:
        parsed = parse(arguments)
        found = checked(located(parsed.config))
        require_no_errors(with_places(found.findings, parsed.places), found.config)
        config = found.config
    machine = read_machine()
    sections = {"This machine": machine_findings(machine)}
    if config is not None:
        sections["Requirements of the run"] = needs(config, machine)
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
