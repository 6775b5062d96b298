"""Tests of values chosen for flags that are not given: what follows from what."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from fuligo.config.changes import apply_changes, change_text
from fuligo.config.findings import Change
from fuligo.models.registry import architecture_of
from fuligo.planner import lengths
from fuligo.planner.choices import MAX_REQUESTS, SPARE_SLOTS, choose
from fuligo.planner.estimate import estimate
from fuligo.planner.gpus import GIB, GPUS
from fuligo.planner.speeds import HOST_COPY
from fuligo.planner.subject import Subject
from tests.unit.planner.subjects import GLM45_FP8, facts, subject_of

SHARED = "--train-backend torch --rollout-backend sglang --colocate"
ENGINES = "--train-backend torch --rollout-backend sglang --debug-rollout-only --rollout-max-response-len 512 --n-samples-per-prompt 16"


def chosen(flags: str, model: str = "qwen3-4b", gpu: str = "h200-141") -> dict[str, object]:
    """Return the chosen values by option name."""
    _, choices = choose(subject_of(flags, model, gpu))
    return {str(change.path[-1]): change.value for choice in choices for change in choice.changes}


def test_graphs_and_requests_in_flight_cover_the_wave() -> None:
    found = chosen(f"{ENGINES} --rollout-batch-size 32")
    assert found == {"max_running_requests": 513, "cuda_graph_max_bs_decode": 512, "rollout_concurrency": 512}


WAVE = "--rollout-batch-size 32 --n-samples-per-prompt 8 --rollout-max-response-len"


@pytest.mark.parametrize(
    ("flags", "gpu", "stays"),
    [
        pytest.param(f"{WAVE} 512", "h200-141", True, id="weights, moments and the cache of 256 requests fit"),
        pytest.param(f"{WAVE} 512", "h100-80", False, id="60 GiB of state leave too little of 80"),
        pytest.param(f"{WAVE} 512 --actor-num-gpus-per-node 8", "h100-80", True, id="each of eight GPUs has an eighth of it"),
        pytest.param(f"{WAVE} 8192", "h200-141", False, id="a smaller cache would hold fewer requests"),
        pytest.param(f"{WAVE} 512 --sglang-mem-fraction-static 0.1", "h200-141", False, id="the given cache is too small beside the state"),
    ],
)
def test_a_trainer_stays_where_its_memory_costs_the_engines_no_request(flags: str, gpu: str, stays: bool) -> None:
    assert chosen(f"{SHARED} {flags}", gpu=gpu).get("offload_train") is (False if stays else None)
    assert "offload_train" not in chosen(f"{SHARED} {flags} --offload-train", gpu=gpu)


@pytest.mark.parametrize(("num_prompts", "stays"), [(128, True), (256, False)])
def test_a_trainer_stays_only_where_all_states_of_linear_attention_fit(num_prompts: int, stays: bool) -> None:
    sizes = "--actor-num-gpus-per-node 8 --rollout-num-gpus-per-engine 2 --n-samples-per-prompt 4 --rollout-max-response-len 512"
    found = chosen(f"{SHARED} {sizes} --rollout-batch-size {num_prompts}", "qwen3.5-35b", "b200")
    assert found.get("offload_train") is (False if stays else None)


def test_a_trainer_that_stays_takes_memory_of_the_engines_and_no_time() -> None:
    flags = f"{SHARED} {WAVE} 512 --sglang-mem-fraction-static 0.7"
    away, stays = (
        estimate(subject_of(f"{flags} {option}", "qwen3-4b", "h200-141")) for option in ("--offload-train", "--no-offload-train")
    )
    state = 16 * facts("qwen3-4b").num_parameters  # fp32 weights, two moments, and the reference
    used = [{bar.owner: {item.name: item.num_bytes for item in bar.items} for bar in plan.memory} for plan in (away, stays)]
    before, after = (each["engines: regular"] for each in used)
    assert after["trainer"] - before["trainer"] == pytest.approx(state, rel=1e-6)
    assert before["kv_cache"] - after["kv_cache"] == pytest.approx(0.7 * state, rel=1e-4)
    assert "offloaded_optimizer" in used[0]["host"] and "offloaded_optimizer" not in used[1]["host"]
    moves = [sum(phase.duration_s for phase in plan.phases if phase.name in ("onload", "offload")) for plan in (away, stays)]
    assert moves[0] == pytest.approx(2 * state / (HOST_COPY * GPUS["h200-141"].host_bytes_per_s), rel=1e-6) and moves[1] == 0


@pytest.mark.parametrize("num_engines, each", [(1, 1024), (2, 1024), (4, 512)])
def test_requests_are_counted_per_engine(num_engines: int, each: int) -> None:
    found = chosen(f"{ENGINES} --rollout-batch-size 128 --rollout-num-gpus {num_engines}")
    assert found["cuda_graph_max_bs_decode"] == each <= MAX_REQUESTS
    assert found["max_running_requests"] == each + SPARE_SLOTS
    assert found["rollout_concurrency"] == num_engines * each


def test_runs_that_share_engines_get_slots_for_all_their_waves_and_the_same_ones() -> None:
    """With slots for one wave, each request that ends would let in one of another run, whose prefill interrupts decoding."""
    of_runs = [subject_of(f"{ENGINES} --rollout-batch-size {prompts}", "qwen3-4b", "h200-141") for prompts in (16, 32)]
    configs = [subject.config for subject in of_runs]
    found = [choose(replace(subject, sharing=tuple(other for other in configs if other is not subject.config)))[0] for subject in of_runs]
    assert [subject.config.sglang.get("max_running_requests") for subject in found] == [16 * 16 + 32 * 16 + SPARE_SLOTS] * 2
    assert [subject.config.sglang.get("cuda_graph_max_bs_decode") for subject in found] == [16 * 16 + 32 * 16] * 2


def test_small_waves_keep_the_graphs_of_evaluations() -> None:
    assert chosen(f"{ENGINES} --rollout-batch-size 1")["cuda_graph_max_bs_decode"] == 256


def test_the_kv_cache_limits_the_requests() -> None:
    long = f"{ENGINES} --rollout-batch-size 64 --rollout-max-response-len 32768"
    found, subject = chosen(long), subject_of(long, "qwen3-4b", "h200-141")
    [capacity] = estimate(subject).capacities
    tokens = lengths.average_prompt(subject.config) + lengths.average_response(subject.config)
    assert found["max_running_requests"] == found["rollout_concurrency"] + SPARE_SLOTS
    assert found["rollout_concurrency"] == pytest.approx(capacity.kv_cache_tokens // tokens, rel=0.05)
    assert found["cuda_graph_max_bs_decode"] == 256, "not below SGLang's own default"


def test_given_graphs_limit_the_requests_and_the_reason_says_so() -> None:
    subject, choices = choose(
        subject_of(f"{ENGINES} --rollout-batch-size 64 --sglang-cuda-graph-max-bs-decode 300", "qwen3-4b", "h200-141")
    )
    assert subject.config.sglang.get("cuda_graph_max_bs_decode") == 300
    assert subject.config.rollout.rollout_concurrency == 300
    assert subject.config.sglang.get("max_running_requests") == 300 + SPARE_SLOTS
    assert choices[0].reason == "an engine's CUDA graphs end at 300 requests; its share of a rollout is 1024"


NO_GRAPHS = ("--sglang-disable-cuda-graph", '--sglang-cuda-graph-config {"decode":{"backend":"disabled"}}')


@pytest.mark.parametrize("flags", NO_GRAPHS)
def test_graphs_that_a_flag_disables_are_not_chosen(flags: str) -> None:
    found = chosen(f"{ENGINES} --rollout-batch-size 32 {flags}")
    assert found == {"max_running_requests": 512 + SPARE_SLOTS, "rollout_concurrency": 512}


def test_settings_of_prefill_graphs_leave_those_for_decoding_to_choose() -> None:
    prefill = '--sglang-cuda-graph-config {"prefill":{"backend":"disabled"}}'
    assert chosen(f"{ENGINES} --rollout-batch-size 32 {prefill}") == chosen(f"{ENGINES} --rollout-batch-size 32")


def test_engines_without_a_cache_get_no_requests() -> None:
    found = chosen(f"{ENGINES} --rollout-batch-size 32 --sglang-mem-fraction-static 0.05", gpu="h100-80")
    assert found == {}, "an error names the missing cache; its fix would keep the requests"


def test_given_requests_get_graphs() -> None:
    found = chosen(f"{ENGINES} --rollout-batch-size 64 --sglang-max-running-requests 700")
    assert found == {"cuda_graph_max_bs_decode": 700, "rollout_concurrency": 700}


def test_given_requests_in_flight_win() -> None:
    assert "rollout_concurrency" not in chosen(f"{ENGINES} --rollout-batch-size 64 --rollout-concurrency 100")


@pytest.mark.parametrize("graphs", ["", " --sglang-cuda-graph-max-bs-decode 300"])
def test_requests_that_may_fill_the_spare_slots_have_graphs(graphs: str) -> None:
    subject, _ = choose(subject_of(f"{ENGINES} --rollout-batch-size 32 --rollout-concurrency 4096{graphs}", "qwen3-4b", "h200-141"))
    assert subject.config.sglang.get("max_running_requests") == subject.config.sglang.get("cuda_graph_max_bs_decode")


def test_graphs_take_memory_from_the_cache() -> None:
    small = subject_of(f"{ENGINES} --rollout-batch-size 4", "qwen3-4b", "h100-80")
    large = subject_of(f"{ENGINES} --rollout-batch-size 64", "qwen3-4b", "h100-80")
    graphs = []
    for subject in (small, large):
        [bar] = [bar for bar in estimate(choose(subject)[0]).memory if bar.engine_group == 0]
        graphs.append(next(item.num_bytes for item in bar.items if item.name == "graphs"))
    assert graphs[1] > graphs[0]


@pytest.mark.parametrize("flags, model", [(f"{ENGINES} --device cpu", "qwen3-4b"), (GLM45_FP8, "glm4.5-355b")])
def test_engines_with_limits_of_their_own_are_not_changed(flags: str, model: str) -> None:
    found = chosen(flags, model, "h200-141")
    assert "max_running_requests" not in found and "cuda_graph_max_bs_decode" not in found


def test_shared_gpus_leave_room_for_the_trainer() -> None:
    assert chosen(SHARED)["mem_fraction_static"] == 0.7
    assert "mem_fraction_static" not in chosen(f"{SHARED} --sglang-mem-fraction-static 0.5")


@pytest.mark.parametrize(
    "flags, tokens",
    [
        pytest.param("--rollout-max-response-len 256", 1.25 * 257 * 512, id="257 requests with prompts of 256 tokens, and a quarter more"),
        pytest.param("--rollout-max-response-len 64 --eval-max-response-len 256", 1.25 * 257 * 512, id="evaluations are longer"),
        pytest.param(
            "--loss-type sft_loss --eval-prompt-data set rows.jsonl --rollout-max-prompt-len 256 --rollout-max-response-len 256",
            1.25 * 257 * 512,
            id="only evaluations sample",
        ),
        pytest.param("--rollout-max-response-len 64 --rollout-max-prompt-len 448", 1.25 * 257 * 512, id="the given prompts are longer"),
        pytest.param("--rollout-max-response-len 8 --sglang-max-running-requests 8", 40960, id="one request may fill the model's context"),
        pytest.param("--rollout-max-response-len 16384", None, id="the GPU holds less"),
        pytest.param("--rollout-max-response-len 256 --sglang-mem-fraction-static 0.7", None, id="the share of memory is given"),
        pytest.param("--rollout-max-response-len 256 --sglang-max-total-tokens 9000", None, id="the cache is given"),
        pytest.param("--rollout-max-response-len 256 --environment a.py:B", None, id="episodes have unknown lengths"),
        pytest.param("--rollout-max-response-len 256 --rollout-function-path a.b", None, id="the user's rollouts have unknown lengths"),
        pytest.param("--rollout-max-response-len 256 --eval-function-path a.b", None, id="the user's evaluations have unknown lengths"),
        pytest.param("--rollout-max-response-len 256 --eval-config sets.yaml", None, id="evaluations have lengths of their own"),
        pytest.param('--rollout-max-response-len 256 --multimodal-keys {"image":"images"}', None, id="images have unknown lengths"),
        pytest.param(
            '--rollout-max-response-len 256 --rollout-max-prompt-len 256 --multimodal-keys {"image":"images"}',
            1.25 * 257 * 512,
            id="prompts with images have a limit",
        ),
    ],
)
def test_an_engine_that_shares_its_gpu_takes_no_more_cache_than_its_requests_need(flags: str, tokens: float | None) -> None:
    wave = "--rollout-batch-size 32 --n-samples-per-prompt 8"
    assert chosen(f"{SHARED} {wave} {flags}").get("max_total_tokens") == tokens
    assert "max_total_tokens" not in chosen(f"{ENGINES} {wave} {flags} --rollout-max-response-len 256")


def test_engines_that_only_decode_hold_the_tokens_that_sglang_keeps_free_for_each_request(tmp_path: Path) -> None:
    groups = [{"worker_type": role, "num_gpus": 1, "overrides": {"num_reserved_decode_tokens": 100}} for role in ("prefill", "decode")]
    (tmp_path / "servers.yaml").write_text(json.dumps({"sglang": [{"name": "default", "server_groups": groups}]}))
    shared = f"{SHARED} --actor-num-gpus-per-node 2 --sglang-config {tmp_path / 'servers.yaml'}"
    found = chosen(f"{shared} --rollout-batch-size 32 --n-samples-per-prompt 8 --rollout-max-response-len 256")
    assert found["max_total_tokens"] == 257 * (1.25 * 512 + 100)


@pytest.mark.parametrize(
    ("limit", "requests"),
    [
        ("--sglang-max-running-requests 64", 64),
        ("--sglang-cuda-graph-max-bs-decode 64", 64 + SPARE_SLOTS),
        ("--sglang-speculative-algorithm NGRAM", 48),
    ],
)
def test_a_trainer_stays_beside_a_cache_for_fewer_requests_than_a_rollout_has(limit: str, requests: int) -> None:
    found = chosen(f"{SHARED} {WAVE} 512 {limit}")
    assert found["max_total_tokens"] == 1.25 * requests * 768 and found["offload_train"] is False


def test_a_trainer_stays_beside_a_cache_of_the_size_that_is_needed() -> None:
    subject = replace(
        subject_of(f"{SHARED} {WAVE} 64 --precision bf16", "qwen3-4b"),
        architecture=architecture_of(SMOLLM2),
        rollout_architecture=architecture_of(SMOLLM2),
        gpu=replace(GPUS["h200-141"], memory_bytes=20 * GIB),
    )
    given = replace(subject, config=apply_changes(subject.config, [Change(("sglang", "mem_fraction_static"), 0.7)]))
    assert [choose(each)[0].config.cluster.offload_train for each in (subject, given)] == [False, None]


def of_memory(gib: float) -> Subject:
    subject = subject_of(SHARED, "qwen3-4b", "h200-141")
    return replace(subject, gpu=replace(GPUS["h200-141"], memory_bytes=int(gib * GIB)))


def test_rows_shrink_then_layers_are_recomputed() -> None:
    """Rows of 8,192 tokens of this model take 125 GiB; the cheapest change that fits is chosen."""
    kept, rows, recomputed = (choose(of_memory(gib))[0].config for gib in (130, 116, 90))
    assert kept.train.max_tokens_per_gpu is None and not kept.model.gradient_checkpointing
    assert rows.train.use_dynamic_batch_size and rows.train.max_tokens_per_gpu in (1024, 2048, 4096)
    assert not rows.model.gradient_checkpointing
    assert recomputed.model.gradient_checkpointing


@pytest.mark.parametrize(
    "gib, flags, tokens",
    [
        (300, "", 32768),
        (150, "", 12288),
        (300, "--rollout-batch-size 2", 12288),  # one row holds all samples of a step
        (300, "--rollout-batch-size 1", None),
        (300, "--micro-batch-size 1", None),
        (300, "--use-dynamic-batch-size", None),  # CFG-MAX-TOKENS asks for a limit, whatever the GPU
        (1000, "--train-backend megatron --actor-num-gpus-per-node 2 --pipeline-model-parallel-size 2", None),
    ],
)
def test_rows_are_longer_where_memory_allows(gib: float, flags: str, tokens: int | None) -> None:
    subject = subject_of(f"{SHARED} {flags}", "qwen3-4b", "h200-141")
    subject = replace(subject, gpu=replace(GPUS["h200-141"], memory_bytes=int(gib * GIB)))
    assert choose(subject)[0].config.train.max_tokens_per_gpu == tokens


def test_given_rows_are_kept() -> None:
    subject = of_memory(105)
    given = replace(subject, config=subject_of(f"{SHARED} --use-dynamic-batch-size --max-tokens-per-gpu 8192", "qwen3-4b").config)
    assert choose(given)[0].config.train.max_tokens_per_gpu == 8192


@pytest.mark.parametrize("flags, chosen_value", [("", False), ("--torch-compile", None), ("--precision fp32", None)])
def test_small_models_are_not_compiled_by_default(flags: str, chosen_value: bool | None) -> None:
    for sizes, expected in ((TINY, chosen_value), (SMOLLM2, None)):
        subject = replace(
            subject_of(f"{SHARED} {flags or '--precision bf16'}", "qwen3-4b", "h200-141"), architecture=architecture_of(sizes)
        )
        found = [change.value for choice in choose(subject)[1] for change in choice.changes if change.path[-1] == "torch_compile"]
        assert found == ([] if expected is None else [expected])


def test_every_choice_says_why() -> None:
    _, choices = choose(subject_of(f"{ENGINES} --rollout-batch-size 64", "qwen3-4b", "h200-141"))
    assert all(choice.reason and all(change_text(change).startswith("--") for change in choice.changes) for choice in choices)


SMOLLM2 = {
    "model_type": "llama", "hidden_size": 576, "intermediate_size": 1536, "num_attention_heads": 9, "num_key_value_heads": 3,
    "num_hidden_layers": 30, "vocab_size": 49152, "tie_word_embeddings": True, "max_position_embeddings": 8192,
}  # fmt: skip
TINY = {**SMOLLM2, "num_hidden_layers": 2, "vocab_size": 512}
MEASURED_ROLLOUTS = [
    # docs/benchmarks-gpu.md: requests of 105 tokens, their longest response, the mean measured, and the seconds of a rollout
    ("qwen3-4b", 512, 1.0, 21.8),
    ("smollm2-135m", 320, 254 / 320, 3.5),
    ("smollm2-135m", 320, 254 / 320, 4.0),
    ("smollm2-135m", 320, lengths.AVERAGE_OF_LONGEST, 3.5),
    ("smollm2-135m", 320, lengths.AVERAGE_OF_LONGEST, 4.0),
]


@pytest.mark.parametrize("model, longest, share, seconds", MEASURED_ROLLOUTS)
def test_rollouts_take_as_long_as_measured(model: str, longest: int, share: float, seconds: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lengths, "AVERAGE_OF_LONGEST", share)
    monkeypatch.setattr(lengths, "ASSUMED_PROMPT_TOKENS", 105)
    flags = f"{ENGINES} --rollout-batch-size 64 --rollout-max-response-len {longest}"
    subject = subject_of(flags, "qwen3-4b", "h200-141")
    if model == "smollm2-135m":
        subject = replace(subject, architecture=architecture_of(SMOLLM2), rollout_architecture=architecture_of(SMOLLM2))
    [rollout] = estimate(choose(subject)[0]).phases
    assert seconds / 1.5 < rollout.duration_s < seconds * 1.5


def test_decoding_without_graphs_costs_a_multiple() -> None:
    flags = f"{ENGINES} --rollout-batch-size 32 --sglang-max-running-requests 512"
    with_graphs = estimate(choose(subject_of(flags, "qwen3-4b", "h200-141"))[0]).step_s
    without = estimate(subject_of(f"{flags} --sglang-cuda-graph-max-bs-decode 256", "qwen3-4b", "h200-141")).step_s
    assert without > 2 * with_graphs
    assert facts("qwen3-4b").num_layers == 36
