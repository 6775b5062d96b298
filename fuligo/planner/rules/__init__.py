"""What must hold of a run, given its model and GPUs. Each rule is a pure function with an id; docs/rules.md lists them."""

from __future__ import annotations

from fuligo.planner.rules.rule import PlannerRule

RULES: tuple[PlannerRule, ...] = ()
"""Every rule, in the order in which they are reported."""
