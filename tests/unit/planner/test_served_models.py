"""Models that engines serve beside the policy, such as a teacher: memory, time, and notes about unknown ones."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from fuligo.config.command_line import parse
from fuligo.config.findings import Finding
from fuligo.planner.estimate import Estimate, estimate
from fuligo.planner.gpus import MIB, gpu
from fuligo.planner.make_plan import make_plan
from fuligo.planner.memory.parameters import COLLECTIVE_BYTES, CUDA_CONTEXT_BYTES
from fuligo.planner.plan import MemoryBar, Phase, Plan
from fuligo.planner.rollout_time import teacher_phase
from fuligo.planner.roofline import assumptions
from fuligo.planner.speeds import PREFILL
from fuligo.planner.subject import Subject, read_subject
from fuligo.planner.training_time import rollout_forward_flops
from tests.unit.planner.subjects import DATA, EXAMPLES, GLM4_9B_PARALLEL, facts

TEACHER = EXAMPLES / "glm4-9b" / "model"
STUDENT = f"--model-config-file {EXAMPLES / 'qwen3-4b' / 'model'} --use-opd {GLM4_9B_PARALLEL} --sglang-mem-fraction-static 0.7"
SEPARATE = f"{STUDENT} --actor-num-gpus-per-node 4 --rollout-num-gpus 4"
COLOCATED = f"{STUDENT} --actor-num-gpus-per-node 4 --colocate"

GLM4_9B_RANK = 2 * (
    40 * ((2 * 4096 * 4096 + 2 * 256 * 4096 + 4096 + 2 * 256 + 3 * 4096 * 13696) // 2 + 4 * 4096)  # with biases of queries, keys, values
    + 4096
    + 2 * 151552 * 4096 // 2
)
"""Bytes of the weights on one of two GPUs: norms replicated, all else split."""


def served(tmp_path: Path, flags: str = SEPARATE, model: Path | str = TEACHER, overrides: str = "{}", name: str = "teacher") -> list[str]:
    """Return the arguments of a run with two GPUs for the policy and two for another model."""
    file = tmp_path / "engines.yaml"
    file.write_text(
        "sglang:\n  - {server_groups: [{num_gpus: 2}]}\n"
        f"  - {{name: {name}, model_path: {model}, update_weights: false, server_groups: [{{num_gpus: 2, overrides: {overrides}}}]}}\n"
    )
    return [*DATA.split(), *flags.split(), "--sglang-config", str(file)]


def subject_with(*arguments: str) -> Subject:
    return read_subject(parse(arguments).config, "h100-80")


def plan_of(*arguments: str) -> Plan:
    return make_plan(parse(arguments).config, "h100-80", "a plan")


def bar(found: Estimate | Plan, owner: str) -> MemoryBar:
    [bar] = [bar for bar in found.memory if bar.owner == owner]
    return bar


def sizes(found: Estimate | Plan, owner: str) -> dict[str, int]:
    return {item.name: item.num_bytes for item in bar(found, owner).items}


def phase(found: Estimate, name: str) -> Phase:
    [phase] = [phase for phase in found.phases if phase.name == name]
    return phase


def memory_error(plan: Plan) -> Finding:
    [error] = [finding for finding in plan.findings if finding.id == "PLAN-MEMORY-ENGINE"]
    return error


def test_a_served_teacher_has_a_bar_and_a_cache_of_its_own_shape(tmp_path: Path) -> None:
    found = estimate(subject_with(*served(tmp_path)))
    static = round(0.7 * (gpu("h100-80").memory_bytes - CUDA_CONTEXT_BYTES - COLLECTIVE_BYTES))
    a_token = 2 * 1 * 128 * 2 * 40  # keys and values of one of two heads, bf16, 40 layers
    tokens = (static - GLM4_9B_RANK) // a_token
    held = sizes(found, "engines: teacher regular")
    assert (held["weights"], held["kv_cache"]) == (GLM4_9B_RANK, tokens * a_token)
    assert [(capacity.group, capacity.kv_cache_tokens) for capacity in found.capacities][1:] == [(1, tokens)]
    assert bar(found, "engines: teacher regular").num_gpus == 2
    policy = sizes(found, "engines: regular")
    assert policy["weights"] == pytest.approx(facts("qwen3-4b").num_parameters, rel=1e-3), "bf16 over two GPUs"


@pytest.mark.parametrize(
    ("environment", "overrides", "logits"),
    [
        ({}, "{}", 2 * 4 * 8192),  # fp32 logits and a copy, of a prefill chunk
        ({}, "{chunked_prefill_size: 2048}", 2 * 4 * 2048),
        ({"SGLANG_ENABLE_LOGITS_PROCESSER_CHUNK": "1"}, "{}", 3 * 4 * 2048),
        ({"SGLANG_ENABLE_LOGITS_PROCESSER_CHUNK": "true", "SGLANG_LOGITS_PROCESSER_CHUNK_SIZE": "1024"}, "{}", 3 * 4 * 1024),
        # replicas of attention gather the logits of all: SGLang does not cut them
        ({"SGLANG_ENABLE_LOGITS_PROCESSER_CHUNK": "1"}, "{enable_dp_attention: true, dp_size: 2}", 2 * 4 * 4096),
    ],
)
def test_scoring_takes_logits_of_a_whole_chunk(tmp_path: Path, environment: dict[str, str], overrides: str, logits: int) -> None:
    found = estimate(subject_with(*served(tmp_path, overrides=overrides), "--engine-env", json.dumps(environment)))
    assert sizes(found, "engines: teacher regular")["activations"] == logits * 151552 + 512 * MIB


def test_a_model_that_is_not_asked_to_score_needs_no_such_logits(tmp_path: Path) -> None:
    flags = SEPARATE.replace("--use-opd", "")
    judge = sizes(estimate(subject_with(*served(tmp_path, flags, name="judge"))), "engines: judge regular")
    assert judge["weights"] == GLM4_9B_RANK
    assert judge["activations"] < 2 * 4 * 8192 * 151552


def test_a_served_teacher_prefills_every_sample_once(tmp_path: Path) -> None:
    """The teacher scores during the rollout, and its last group afterwards."""
    subject = subject_with(*served(tmp_path))
    found = estimate(subject)
    rollout, prefill = phase(found, "rollout"), phase(found, "prefill")
    flops = rollout_forward_flops(replace(subject, architecture=facts("glm4-9b")))
    assert (prefill.lane, prefill.flops) == ("teacher", flops)
    assert prefill.duration_s == pytest.approx(flops / (2 * 989e12 * PREFILL), rel=1e-3)
    assert prefill.duration_s < rollout.duration_s
    end = prefill.start_s + prefill.duration_s
    assert end == pytest.approx(rollout.duration_s + prefill.duration_s / subject.config.rollout.rollout_batch_size)
    assert phase(found, "score").start_s == pytest.approx(end), "the trainer waits for it"


def test_a_teacher_slower_than_the_rollout_begins_with_it(tmp_path: Path) -> None:
    subject = subject_with(*served(tmp_path))
    slower = teacher_phase(subject, rollout_s=1.0)
    assert slower is not None
    assert slower.start_s == 0.0 and slower.duration_s > 2.0


def test_in_asynchronous_modes_the_sync_waits_for_the_teacher(tmp_path: Path) -> None:
    found = estimate(subject_with(*served(tmp_path, f"{SEPARATE} --async-mode one-step")))
    prefill, sync = phase(found, "prefill"), phase(found, "sync")
    assert phase(found, "score").start_s == 0.0
    assert sync.start_s == prefill.start_s + prefill.duration_s


def test_the_policy_is_sampled_from_by_its_own_engines(tmp_path: Path) -> None:
    """A frozen copy of the initial weights takes no part in the rollout but has a bar."""
    alone = f"{SEPARATE.replace('--use-opd', '')} --rollout-num-gpus 2".replace("--rollout-num-gpus 4 ", "")
    beside = estimate(subject_with(*served(tmp_path, SEPARATE.replace("--use-opd", ""), "/models/policy", name="first")))
    assert phase(beside, "rollout") == phase(estimate(subject_with(*DATA.split(), *alone.split())), "rollout")
    assert sizes(beside, "engines: first regular") == sizes(beside, "engines: regular")


def test_a_colocated_teacher_waits_in_host_memory(tmp_path: Path) -> None:
    """The model is never synced, so SGLang copies its weights back from host memory."""
    runs = (COLOCATED, SEPARATE, f"{COLOCATED} --debug-rollout-only")
    shared, separate, alone = (sizes(estimate(subject_with(*served(tmp_path, flags))), "host") for flags in runs)
    assert shared["engine_weights"] == 2 * GLM4_9B_RANK
    assert "engine_weights" not in separate and "engine_weights" not in alone


def test_a_teacher_that_does_not_fit_is_the_finding_of_any_engine(tmp_path: Path) -> None:
    starved = memory_error(plan_of(*served(tmp_path, overrides="{mem_fraction_static: 0.05}")))
    assert "engines: teacher regular: the weights leave 0 tokens of KV cache" in starved.text
    greedy = memory_error(plan_of(*served(tmp_path, overrides="{mem_fraction_static: 0.9}")))
    assert "engines: teacher regular: needs" in greedy.text and "activations 9." in greedy.text
    [own] = [change for change in greedy.fix if change.path[0] == "engine"]
    assert own.path == ("engine", "sglang_config", 1, "server_groups", 0, "overrides", "mem_fraction_static")


def test_a_model_that_nothing_describes_is_placed_and_reported_as_unknown(tmp_path: Path) -> None:
    other = tmp_path / "llama"
    other.mkdir()
    (other / "config.json").write_text(json.dumps({"model_type": "llama"}))
    for model in ("/nowhere/teacher", other):
        subject = subject_with(*served(tmp_path, model=model))
        found = estimate(subject)
        assert [bar.owner for bar in found.memory if bar.engine_group is not None] == ["engines: regular"]
        assert not [phase for phase in found.phases if phase.lane == "teacher"]
        assert sum(gpu.engine is not None and gpu.engine.group == 1 for gpu in found.layout.gpus) == 2
        [stated] = [sentence for sentence in assumptions(subject, found.layout) if "not estimated" in sentence]
        assert str(model) in stated and "teacher" in stated


def test_a_teacher_elsewhere_takes_no_time() -> None:
    subject = subject_with(*DATA.split(), *SEPARATE.split(), "--opd-teacher-url", "http://t:1")
    found = estimate(subject)
    assert {phase.lane for phase in found.phases} == {"engines", "trainer"}
    assert "The teacher at --opd-teacher-url takes no time." in assumptions(subject, found.layout)
