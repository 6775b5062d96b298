"""docs/rules.md: `python -m fuligo.planner.rules.reference > docs/rules.md`."""

from __future__ import annotations

from collections.abc import Iterator

from fuligo.config.hook_syntax import MISFIT, MISSING
from fuligo.config.validate import RULES as CONFIG_RULES
from fuligo.planner.rules import RULES

_INTRODUCTION = """\
# Rules

Made by `python -m fuligo.planner.rules.reference > docs/rules.md`; a test keeps it true.

`fuligo plan` and `fuligo train` check all of them at once, before anything starts. A finding names the rule, the flags and values of
this run, and what to do: a fix that is shown as flags was tried on the whole config, and breaks no other rule. An error stops the run, a
warning does not.
"""


def reference() -> str:
    """The page, in Markdown."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield _INTRODUCTION
    yield "## Of the model, its GPUs and its engines\n"
    yield "| rule | | flags | why |"
    yield "|---|---|---|---|"
    for rule in RULES:
        flags = " ".join(f"`{flag}`" for flag in rule.flags)
        yield f"| `{rule.id}` | {rule.severity} | {flags} | {rule.why} |"
    yield "\nEstimates add `PLAN-MEMORY-TRAINER`, `PLAN-MEMORY-ENGINE` (memory of a GPU) and `PLAN-MEMORY-HOST` (of a node);"
    yield "`PLAN-LAYOUT` stands for sizes that leave no layout.\n"
    yield "## Of flags alone\n"
    yield "| rule | why |"
    yield "|---|---|"
    for config_rule in CONFIG_RULES:
        doc = (config_rule.check.__doc__ or "").strip().splitlines()
        yield f"| `{config_rule.id}` | {doc[0] if doc else ''} |"
    yield f"\nHooks are read in `fuligo plan`, and imported in `fuligo train`: `{MISSING}` is a module that is not on this"
    yield f"machine, `{MISFIT}` a function that is not in it or cannot be called as it would be."


if __name__ == "__main__":
    print(reference(), end="")
