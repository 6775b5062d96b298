"""Plan as JSON, for other programs and for the page; the schema is `plan.schema.json` next to this file, documented in docs/plan.md."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from fuligo.config import Config
from fuligo.config.changes import change_text
from fuligo.config.findings import Severity
from fuligo.config.secret import hide_credentials
from fuligo.planner.plan import Plan

SCHEMA_VERSION = 1
"""Incremented when a key changes its meaning or is removed, not when one is added."""


def plan_document(plan: Plan, config: Config, notes: Sequence[str] = ()) -> dict[str, Any]:
    """Return the document that `--json` writes: plain values only, numbers in the units that their keys name.

    `notes` are the warnings of the command-line parser.
    """
    document = {
        "schema_version": SCHEMA_VERSION,
        "name": plan.name,
        "valid": not any(finding.severity is Severity.ERROR for finding in plan.findings),
        "gpu": plan.gpu,
        "model": {
            "model_type": plan.model_type,
            "num_parameters": plan.num_parameters,
            "num_active_parameters": plan.num_active_parameters,
            "num_mtp_parameters": plan.num_mtp_parameters,
            "num_adapter_parameters": plan.num_adapter_parameters,
        },
        "choices": [
            {"flags": [change_text(change, config) for change in choice.changes], "reason": choice.reason} for choice in plan.choices
        ],
        "findings": [{**asdict(finding), "fix": [change_text(change, config) for change in finding.fix]} for finding in plan.findings],
        "notes": notes,
        "layout": None if plan.layout is None else asdict(plan.layout),
        "memory": [
            {**asdict(bar), "used_bytes": bar.used_bytes, "free_bytes": bar.capacity_bytes - bar.used_bytes, "fits": bar.fits}
            for bar in plan.memory
        ],
        "engine_capacities": [asdict(capacity) for capacity in plan.capacities],
        "step": {"duration_s": plan.step_s, "phases": [asdict(phase) for phase in plan.phases]},
        "disk": None if plan.disk is None else {**asdict(plan.disk), "used_bytes": plan.disk.used_bytes},
        "suggestions": [asdict(suggestion) for suggestion in plan.suggestions],
        "assumptions": plan.assumptions,
        "settings": _settings(config),
    }
    # Tuples become lists, so that the document equals the parsed file; plans are shared, so that URLs lose their passwords.
    return json.loads(hide_credentials(json.dumps(document)))


def _settings(config: Config) -> list[dict[str, Any]]:
    """Return every value of the config by group, and whether it is the default."""
    defaults = Config().model_dump(mode="json")
    values_by_group = config.model_dump(mode="json")
    return [
        {"group": group, "name": name, "value": value, "is_default": name in defaults[group] and defaults[group][name] == value}
        for group, values in values_by_group.items()
        for name, value in values.items()
    ]
