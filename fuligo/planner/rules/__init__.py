"""Rules about a run, its model and its GPUs. Each rule is a pure function with an id; docs/rules.md lists them."""

from __future__ import annotations

from fuligo.planner.rules import (
    deepep,
    engine_sizes,
    kernels,
    lengths,
    model,
    parallel,
    pipeline,
    server_memory,
    speculative,
    topology,
    trainer_experts,
    trainer_options,
)
from fuligo.planner.rules.rule import PlannerRule

RULES: tuple[PlannerRule, ...] = (
    *model.RULES,
    *parallel.RULES,
    *pipeline.RULES,
    *trainer_experts.RULES,
    *trainer_options.RULES,
    *topology.RULES,
    *engine_sizes.RULES,
    *deepep.RULES,
    *speculative.RULES,
    *kernels.RULES,
    *server_memory.RULES,
    *lengths.RULES,
)
"""All rules, in the order of the report."""
