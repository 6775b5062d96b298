"""Rules about a run, its model and its GPUs. Each rule is a pure function with an id; docs/rules.md lists them."""

from fuligo.config.findings import rules_of
from fuligo.planner.rules import (
    adapter,
    deepep,
    engine_sizes,
    kernels,
    lengths,
    model,
    parallel,
    pipeline,
    server_memory,
    server_speed,
    speculative,
    topology,
    trainer_experts,
    trainer_options,
)

_MODULES = (
    *(model, adapter, parallel, pipeline, trainer_experts, trainer_options),
    *(topology, engine_sizes, deepep, speculative, kernels, server_memory, server_speed, lengths),
)
RULES = rules_of(_MODULES)
"""All rules, in the order of the report: module by module, each in the order of its definitions."""
