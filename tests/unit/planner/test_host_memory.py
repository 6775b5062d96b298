"""Host memory: samples, batches of ranks, SGLang's record of experts, compared with the real objects."""

import pickle

import numpy as np
import pytest

from fuligo.models.routing import RoutingShape
from fuligo.planner.layout import make_layout
from fuligo.planner.memory.bars import memory_bars, planned_engines
from fuligo.planner.memory.host import STANDBY_BYTES, routing_bytes, sample_bytes, shares_here
from fuligo.planner.plan import MemoryBar, MemoryItem
from fuligo.planner.subject import Subject
from fuligo.types import Sample, TrainBatch, TrainSample
from tests.unit.planner.subjects import FLASH_8, GLM4_9B_PARALLEL, GLM4_9B_SEPARATE, GLM45_BF16, GLM45_FP8, PPO, facts, subject_of

REPLAY = "--use-rollout-routing-replay"
SEPARATE = "--actor-num-gpus-per-node 8 --expert-model-parallel-size 8 --rollout-num-gpus 8 --rollout-num-gpus-per-engine 8"
NUM_TOKENS, PROMPT = 20_000, 400


def host(subject: Subject) -> MemoryBar:
    return next(bar for bar in memory_bars(subject, make_layout(subject)) if bar.owner == "host")


def item(bar: MemoryBar, name: str) -> MemoryItem | None:
    return next((item for item in bar.items if item.name == name), None)


def num_bytes(bar: MemoryBar, name: str) -> int:
    found = item(bar, name)
    return found.num_bytes if found else 0


@pytest.mark.parametrize("model, expected", [("glm4.5-355b", 712), ("glm4.7-flash", 184), ("glm5.2-744b", 600), ("glm4-9b", 0)])
def test_bytes_of_a_token_s_experts(model: str, expected: int) -> None:
    assert routing_bytes(facts(model)) == expected
    assert not expected or RoutingShape.of(facts(model)).bytes_per_token == expected


@pytest.mark.parametrize(
    "flags",
    [
        *("", REPLAY, f"{REPLAY} --num-steps-per-rollout 2", "--use-routing-replay --num-steps-per-rollout 2"),
        *(PPO, "--use-opd --opd-teacher-load t", "--use-opd --opd-teacher-url http://t:1"),
    ],
)
def test_bytes_of_samples_are_those_of_the_objects(flags: str) -> None:
    subject = subject_of(f"{FLASH_8} {flags}", "glm4.7-flash")
    config, shape = subject.config, RoutingShape.of(subject.architecture)
    routed = np.zeros((NUM_TOKENS - 1, len(shape.moe_layers), shape.top_k), shape.dtype)
    ids, floats = np.zeros(NUM_TOKENS - PROMPT, np.int32), np.zeros(NUM_TOKENS - PROMPT, np.float32)
    mask = np.ones(NUM_TOKENS - PROMPT, np.int8)
    sample = Sample(
        index=0, group_index=0, prompt="", prompt_ids=np.zeros(PROMPT, np.int32), response_ids=ids, loss_mask=mask, engine_logprobs=floats,
        versions=ids, response="four" * NUM_TOKENS, routed_experts=routed if config.replays_engine_routing else None,
        teacher_logprobs=floats.copy() if config.teacher_from == "engine" else None,
    )  # fmt: skip
    trained = TrainSample(
        index=0, group_index=0, tokens=sample.tokens, prompt_length=PROMPT, loss_mask=mask, reward=1.0, engine_logprobs=floats,
        versions=ids.copy(), mask_sum=1.0, old_logprobs=floats.copy() if config.needs_old_logprobs else None,
        ref_logprobs=floats.copy() if config.needs_reference else None, routed_experts=routed if config.replays_routing else None,
        advantages=floats.copy(), teacher_logprobs=floats.copy() if config.teacher_from == "trainer" else sample.teacher_logprobs,
        values=floats.copy() if config.trains_values else None, returns=floats.copy() if config.trains_values else None,
    )  # fmt: skip
    estimated = sample_bytes(subject)
    assert NUM_TOKENS * estimated.batch_token_bytes == pytest.approx(len(pickle.dumps(TrainBatch([trained], [[0]], [1]))), rel=0.03)
    assert NUM_TOKENS * estimated.sample_token_bytes == pytest.approx(held_bytes(sample), rel=0.03)
    made = [trained.tokens, trained.advantages, trained.old_logprobs, trained.ref_logprobs, trained.values, trained.returns]
    made += [] if sample.teacher_logprobs is not None else [trained.teacher_logprobs]
    made += [] if sample.routed_experts is trained.routed_experts else [trained.routed_experts]
    assert NUM_TOKENS * estimated.new_token_bytes == pytest.approx(sum(array.nbytes for array in made if array is not None), rel=0.05)


