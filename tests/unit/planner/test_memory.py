"""Memory of trainer, engines and host: sums by hand, properties, and recipes that are known to run on 80 GB GPUs."""

from dataclasses import replace
from pathlib import Path

import pytest

from fuligo.formats.adapter_config import AdapterConfig
from fuligo.layout.megatron import layout_of
from fuligo.planner.estimate import estimate
from fuligo.planner.gpus import GIB
from fuligo.planner.layout import make_layout, stages
from fuligo.planner.memory.bars import engine_capacities, memory_bars, planned_engines
from fuligo.planner.memory.parameters import frozen_parameters, local_parameters, trained_parameters
from fuligo.planner.plan import MemoryBar
from fuligo.planner.subject import Subject
from tests.unit.planner.subjects import (
    CPU_ADAM,
    FLASH_8,
    FLASH_16,
    GLM4_9B_COLOCATED,
    GLM4_9B_SEPARATE,
    GLM45_BF16,
    GLM45_FP8,
    PPO,
    QWEN3_4B,
    facts,
    glm52,
    subject_of,
)

RECIPES = {
    "glm4-9b, 4 + 4": (GLM4_9B_SEPARATE, "glm4-9b", None),
    "glm4-9b, 8 shared": (GLM4_9B_COLOCATED, "glm4-9b", None),
    "glm4.7-flash, 8": (f"{FLASH_8} {CPU_ADAM}", "glm4.7-flash", None),
    "glm4.7-flash, 2 x 8": (FLASH_16, "glm4.7-flash", None),
    "glm4.5, 64": (GLM45_BF16, "glm4.5-355b", None),
    "glm4.5, 64, fp8 rollout": (GLM45_FP8, "glm4.5-355b", "glm4.5-355b/model-fp8"),
    "qwen3-4b, 8": (QWEN3_4B, "qwen3-4b", None),
}


def bars_of(subject: Subject) -> tuple[MemoryBar, ...]:
    return memory_bars(subject, make_layout(subject))


def item(bar: MemoryBar, name: str) -> int:
    return sum(item.num_bytes for item in bar.items if item.name == name)


@pytest.mark.parametrize("recipe", RECIPES)
def test_recipes_fit_80_gb(recipe: str) -> None:
    flags, model, engines = RECIPES[recipe]
    found = estimate(subject_of(flags, model, engines=engines))
    assert found.fits
    assert all(bar.fits for bar in found.memory), "the host's too"


def test_the_256_gpu_recipe_fits_and_its_last_stage_holds_most_weights(tmp_path: Path) -> None:
    found = estimate(glm52(tmp_path))
    assert found.fits
    trainer = [bar for bar in found.memory if bar.pipeline_rank is not None]
    assert max(trainer, key=lambda bar: item(bar, "weights")).pipeline_rank == 7, "16 layers, all with experts"
    assert max(trainer, key=lambda bar: item(bar, "activations")).pipeline_rank == 0, "most micro-batches in flight"


def test_glm47_flash_on_8_gpus_needs_cpu_adam() -> None:
    without = bars_of(subject_of(FLASH_8, "glm4.7-flash"))[0]
    assert not without.fits
    with_it = bars_of(subject_of(f"{FLASH_8} {CPU_ADAM}", "glm4.7-flash"))
    assert with_it[0].fits
    assert item(with_it[0], "optimizer") == 0
    experts, dense = 46 * 64 * 3 * 2048 * 1536, subject_of(FLASH_8, "glm4.7-flash").architecture.num_parameters - 46 * 64 * 3 * 2048 * 1536
    assert item(without, "weights") == pytest.approx(2 * (experts / 8 + dense))
    assert item(without, "gradients") == pytest.approx(4 * (experts / 8 + dense))
    assert item(without, "optimizer") == pytest.approx(12 * (experts / 8 + dense / 8)), "experts have no replicas, the rest has 8"
    host = next(bar for bar in with_it if bar.owner == "host")
    assert item(host, "optimizer") == pytest.approx(8 * 16 * (experts / 8 + dense / 8))


@pytest.mark.parametrize("pp, first", [(1, None), (2, 24), (4, None)])
def test_stages_together_hold_the_model_once(pp: int, first: int | None) -> None:
    flags = f"--actor-num-gpus-per-node {pp} --pipeline-model-parallel-size {pp}"
    subject = subject_of(f"{flags} --decoder-first-pipeline-num-layers {first}" if first else flags, "glm4-9b")
    shape = layout_of(subject.config)
    held = [trained_parameters(subject, shape, [stage]).total for stage in stages(subject)] if pp > 1 else []
    whole = trained_parameters(subject, shape, stages(subject)).total
    assert whole == subject.architecture.num_parameters
    assert not held or sum(held) == whole


