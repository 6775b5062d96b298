"""Creation of plans: findings about memory, and no numbers without a layout."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fuligo.config import Config
from fuligo.config.changes import apply_changes
from fuligo.config.command_line import parse
from fuligo.config.findings import Change, Finding, Severity
from fuligo.errors import ConfigError
from fuligo.planner.gpus import GIB, GPUS, gpu
from fuligo.planner.make_plan import make_plan
from fuligo.planner.plan import Plan
from tests.cluster_recipes import CLUSTER_RECIPES, gpu_of
from tests.unit.planner.subjects import CPU_ADAM, DATA, EXAMPLES, FLASH_8, GLM4_9B_COLOCATED, GLM4_9B_SEPARATE


def plan_of(flags: str, model: str, gpu_name: str = "h100-80", host_memory_bytes: int | None = None) -> Plan:
    arguments = [*DATA.split(), *flags.split(), "--model-config-file", str(EXAMPLES / model / "model" / "config.json")]
    return make_plan(parse(arguments).config, gpu_name, "a plan", host_memory_bytes=host_memory_bytes)


def finding(plan: Plan, id: str) -> Finding:
    [found] = [finding for finding in plan.findings if finding.id == id]
    return found


@pytest.mark.parametrize("recipe", CLUSTER_RECIPES, ids=lambda path: f"{path.parent.name}/{path.stem}")
def test_shipped_recipes_fit_the_gpus_that_they_are_written_for(recipe: Path) -> None:
    plan = make_plan(parse(["--config", str(recipe)]).config, gpu_of(recipe), recipe.stem)
    assert not [finding for finding in plan.findings if finding.severity is Severity.ERROR]
    assert plan.layout is not None
    assert all(bar.fits for bar in plan.memory)
    assert all(capacity.concurrent_sequences >= 1 for capacity in plan.capacities)
    assert plan.step_s > 0
    assert not plan.suggestions


def test_a_trainer_that_does_not_fit_is_an_error_with_a_fix() -> None:
    plan = plan_of(FLASH_8, "glm4.7-flash")
    error = finding(plan, "PLAN-MEMORY-TRAINER")
    assert error.severity is Severity.ERROR
    assert "optimizer 41.8 GiB" in error.text
    assert [change.path[1] for change in error.fix] == [
        "optimizer_cpu_offload",
        "overlap_cpu_optimizer_d2h_h2d",
        "use_precision_aware_optimizer",
    ]
    assert error.fix and len(plan.suggestions) >= 2


def test_an_engine_whose_weights_leave_no_cache_is_an_error() -> None:
    error = finding(plan_of(GLM4_9B_COLOCATED.replace("static 0.7", "static 0.1"), "glm4-9b"), "PLAN-MEMORY-ENGINE")
    assert "leave 0 tokens of KV cache" in error.text
    assert error.fix[0].path == ("sglang", "mem_fraction_static")


def test_an_engine_that_takes_all_memory_is_an_error() -> None:
    error = finding(plan_of(GLM4_9B_COLOCATED.replace("static 0.7", "static 0.99"), "glm4-9b"), "PLAN-MEMORY-ENGINE")
    assert error.severity is Severity.ERROR
    assert "kv_cache" in error.text


def test_host_memory_is_judged_where_it_is_given_and_else_a_warning() -> None:
    enough = plan_of(f"{FLASH_8} {CPU_ADAM}", "glm4.7-flash", host_memory_bytes=1024 * GIB)
    assert not [finding for finding in enough.findings if finding.id == "PLAN-MEMORY-HOST"]
    given = plan_of(f"{FLASH_8} {CPU_ADAM}", "glm4.7-flash", host_memory_bytes=256 * GIB)
    assert finding(given, "PLAN-MEMORY-HOST").severity is Severity.ERROR
    as_sold = plan_of(f"{FLASH_8} {CPU_ADAM}", "glm4.7-flash", "l40s")
    assert finding(as_sold, "PLAN-MEMORY-HOST").severity is Severity.WARNING


def test_what_would_help_the_host_depends_on_what_fills_it() -> None:
    by_optimizer = finding(plan_of(f"{FLASH_8} {CPU_ADAM}", "glm4.7-flash", host_memory_bytes=256 * GIB), "PLAN-MEMORY-HOST")
    assert "--actor-num-nodes" in by_optimizer.advice
    long = FLASH_8.replace("max-response-len 8192", "max-response-len 131072")
    replayed = f"{long} --use-rollout-routing-replay --rollout-batch-size 1024"
    by_samples = finding(plan_of(replayed, "glm4.7-flash", host_memory_bytes=256 * GIB), "PLAN-MEMORY-HOST")
    assert "batches" in by_samples.text
    assert "--rollout-batch-size" in by_samples.advice
    assert "--rollout-batch-size" in by_samples.flags


def test_sizes_that_do_not_divide_leave_no_numbers() -> None:
    plan = plan_of(GLM4_9B_SEPARATE.replace("--tensor-model-parallel-size 2", "--tensor-model-parallel-size 3"), "glm4-9b")
    assert any(finding.severity is Severity.ERROR for finding in plan.findings)
    assert plan.layout is None
    assert not (plan.memory or plan.capacities or plan.phases or plan.suggestions)
    assert plan.num_parameters > 9e9, "what is known of the model stays"


def test_assumptions_are_sentences() -> None:
    plan = plan_of(GLM4_9B_SEPARATE, "glm4-9b")
    assert plan.assumptions
    assert all(text.endswith(".") for text in plan.assumptions)


@pytest.mark.parametrize("name", ["H100-80", "h100_80", "h200-141", "b200", "a100-40", "l40s", "RTX 4090"])
def test_gpus_are_found_by_name(name: str) -> None:
    assert gpu(name) in GPUS.values()


def test_an_unknown_gpu_is_named_with_a_guess() -> None:
    with pytest.raises(ConfigError, match="did you mean h100-80"):
        gpu("h100")


def test_documented_gpus_are_those_that_there_are() -> None:
    page = (EXAMPLES.parent / "docs" / "planner-model.md").read_text()
    for known in GPUS.values():
        [row] = [line for line in page.splitlines() if line.startswith(f"| `{known.name}` |")]
        assert f"{known.memory_bytes / GIB:.1f} GiB" in row
        assert f"{known.bf16_flops / 1e12:.0f} TFLOP/s" in row
        assert f"{known.link_bytes_per_s / 1e9:.0f} GB/s" in row


SIZES = [
    *(("parallel", f"{name}_parallel_size") for name in ("tensor_model", "pipeline_model", "context", "expert_model", "expert_tensor")),
    ("parallel", "virtual_pipeline_model_parallel_size"),
    ("parallel", "decoder_first_pipeline_num_layers"),
    ("parallel", "recompute_num_layers"),
    ("train", "max_tokens_per_gpu"),
    ("train", "micro_batch_size"),
    ("train", "num_steps_per_rollout"),
    ("cluster", "actor_num_nodes"),
    ("cluster", "actor_num_gpus_per_node"),
    ("cluster", "num_gpus_per_node"),
    ("cluster", "rollout_num_gpus"),
    ("cluster", "rollout_num_gpus_per_engine"),
    *(("sglang", name) for name in ("dp_size", "ep_size", "pp_size", "moe_dense_tp_size", "max_total_tokens", "chunked_prefill_size")),
]
CONFIGS = {path: parse(["--config", str(path)]).config for path in CLUSTER_RECIPES}


@settings(max_examples=settings().max_examples // 2)
@given(
    path=st.sampled_from(CLUSTER_RECIPES),
    places=st.lists(st.sampled_from(SIZES), min_size=1, max_size=3, unique=True),
    sizes=st.lists(st.integers(-1, 9) | st.sampled_from([12, 16, 64, 100, 4096]), min_size=3, max_size=3),
    gpu_name=st.sampled_from(sorted(GPUS)),
)
def test_whatever_the_sizes_there_is_a_plan_or_a_clear_error(path: Path, places: list, sizes: list[int], gpu_name: str) -> None:
    try:
        changed: Config = apply_changes(CONFIGS[path], [Change(place, size) for place, size in zip(places, sizes)])
        plan = make_plan(changed, gpu_name, "sizes")
    except ConfigError:
        return
    has_errors = any(finding.severity is Severity.ERROR for finding in plan.findings)
    assert plan.layout is not None or has_errors
    assert has_errors or all(bar.fits for bar in plan.memory if bar.owner != "host")
    assert all(item.num_bytes >= 0 for bar in plan.memory for item in bar.items)