def held_bytes(sample: Sample) -> int:
    values = (getattr(sample, name) for name in Sample.__slots__)
    return sum(value.nbytes for value in values if isinstance(value, np.ndarray)) + len(sample.response)


def test_the_driver_holds_dropped_samples_and_rollouts_ahead() -> None:
    plain, wide, ahead, full = (
        num_bytes(host(subject_of(f"{GLM4_9B_SEPARATE} {flags}", "glm4-9b")), "samples")
        for flags in (
            "",
            "--rollout-batch-size 32 --over-sampling-batch-size 48",
            "--async-mode one-step",
            "--async-mode full --max-staleness 2 --update-weights-interval 2",
        )
    )
    assert wide == pytest.approx(1.5 * plain)
    assert ahead == 2 * plain
    assert full == 7 * plain, "one in training, and two for each of three versions"


def node_batches(flags: str, node: int) -> int:
    """Return the bytes of `batches` on a node of a GLM-4-9B run, without the driver's additions to its samples."""
    subject = subject_of(f"{GLM4_9B_PARALLEL} {flags}", "glm4-9b")
    layout = make_layout(subject)
    ranks = [gpu.trainer for gpu in layout.gpus if gpu.node == node and gpu.trainer is not None]
    return sample_bytes(subject).shares(sum(shares_here(subject, ranks, layout.dp, has_driver=node == 0)), layout.dp)


