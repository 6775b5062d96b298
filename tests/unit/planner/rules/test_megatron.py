"""The rules reject what Megatron-Core's own config rejects, and nothing else: against recorded verdicts."""

import json
from dataclasses import asdict
from pathlib import Path

import pytest

from fuligo.config.findings import Severity
from fuligo.planner.check import violations
from tests.unit.planner.rules.megatron_cases import Case, cases
from tests.unit.planner.rules.recipe_runs import DENSE, MIXTURE, Run

pytestmark = pytest.mark.long

VERDICTS: list[bool] = json.loads((Path(__file__).parent / "megatron_verdicts.json").read_text(encoding="utf-8"))
"""Verdict of Megatron-Core 0.16.1 on each case: True if rejected."""
REFUSED_LATER = {"PLAN-PP-LAYERS", "PLAN-VPP-LAYERS"}
"""Rules that Megatron's launcher checks, not its config."""


def _flags(case: Case) -> str:
    """Return the config on as many nodes as the sizes need to divide the GPUs."""
    words = []
    for name, value in asdict(case).items():
        option = name.replace("_", "-")
        if isinstance(value, bool):
            switches_off = name in ("sequence_parallel", "moe_grouped_gemm")
            words += [] if name == "is_mixture" else [f"--{option}"] if value else [f"--no-{option}"] if switches_off else []
        elif isinstance(value, tuple):
            words += [f"--{option}", *value] if value else []
        else:
            words += [f"--{option}", "none" if value is None else str(value)]
    nodes = case.tensor_model_parallel_size * case.pipeline_model_parallel_size * case.expert_model_parallel_size
    return " ".join([*words, f"--context-parallel-size 1 --actor-num-nodes {nodes} --rollout-batch-size 4096"])


# All parts draw from the same sizes.
@pytest.mark.parametrize("part", [0, 1, *(pytest.param(part, marks=pytest.mark.slow) for part in (2, 3))])
def test_the_rules_refuse_what_megatron_refuses(part: int) -> None:
    for case, is_refused in list(zip(cases(), VERDICTS, strict=True))[part::4]:
        subject = Run(MIXTURE if case.is_mixture else DENSE, _flags(case)).subject()
        errors = {finding.id for finding in violations(subject) if finding.severity is Severity.ERROR}
        even = case.decoder_first_pipeline_num_layers is None and case.decoder_last_pipeline_num_layers is None
        assert bool(errors - (REFUSED_LATER if even and not is_refused else set())) == is_refused, (case, errors)


def test_both_verdicts_were_recorded() -> None:
    assert min(VERDICTS.count(True), VERDICTS.count(False)) > 80