def test_tensor_and_expert_ranks_share_all_but_what_is_replicated() -> None:
    flags = "--actor-num-gpus-per-node 8 --tensor-model-parallel-size 4 --sequence-parallel --expert-model-parallel-size 4"
    subject = subject_of(f"{flags} --expert-tensor-parallel-size 2", "glm4.7-flash")
    held = trained_parameters(subject, layout_of(subject.config), stages(subject))
    architecture = subject.architecture
    assert held.experts == pytest.approx(46 * 64 * 3 * 2048 * 1536 / 8)
    dense = architecture.num_parameters - 46 * 64 * 3 * 2048 * 1536
    assert dense / 4 < held.dense < dense / 2


def test_indexers_are_frozen() -> None:
    """The indexers are replicated over tensor-parallel ranks."""
    subject = subject_of("--actor-num-gpus-per-node 4 --tensor-model-parallel-size 4 --sequence-parallel", "glm5.2-744b")
    shape, found = layout_of(subject.config), stages(subject)
    indexer = 2048 * 32 * 128 + 6144 * 128 + 2 * 128 + 6144 * 32
    assert frozen_parameters(subject, shape, found).total == 21 * indexer
    parts = [part for layer in subject.architecture.layers for part in layer.parts]
    held = local_parameters([*subject.architecture.outer_parts, *parts], shape)
    assert trained_parameters(subject, shape, found) + frozen_parameters(subject, shape, found) == held


def test_prediction_layers_are_frozen_unless_trained() -> None:
    flags = f"{FLASH_8} --mtp-num-layers 1"
    frozen = subject_of(flags, "glm4.7-flash")
    trained = subject_of(f"{flags} --enable-mtp-training", "glm4.7-flash")
    shape, found = layout_of(frozen.config), stages(frozen)
    without = trained_parameters(frozen, shape, found)
    assert frozen_parameters(frozen, shape, found).total > 0
    assert trained_parameters(trained, shape, found) == without + frozen_parameters(frozen, shape, found)
    assert frozen_parameters(trained, shape, found).total == 0


def test_the_precision_aware_optimizer_keeps_half_of_each_fp32_weight() -> None:
    plain, aware = (bars_of(subject_of(f"{GLM4_9B_SEPARATE} {flag}", "glm4-9b"))[0] for flag in ("", "--use-precision-aware-optimizer"))
    assert item(aware, "optimizer") * 12 == pytest.approx(item(plain, "optimizer") * 10)


@pytest.mark.parametrize(
    "change, name",
    [
        ("--max-tokens-per-gpu 9216", "activations"),
        ("--tensor-model-parallel-size 1 --no-sequence-parallel", "weights"),
        ("--rollout-max-response-len 30000", "activations"),
        ("--log-probs-chunk-size 8192 --max-tokens-per-gpu 9216", "logits"),
    ],
)
def test_what_needs_more_memory_says_so(change: str, name: str) -> None:
    before, after = (bars_of(subject_of(flags, "glm4-9b"))[0] for flags in (GLM4_9B_SEPARATE, f"{GLM4_9B_SEPARATE} {change}"))
    assert item(after, name) > item(before, name)


def test_recomputation_trades_activations() -> None:
    flags = GLM4_9B_SEPARATE.replace("--recompute-granularity full --recompute-method uniform --recompute-num-layers 1", "")
    none, selective, block, full = (
        item(bars_of(subject_of(f"{flags} {recompute}", "glm4-9b"))[0], "activations")
        for recompute in (
            "",
            "--recompute-granularity selective --recompute-modules core_attn layernorm",
            "--recompute-granularity full --recompute-method block --recompute-num-layers 20",
            "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
        )
    )
    assert full < block < none
    assert full < selective < none
    assert block == pytest.approx((none + full) / 2, rel=0.01), "half of the 40 layers"