def test_a_node_has_what_its_replicas_train_on() -> None:
    """A node of eight GPUs has two of eight replicas (TP 2 x CP 2); the first has the driver's whole batch in Ray's object store."""
    batch = sample_bytes(subject_of(f"{GLM4_9B_PARALLEL} --actor-num-gpus-per-node 8 --colocate", "glm4-9b")).shares(1, 1)
    four_nodes = "--actor-num-nodes 4 --actor-num-gpus-per-node 8 --colocate"
    assert [node_batches(four_nodes, node) for node in range(4)] == [batch, batch // 4, batch // 4, batch // 4]


def test_ranks_of_one_machine_have_shares_of_their_own() -> None:
    """Rank 0 is the driver and owns the samples; the store holds the shares of the others."""
    batch = sample_bytes(subject_of(f"{GLM4_9B_PARALLEL} --actor-num-gpus-per-node 8 --colocate", "glm4-9b")).shares(1, 1)
    one, two = "--actor-num-gpus-per-node 4 --colocate", "--actor-num-gpus-per-node 8 --colocate"
    assert node_batches(one, 0) == batch * (1 + 3), "one replica of four ranks"
    assert node_batches(two, 0) == batch * (2 + 7) // 2
    assert node_batches(f"{two} --launcher ray", 0) == batch
    alone = host(subject_of("--device cuda --train-backend torch --rollout-backend sglang --rollout-num-gpus 1", "qwen3-4b"))
    assert num_bytes(alone, "batches") == sample_bytes(subject_of("--device cuda", "qwen3-4b")).new


def test_the_torch_trainer_makes_room_for_sglang() -> None:
    flags = "--device cuda --train-backend torch --rollout-backend sglang --actor-num-gpus-per-node 2"
    subject = subject_of(f"{flags} --colocate --use-opd --opd-teacher-load t", "qwen3-4b")
    found = host(subject)
    size = subject.architecture.num_parameters
    sizes = {name: num_bytes(found, name) for name in ("weights", "offloaded_optimizer", "reference", "teacher")}
    assert sizes == {"weights": 4 * size, "offloaded_optimizer": 8 * size, "reference": 4 * size, "teacher": 4 * size}
    held = num_bytes(host(subject_of(f"{flags} --colocate {PPO}", "qwen3-4b")), "value_model")
    assert held == 12 * (size + subject.architecture.hidden_size), "its head has one row"
    separate = host(subject_of(f"{flags} --rollout-num-gpus 2", "qwen3-4b"))
    assert {item.name for item in separate.items} == {"samples", "batches"}


def test_nothing_is_trained_on_without_a_trainer() -> None:
    bar = host(subject_of(f"{GLM4_9B_SEPARATE} --debug-rollout-only", "glm4-9b"))
    assert [item.name for item in bar.items] == ["samples"]


def test_replay_brings_the_experts_to_every_node_once() -> None:
    without, with_it = (host(subject_of(f"{GLM45_BF16} {flag}", "glm4.5-355b")) for flag in ("", REPLAY))
    tokens = sample_bytes(subject_of(GLM45_BF16, "glm4.5-355b")).num_tokens
    assert num_bytes(with_it, "batches") - num_bytes(without, "batches") == 712 * tokens, "one replica over eight nodes"


def test_the_pinned_record_has_a_place_for_every_cached_token() -> None:
    """As in the log of `RoutedExpertsCapturer`: all layers, dense ones too, int32."""
    subject = subject_of(f"{GLM45_BF16} {REPLAY}", "glm4.5-355b")
    [(_, _, memory)] = planned_engines(subject)
    exact = (memory.kv_tokens + 1) * 92 * 8 * 4
    assert exact <= memory.record.host_bytes < 2 * exact, "pinned memory is rounded up"
    assert memory.record.host_bytes.bit_count() == 1
    assert num_bytes(host(subject), "routing_record") == 8 * memory.record.host_bytes


def test_the_record_of_a_batch_is_beside_the_static_share() -> None:
    plain, replayed = (planned_engines(subject_of(f"{GLM45_BF16} {flag}", "glm4.5-355b"))[0][2] for flag in ("", REPLAY))
    requests = replayed.kv_tokens * 512 // 131072
    assert 2048 < requests < 4096
    assert replayed.record.gpu_bytes == 4 * requests * 92 * (8 + 1) * 4, "4 replicas; a column of shared experts"
    assert plain.record.gpu_bytes == plain.record.host_bytes == 0
    assert plain.kv_tokens == replayed.kv_tokens
    before, after = (
        {bar.owner: bar for bar in memory_bars(subject, make_layout(subject))}
        for subject in (subject_of(f"{GLM45_BF16} {flag}", "glm4.5-355b") for flag in ("", REPLAY))
    )
    assert num_bytes(after["engines: regular"], "routing_record") == replayed.record.gpu_bytes
    kept = num_bytes(after["trainer stage 0"], "engine") - num_bytes(before["trainer stage 0"], "engine")
    assert kept == replayed.record.gpu_bytes, "a released server keeps it"


def test_deepep_gathers_one_layer_more() -> None:
    [(_, _, memory)] = planned_engines(subject_of(f"{GLM45_FP8} {REPLAY}", "glm4.5-355b", engines="glm4.5-355b/model-fp8"))
    assert memory.kv_tokens * 512 // 131072 < 2048, "SGLang's least"
    rows = 32 * 2048
    assert memory.record.gpu_bytes == rows * (92 + 1) * 8 * 4


def test_a_given_number_of_requests_bounds_the_batch() -> None:
    """SGLang's log of a small model with these sizes: shape=(65537, ...) on the host, shape=(2048, ...) on the device."""
    flags = f"{SEPARATE} --sglang-max-running-requests 64 --sglang-chunked-prefill-size 2048 --sglang-max-total-tokens 65536 {REPLAY}"
    [(_, _, memory)] = planned_engines(subject_of(flags, "glm4.7-flash"))
    assert memory.record.gpu_bytes == 2048 * 47 * (4 + 1) * 4
    assert memory.record.host_bytes // 2 < 65537 * 47 * 4 * 4 <= memory.record.host_bytes


def test_engines_of_their_own_nodes_have_the_record_there() -> None:
    """The fullest node is shown: the engines' once their records exceed the memory of the trainer's node."""
    subject = subject_of(f"{SEPARATE} {REPLAY}", "glm4.7-flash")
    assert item(host(subject), "batches") and not item(host(subject), "routing_record")
    engines_only = subject_of(f"{SEPARATE} {REPLAY} --debug-rollout-only", "glm4.7-flash")
    assert item(host(engines_only), "routing_record") and not item(host(engines_only), "batches")


@pytest.mark.parametrize(("flags", "num_standbys"), [("--max-restarts 3", 8), ("--max-restarts 3 --launcher ray", 0), ("", 0)])
def test_a_rank_that_can_be_replaced_has_a_process_in_reserve(flags: str, num_standbys: int) -> None:
    subject = subject_of(f"--actor-num-gpus-per-node 8 --colocate {flags}", "qwen3-4b")
    assert num_bytes(host(subject), "standbys") == num_standbys * STANDBY_BYTES


def test_rank_0_keeps_an_mtp_layer_that_is_not_loaded() -> None:
    flags = "--train-backend torch --actor-num-gpus-per-node 8 --rollout-num-gpus 8 --rollout-num-gpus-per-engine 2"
    subject = subject_of(flags, "qwen3.5-35b")
    assert num_bytes(host(subject), "mtp_layer") == 2 * subject.architecture.num_mtp_parameters > 0
    for further in ("--mtp-num-layers 1", "--lora-rank 8"):
        assert item(host(subject_of(f"{flags} {further}", "qwen3.5-35b")), "mtp_layer") is None
    assert item(host(subject_of(flags, "glm4-9b")), "mtp_layer") is None
