"""FLOPs and times of a step: closed forms and monotonicity."""

from dataclasses import replace

import pytest

from fuligo.layout.flops import forward_flops
from fuligo.layout.megatron import layout_of
from fuligo.planner.estimate import Estimate, estimate
from fuligo.planner.lengths import average_prompt, average_response, longest_sample, micro_batch_tokens, num_micro_batches
from fuligo.planner.plan import Phase
from fuligo.planner.speeds import HOST_COPY, LAUNCH_EXPERTS_S, LAUNCH_LAYER_S
from fuligo.planner.subject import Assumed
from fuligo.planner.training_time import pipeline_bubble, recomputed_passes, rollout_forward_flops
from tests.unit.planner.subjects import CPU_ADAM, FLASH_8, FLASH_16, GLM4_9B_COLOCATED, GLM4_9B_SEPARATE, PPO, facts, subject_of


def estimate_of(flags: str, model: str = "glm4-9b", gpu_name: str = "h100-80") -> Estimate:
    return estimate(subject_of(flags, model, gpu_name))


def phase(plan: Estimate, name: str) -> Phase:
    [found] = [phase for phase in plan.phases if phase.name == name]
    return found


def test_a_dense_token_costs_two_operations_a_weight() -> None:
    architecture = facts("glm4-9b")
    norms = sum(part.num_parameters for layer in architecture.layers for part in layer.parts if not part.is_matmul)
    in_layers = sum(layer.num_parameters for layer in architecture.layers) - norms
    forward = forward_flops(architecture)
    assert forward.per_token == 2 * in_layers
    assert forward.per_logit == 2 * 151552 * 4096
    assert forward.per_pair == 40 * 4 * 32 * 128


def test_of_the_experts_only_the_chosen_cost() -> None:
    architecture = facts("glm4.7-flash")
    routed = 46 * 64 * 3 * 2048 * 1536
    whole = 2 * sum(part.num_parameters for layer in architecture.layers for part in layer.parts if part.is_matmul)
    assert forward_flops(architecture).per_token == whole - 2 * routed * (64 - 4) // 64


def test_sparse_attention_looks_at_top_k_tokens_and_indexes_all() -> None:
    forward = forward_flops(facts("glm5.2-744b"))
    assert forward.top_k == 2048
    assert forward.per_index_pair == 2 * 32 * 128 * 21, "layers 1, 2, 3, 7, 11, ..., 75"
    short, long = (forward.sequence(n, n * n, 0) - forward.per_token * n - forward.per_index_pair * n * n / 2 for n in (1024, 100_000))
    assert short == forward.per_pair * 1024**2 / 2
    assert long == forward.per_pair * 100_000 * 2048


def test_a_rollout_is_its_tokens_times_the_weights_and_some_attention() -> None:
    subject = subject_of(GLM4_9B_SEPARATE, "glm4-9b")
    tokens = subject.config.samples_per_rollout * (average_prompt(subject.config) + average_response(subject.config))
    linear = 2 * tokens * subject.architecture.num_parameters
    assert linear < rollout_forward_flops(subject) < 1.3 * linear


@pytest.mark.parametrize(
    "flags, passes",
    [
        ("", 1.0),
        ("--recompute-method block --recompute-num-layers 10", 0.25),
    ],
)
def test_recomputation_repeats_forward_passes(flags: str, passes: float) -> None:
    subject = subject_of(f"{GLM4_9B_SEPARATE} {flags}", "glm4-9b")
    assert recomputed_passes(subject) == passes
    assert phase(estimate(subject), "train").flops == (3 + passes) * rollout_forward_flops(subject)


def test_the_bubble_shrinks_with_micro_batches_and_interleaving() -> None:
    flags = "--actor-num-gpus-per-node 4 --pipeline-model-parallel-size 4 --use-dynamic-batch-size --max-tokens-per-gpu 40000"
    few, many, interleaved = (
        subject_of(f"{flags} {more}", "glm4-9b")
        for more in (
            "--rollout-batch-size 8",
            "--rollout-batch-size 128",
            "--rollout-batch-size 8 --virtual-pipeline-model-parallel-size 2",
        )
    )
    bubbles = [pipeline_bubble(subject, layout_of(subject.config)) for subject in (few, many, interleaved)]
    count = num_micro_batches(few, layout_of(few.config))
    assert bubbles[0] == 3 / (count + 3)
    assert bubbles[1] < bubbles[0] and bubbles[2] < bubbles[0]


def test_more_gpus_take_less_time() -> None:
    one, two = (
        estimate_of(f"{FLASH_8} {CPU_ADAM}", "glm4.7-flash"),
        estimate_of(f"{FLASH_8} {CPU_ADAM} --actor-num-nodes 2", "glm4.7-flash"),
    )
    half = phase(one, "train").duration_s / 2
    assert half <= phase(two, "train").duration_s < 1.1 * half, "launches are for whole micro-batches"
    assert phase(two, "rollout").duration_s < phase(one, "rollout").duration_s


