"""Table at the end of a quickstart: responses of the policy before and after training."""

from collections.abc import Sequence
from dataclasses import dataclass

from rich import box
from rich.table import Table
from rich.text import Text


@dataclass(slots=True, frozen=True)
class Answer:
    """A response and whether it is right."""

    text: str
    right: bool


@dataclass(slots=True, frozen=True)
class BeforeAfter:
    """A held-out prompt with the responses before and after training."""

    prompt: str
    label: str
    before: Answer
    after: Answer


def before_after_table(rows: Sequence[BeforeAfter]) -> Table:
    """Return the table. Right answers are green with a check mark, wrong ones red with a cross, to be readable without colours."""
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, header_style="bold")
    table.add_column("prompt", overflow="fold", ratio=3)
    table.add_column("before", overflow="fold", ratio=2)
    table.add_column("after", overflow="fold", ratio=2)
    table.add_column("label", overflow="fold", justify="right")
    for row in rows:
        table.add_row(Text(_one_line(row.prompt)), _answer(row.before), _answer(row.after), Text(row.label))
    return table


def _answer(answer: Answer) -> Text:
    mark, style = ("✓", "green") if answer.right else ("✗", "red")
    return Text(f"{mark} {_one_line(answer.text) or '(nothing)'}", style=style)


def _one_line(text: str) -> str:
    return " ".join(text.split())