@pytest.mark.parametrize(
    "flags, model, engines, bytes_per_token",
    [
        # keys and values of 2 heads of 128 over TP 2, bf16, 40 layers
        ("--rollout-num-gpus 8 --rollout-num-gpus-per-engine 2", "glm4-9b", None, 2 * 1 * 128 * 2 * 40),
        # two ranks share each head at TP 4
        ("--rollout-num-gpus 8 --rollout-num-gpus-per-engine 4", "glm4-9b", None, 2 * 1 * 128 * 2 * 40),
        ("--rollout-num-gpus 8 --sglang-kv-cache-dtype fp8_e4m3", "glm4-9b", None, 2 * 2 * 128 * 40),
        # the latent vector of 512 + 64 is on every rank
        ("--rollout-num-gpus 8 --rollout-num-gpus-per-engine 4", "glm4.7-flash", None, 576 * 2 * 47),
        # 512 in fp8 with 4 scales, 64 in bf16; an index key of 128 with its scale
        ("--rollout-num-gpus 64 --rollout-num-gpus-per-engine 64 --sglang-kv-cache-dtype fp8_e4m3", "glm5.2-744b", None, (656 + 132) * 78),
    ],
)
def test_bytes_of_a_cached_token(flags: str, model: str, engines: str | None, bytes_per_token: int) -> None:
    [(_, _, memory)] = planned_engines(subject_of(f"--actor-num-gpus-per-node 8 {flags}", model, engines=engines))
    assert memory.cached_bytes_per_token == bytes_per_token


def test_the_static_share_is_weights_and_cache() -> None:
    [(_, _, memory)] = planned_engines(subject_of(GLM4_9B_COLOCATED, "glm4-9b"))
    room = memory.static - memory.weights
    assert 0 <= room - memory.kv_tokens * memory.bytes_per_token < memory.bytes_per_token
    assert memory.weights == pytest.approx(2 * 9.4e9 / 2, rel=0.01)


def test_capacity_is_counted_in_samples_of_the_longest_kind() -> None:
    subject = subject_of(f"{GLM4_9B_SEPARATE} --rollout-max-context-len 16384", "glm4-9b")
    [capacity] = engine_capacities(subject, make_layout(subject))
    assert capacity.concurrent_sequences == capacity.kv_cache_tokens // 16384


def test_attention_replicas_have_caches_of_their_own() -> None:
    one, eight = (
        subject_of(
            f"--actor-num-gpus-per-node 8 --colocate --rollout-num-gpus-per-engine 8 --expert-model-parallel-size 8 {flags}", "glm4.7-flash"
        )
        for flags in (
            "--sglang-mem-fraction-static 0.7",
            "--sglang-mem-fraction-static 0.7 --sglang-enable-dp-attention --sglang-dp-size 8",
        )
    )
    [alone], [shared] = (engine_capacities(subject, make_layout(subject)) for subject in (one, eight))
    assert 7 * alone.kv_cache_tokens < shared.kv_cache_tokens < 8 * alone.kv_cache_tokens


def test_fp8_rollout_halves_the_experts() -> None:
    bf16, fp8 = (subject_of(GLM45_BF16, "glm4.5-355b", engines=engines) for engines in (None, "glm4.5-355b/model-fp8"))
    [(_, _, wide)], [(_, _, narrow)] = planned_engines(bf16), planned_engines(fp8)
    assert narrow.expert_weights == pytest.approx(wide.expert_weights / 2, rel=1e-3)
    assert narrow.kv_tokens > wide.kv_tokens


def test_redundant_experts_take_memory() -> None:
    plain, redundant = (
        subject_of(
            f"--actor-num-gpus-per-node 8 --colocate --rollout-num-gpus-per-engine 8 --expert-model-parallel-size 8 {flags}", "glm4.7-flash"
        )
        for flags in ("--sglang-ep-size 8", "--sglang-ep-size 8 --sglang-ep-num-redundant-experts 16")
    )
    [(_, _, before)], [(_, _, after)] = planned_engines(plain), planned_engines(redundant)
    assert after.expert_weights == pytest.approx(before.expert_weights * 80 / 64)


def test_colocated_sides_keep_something_of_each_other() -> None:
    shared, separate = (bars_of(subject_of(flags, "glm4-9b")) for flags in (GLM4_9B_COLOCATED, GLM4_9B_SEPARATE))
    assert item(shared[0], "engine") > 0 and item(shared[1], "trainer") > 0
    assert item(separate[0], "engine") == item(separate[1], "trainer") == 0
    host = next(bar for bar in shared if bar.owner == "host")
    assert item(host, "offloaded_optimizer") == pytest.approx(12 * 9.4e9, rel=0.01), "the state of every parameter once"


def test_engines_that_get_only_changes_keep_their_weights_beside_the_trainer() -> None:
    subject = subject_of(f"{GLM4_9B_COLOCATED} --update-weight-mode delta", "glm4-9b")
    [(_, _, memory)] = planned_engines(subject)
    whole, changes = bars_of(subject_of(GLM4_9B_COLOCATED, "glm4-9b")), bars_of(subject)
    assert item(changes[0], "engine_weights") == changes[0].used_bytes - whole[0].used_bytes == memory.weights
    assert item(changes[1], "engine_weights") == 0, "there they are part of the server's own weights"