def test_more_bandwidth_makes_rollouts_faster_and_not_training() -> None:
    h100, h200 = (estimate_of(GLM4_9B_SEPARATE, gpu_name=name) for name in ("h100-80", "h200-141"))
    assert phase(h200, "rollout").duration_s < phase(h100, "rollout").duration_s
    assert phase(h200, "train").duration_s == phase(h100, "train").duration_s


def test_speculative_decoding_makes_rollouts_faster() -> None:
    names = {"algorithm": "EAGLE", "num-steps": 2, "eagle-topk": 1, "num-draft-tokens": 3}
    flags = " ".join(f"--sglang-speculative-{name} {value}" for name, value in names.items())
    requests = "--sglang-max-running-requests 256"
    plain, drafted, few = (estimate_of(f"{FLASH_8} {CPU_ADAM} {more}", "glm4.7-flash") for more in ("", f"{flags} {requests}", flags))
    assert phase(drafted, "rollout").duration_s < phase(plain, "rollout").duration_s
    assert phase(few, "rollout").duration_s > phase(drafted, "rollout").duration_s, "SGLang's 48 requests are too few"
    assert "for 2.57 tokens" in phase(drafted, "rollout").note


def test_rejected_drafts_make_rollouts_slower_than_none() -> None:
    flags = f"{FLASH_8} {CPU_ADAM} --sglang-max-running-requests 256"
    plain = subject_of(flags, "glm4.7-flash")
    drafts = subject_of(f"{flags} --sglang-speculative-algorithm EAGLE", "glm4.7-flash")
    lengths = (None, 1.0, 2.4, 9.0)
    assumed, rejected, some, all_accepted = (
        phase(estimate(replace(drafts, assumed=Assumed(accept_length=length))), "rollout").duration_s for length in lengths
    )
    assert rejected > phase(estimate(plain), "rollout").duration_s > assumed
    assert some == pytest.approx(rejected / 2.4, rel=0.1)
    assert all_accepted < assumed and all_accepted == pytest.approx(rejected / 4, rel=0.1), "three drafts by default"


def test_fewer_requests_in_flight_take_as_long_as_engines_that_run_fewer() -> None:
    wave = f"{GLM4_9B_SEPARATE} --rollout-max-response-len 512 --rollout-batch-size 32 --n-samples-per-prompt 16"
    flight, slots, both = (
        phase(estimate_of(f"{wave} {flags}"), "rollout").duration_s
        for flags in (
            "--rollout-concurrency 64",
            "--sglang-max-running-requests 32 --rollout-concurrency 4096",
            "--rollout-concurrency 4096",
        )
    )
    assert flight == pytest.approx(slots)
    assert flight > 2 * both


def test_a_filter_makes_rollouts_longer_and_not_training() -> None:
    flags = f"{GLM4_9B_SEPARATE} --rollout-batch-size 64 --over-sampling-batch-size 96"
    plain, half = (subject_of(f"{flags} {more}", "glm4-9b") for more in ("", "--dynamic-sampling-filter-path filters.keep"))
    plans = [estimate(plain), *(estimate(replace(half, assumed=Assumed(kept_share=share))) for share in (1.0, 0.5, 0.2))]
    rollouts = [phase(plan, "rollout") for plan in plans]
    assert rollouts[0].duration_s == rollouts[1].duration_s, "the filter keeps all"
    assert 1.5 * rollouts[1].duration_s < rollouts[2].duration_s < 0.7 * rollouts[3].duration_s
    assert "192 groups started for the 64 to keep" in rollouts[2].note
    assert len({phase(plan, "train").duration_s for plan in plans}) == 1


def test_short_micro_batches_wait_for_kernel_launches() -> None:
    for flags, model, per_layer in ((GLM4_9B_SEPARATE, "glm4-9b", LAUNCH_LAYER_S), (FLASH_8, "glm4.7-flash", LAUNCH_EXPERTS_S)):
        long, short, shorter = (
            subject_of(f"{flags} --rollout-max-response-len 512 --max-tokens-per-gpu {n}", model) for n in (16384, 800, 400)
        )
        waits, waits_longer = (phase(estimate(each), "train") for each in (short, shorter))
        assert "kernel launches for" in waits.note and waits.duration_s > phase(estimate(long), "train").duration_s
        shape = layout_of(short.config)
        passes = 3 * num_micro_batches(short, shape)  # forward, recomputed, backward
        num_layers = short.architecture.num_layers
        assert waits.duration_s == pytest.approx(passes * num_layers * per_layer, rel=0.02), "all layers, of which one is dense"
        assert waits_longer.duration_s > waits.duration_s


def test_a_reference_is_swapped_with_the_policy() -> None:
    subject = subject_of(FLASH_8, "glm4.7-flash")
    scored = phase(estimate(subject), "score")
    on_rank = next(item for bar in estimate(subject).memory if bar.pipeline_rank == 0 for item in bar.items if item.name == "weights")
    swaps_s = 4 * on_rank.num_bytes / (HOST_COPY * subject.gpu.host_bytes_per_s)
    assert f"{swaps_s:.1f} s for swaps of weights with the host" in scored.note and scored.duration_s > swaps_s