def test_the_torch_trainer_holds_sixteen_bytes_a_parameter() -> None:
    subject = subject_of("--device cuda --actor-num-gpus-per-node 2 --gradient-checkpointing", "qwen3-4b")
    shared, alone, _ = bars_of(subject)
    states = sum(item(alone, name) for name in ("weights", "gradients", "optimizer"))
    assert states == pytest.approx(16 * subject.architecture.num_parameters / 2, rel=1e-6)
    assert item(alone, "reference") == item(alone, "weights"), "--use-kl-loss"
    with_values = bars_of(subject_of(f"--device cuda --actor-num-gpus-per-node 2 {PPO}", "qwen3-4b"))[1]
    assert item(with_values, "value_model") == pytest.approx(12 * subject.architecture.num_parameters / 2, rel=1e-4)
    assert (shared.num_gpus, alone.num_gpus) == (1, 1)
    assert shared.used_bytes > alone.used_bytes, "the embedded engine is there too"


@pytest.mark.parametrize(("response", "copied"), [(1024, "KiB a layer are keys"), (1_000_000, "2 bytes a layer are keys"), (10**8, None)])
def test_copied_keys_are_shown_as_an_amount_that_is_not_0(response: int, copied: str | None) -> None:
    flags = f"--device cuda --precision fp32 --no-torch-compile --rollout-max-response-len {response} --n-samples-per-prompt 8"
    (note,) = {each.note for bar in bars_of(subject_of(flags, "qwen3-4b")) for each in bar.items if each.name == "activations"}
    assert " 0 KiB" not in note and " 0 bytes" not in note
    assert copied in note if copied is not None else "a layer" not in note.partition(";")[2], note


def test_the_torch_trainer_holds_a_teacher_of_its_own_size() -> None:
    subject = subject_of("--device cuda --actor-num-gpus-per-node 2 --use-opd --opd-teacher-load t", "qwen3-4b")
    large = replace(subject, own_teacher=facts("glm4-9b"))
    (_, like_the_policy, *_), (_, larger, *_) = bars_of(subject), bars_of(large)
    assert item(like_the_policy, "teacher") == item(like_the_policy, "weights")
    assert item(larger, "teacher") == pytest.approx(4 * facts("glm4-9b").num_parameters / 2, rel=1e-6)


def test_a_value_model_needs_what_the_policy_does_but_for_its_head() -> None:
    """Qwen3-4B ties head and embedding: the last of two stages has a copy for the policy, and one row for the value model."""
    pipeline = QWEN3_4B.replace("--tensor-model-parallel-size 2 --sequence-parallel", "--pipeline-model-parallel-size 2")
    first, last, *_ = bars_of(subject_of(f"{pipeline} {PPO}", "qwen3-4b"))
    states = [sum(item(bar, name) for name in ("weights", "gradients", "optimizer")) for bar in (first, last)]
    assert item(first, "value_model") == pytest.approx(states[0], rel=1e-6)
    vocabulary = subject_of(QWEN3_4B, "qwen3-4b").architecture.embedding.num_parameters
    assert states[1] - item(last, "value_model") == pytest.approx((2 + 4 + 12 / 4) * vocabulary, rel=0.01)
    host, without = (bars_of(subject_of(f"{QWEN3_4B} {more}", "qwen3-4b"))[-1] for more in (PPO, ""))
    assert item(host, "value_model") == pytest.approx(item(without, "weights") + item(without, "offloaded_optimizer"), rel=0.01)
    assert item(without, "value_model") == 0


def test_a_value_model_is_trained_whole_beside_an_adapter() -> None:
    subject = subject_of(f"{QWEN3_4B} {PPO} --no-offload-train", "qwen3-4b")
    adapter = AdapterConfig(8, 16.0, ("q_proj", "v_proj"))
    (trainer, engine, *_), (adapted, beside, *_) = bars_of(subject), bars_of(replace(subject, adapter_config=adapter))
    assert item(adapted, "value_model") == item(trainer, "value_model")
    saved = sum(item(trainer, name) - item(adapted, name) for name in ("weights", "adapter", "optimizer"))
    assert item(engine, "trainer") - item(beside, "trainer") == pytest.approx(saved, rel=1e-6)


def test_host_memory_is_as_given() -> None:
    subject = subject_of(f"{FLASH_8} {CPU_ADAM}", "glm4.7-flash")
    host = memory_bars(subject, make_layout(subject), 512 * GIB)[-1]
    assert (host.owner, host.capacity_bytes, host.fits) == ("host", 512 * GIB, False)