def test_cpu_adam_takes_longer_with_the_cores_of_few_ranks() -> None:
    flags = f"{CPU_ADAM} --train-backend megatron --actor-num-gpus-per-node"
    one, two, eight = (phase(estimate_of(f"{flags} {n} --num-gpus-per-node {n}", "qwen3-4b"), "optimizer") for n in (1, 2, 8))
    assert "46 GB/s" in one.note and "92 GB/s" in two.note and "300 GB/s" in eight.note
    assert one.duration_s > 1.9 * two.duration_s > 2 * eight.duration_s


def test_cpu_adam_is_slower() -> None:
    gpu, cpu = (estimate_of(f"{FLASH_8} {more}", "glm4.7-flash") for more in ("", CPU_ADAM))
    assert phase(cpu, "optimizer").duration_s > phase(gpu, "optimizer").duration_s


def test_phases_follow_each_other() -> None:
    plan = estimate_of(GLM4_9B_COLOCATED)
    assert [phase.name for phase in plan.phases] == ["rollout", "onload", "score", "train", "optimizer", "sync", "offload"]
    for earlier, later in zip(plan.phases, plan.phases[1:]):
        assert later.start_s == pytest.approx(earlier.start_s + earlier.duration_s)
    assert plan.step_s == plan.phases[-1].start_s + plan.phases[-1].duration_s


def test_one_step_off_samples_while_it_trains() -> None:
    sync, overlapped = estimate_of(GLM4_9B_SEPARATE), estimate_of(f"{GLM4_9B_SEPARATE} --async-mode one-step")
    assert phase(overlapped, "rollout").start_s == phase(overlapped, "score").start_s == 0
    longest = max(phase(sync, "rollout").duration_s, sum(phase(sync, name).duration_s for name in ("score", "train", "optimizer")))
    assert overlapped.step_s == pytest.approx(longest + phase(sync, "sync").duration_s)


def test_a_value_model_is_scored_and_trained_as_the_policy_is() -> None:
    flags = "--device cuda --actor-num-gpus-per-node 2"
    without, with_values = (estimate_of(f"{flags} {more}", "qwen3-4b") for more in ("", PPO))
    assert phase(with_values, "score").flops == 2 * phase(without, "score").flops, "the reference is there in both"
    for name in ("train", "optimizer"):
        assert phase(with_values, name).duration_s == pytest.approx(2 * phase(without, name).duration_s)


def test_without_a_reference_nothing_is_scored() -> None:
    subject = subject_of(GLM4_9B_SEPARATE, "glm4-9b")
    without = subject.config.model_copy(update={"algorithm": subject.config.algorithm.model_copy(update={"use_kl_loss": False})})
    assert phase(estimate(subject), "score").flops == rollout_forward_flops(subject)
    assert not without.needs_reference
    names = [phase.name for phase in estimate(type(subject)(without, subject.architecture, subject.architecture, subject.gpu)).phases]
    assert "score" not in names


def test_a_teacher_is_one_more_pass_and_one_of_its_own_size() -> None:
    """The old policy's log-probabilities are needed too. A served teacher takes its engines' time only."""
    loaded = subject_of(f"{GLM4_9B_SEPARATE} --use-opd --opd-teacher-load t", "glm4-9b")
    served = subject_of(f"{GLM4_9B_SEPARATE} --use-opd --opd-teacher-url http://t:1", "glm4-9b")
    smaller = replace(loaded, own_teacher=facts("qwen3-4b"))
    scored = [phase(estimate(subject), "score") for subject in (served, loaded, smaller)]
    one = rollout_forward_flops(loaded)
    other = rollout_forward_flops(replace(loaded, architecture=facts("qwen3-4b")))
    assert [each.flops for each in scored] == [2 * one, 3 * one, 2 * one + other]
    assert "forward passes of reference, teacher and old policy" in scored[1].note


def test_experts_on_other_nodes_cost_network_time() -> None:
    inside = phase(estimate_of(FLASH_16, "glm4.7-flash"), "train")
    across = phase(
        estimate_of(
            FLASH_16.replace("--expert-model-parallel-size 8", "--expert-model-parallel-size 8 --num-gpus-per-node 4").replace(
                "--actor-num-nodes 2 --actor-num-gpus-per-node 8", "--actor-num-nodes 4 --actor-num-gpus-per-node 4"
            ),
            "glm4.7-flash",
        ),
        "train",
    )
    assert across.duration_s > inside.duration_s
    assert "other nodes" in across.note and "other nodes" not in inside.note


def test_micro_batches_hold_the_longest_sample() -> None:
    short, long = (subject_of(f"{GLM4_9B_SEPARATE} --rollout-max-context-len {n}", "glm4-9b") for n in (8500, 30000))
    assert longest_sample(long.config) == 30000
    assert micro_batch_tokens(short.config, layout_of(short.config)) == 4608
    assert micro_batch_tokens(long.config, layout_of(long.config)) == 15000, "shared by the two context-parallel ranks"
