"""DeepEP in engines: number of ranks, buffers, modes, environment.

Sources: SGLang 0.5.15.post1, `layers/moe/token_dispatcher/deepep.py`, `ServerArgs._handle_a2a_moe`, `environ.py`; DeepEP's table of
dispatch configurations (`deep_ep/buffer.py`).
"""

from collections.abc import Iterator

from fuligo.config.findings import Change, Severity
from fuligo.config.topology import EngineGroupSpec
from fuligo.planner.rules.rule import Fix, Violation, divisors, nearest_first, rule
from fuligo.planner.rules.servers import engine_size, group_rule, placed, resizes, serving_policy, set_argument, set_each, shown, where
from fuligo.planner.server_settings import max_running_requests, server_settings
from fuligo.planner.subject import Subject

MAX_RANKS = 160
"""Largest number of expert ranks with a dispatch configuration in DeepEP."""
DISPATCH_TOKENS = "SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK"
DEFAULT_DISPATCH_TOKENS = 128
MAX_DISPATCH_TOKENS = 1024
"""Largest buffer of low-latency mode, in tokens per rank; SGLang limits it to DeepEP's `FINISHED_SUM_TAG`."""


def with_deepep(subject: Subject) -> list[EngineGroupSpec]:
    """Return the groups whose experts communicate through DeepEP."""
    has_experts = subject.rollout_architecture.experts is not None
    return [spec for spec in serving_policy(subject) if has_experts and spec.arguments.value("moe_a2a_backend") == "deepep"]


@group_rule("PLAN-DEEPEP-RANKS", "--sglang-moe-a2a-backend", "--rollout-num-gpus-per-engine", groups=with_deepep)
def dispatch_has_a_configuration(subject: Subject, spec: EngineGroupSpec) -> Iterator[Violation]:
    """DeepEP's dispatch is configured for at most 160 expert ranks."""
    if spec.ep_size > MAX_RANKS:
        smaller = [size for size in divisors(spec.num_gpus) if size // spec.pp_size <= MAX_RANKS]
        text = (
            f"{shown(spec, 'moe_a2a_backend')}: {engine_size(subject, spec)} makes {spec.ep_size} expert ranks, but DeepEP has no "
            f"dispatch configuration above {MAX_RANKS}"
        )
        yield Violation(text, tuple(resizes(subject, spec, nearest_first(MAX_RANKS, smaller))), f"use engines of at most {MAX_RANKS} GPUs")


@group_rule(
    "PLAN-DEEPEP-DISPATCH", "--env", "--sglang-cuda-graph-max-bs-decode", "--sglang-speculative-num-draft-tokens", groups=with_deepep
)
def dispatch_buffers_hold_a_batch(subject: Subject, spec: EngineGroupSpec) -> Iterator[Violation]:
    """The low-latency buffers must hold the tokens of the largest decoding batch that is captured as a CUDA graph."""
    env = subject.config.cluster.env
    given = env.get(DISPATCH_TOKENS, str(DEFAULT_DISPATCH_TOKENS))
    has_no_graphs = spec.arguments.get("disable_cuda_graph") or spec.arguments.get("disable_decode_cuda_graph")
    if has_no_graphs or spec.arguments.get("cuda_graph_backend_decode") == "disabled":
        return
    if spec.worker_type == "prefill" or spec.arguments.value("deepep_mode") == "normal":
        return
    batch, drafts = _largest_batch(subject, spec), server_settings(spec, subject.rollout_architecture, subject.gpu).draft_tokens
    needed = batch * drafts
    if given.isdecimal() and needed <= int(given) <= MAX_DISPATCH_TOKENS:
        return
    default = "" if DISPATCH_TOKENS in env else " (its default)"
    product = f" = batch {batch} x {shown(spec, 'speculative_num_draft_tokens', drafts)}" if drafts > 1 else ""
    rounded = max(16, 1 << (needed - 1).bit_length())
    fixes: list[Fix] = []
    if needed <= MAX_DISPATCH_TOKENS:
        fixes.append((Change(("cluster", "env", DISPATCH_TOKENS), str(rounded)),))
    largest = max(1, min(int(given) if given.isdecimal() else DEFAULT_DISPATCH_TOKENS, MAX_DISPATCH_TOKENS) // drafts)
    if sizes := spec.arguments.get("cuda_graph_bs_decode"):
        fixes += set_each(subject, spec, "cuda_graph_bs_decode", [size for size in sizes if int(size) <= largest] or [largest])
    else:
        fixes += set_each(subject, spec, "cuda_graph_max_bs_decode", largest)
    yield Violation(
        f"--env {DISPATCH_TOKENS}={given}{default} must be at least {needed}{product}, the tokens of the largest decoding graph "
        f"(--sglang-cuda-graph-max-bs-decode){where(spec)}, and at most {MAX_DISPATCH_TOKENS}",
        tuple(fixes),
    )


def _largest_batch(subject: Subject, spec: EngineGroupSpec) -> int:
    """Return the number of sequences in one rank's largest decoding graph: as given, else SGLang's choice, limited by running requests."""
    batch = server_settings(spec, subject.rollout_architecture, subject.gpu).graph_batch
    running = max_running_requests(spec)
    if spec.arguments.get("cuda_graph_bs_decode") or spec.arguments.get("cuda_graph_max_bs_decode"):
        return batch
    return batch if running is None else min(batch, -(-running // spec.dp_size))


@group_rule("PLAN-DEEPEP-MODE", "--sglang-deepep-mode", severity=Severity.WARNING, groups=with_deepep)
def mode_suits_the_work(subject: Subject, spec: EngineGroupSpec) -> Iterator[Violation]:
    """DeepEP's normal kernels decode without CUDA graphs, and the buffers of its low-latency kernels are too small for a prefill."""
    mode = spec.arguments.value("deepep_mode")
    auto = set_each(subject, spec, "deepep_mode", None)
    if mode == "normal" and spec.worker_type != "prefill":
        yield Violation(f"{placed(spec, 'deepep_mode')}: decoding runs without CUDA graphs, several times slower", auto)
    if mode == "low_latency" and spec.worker_type != "decode":
        text = f"{placed(spec, 'deepep_mode')}: its buffers, which are sized for decoding, are too small for the tokens of a prefill"
        yield Violation(text, auto)


@rule("PLAN-DEEPEP-NO-EFFECT", "--sglang-deepep-mode", "--sglang-moe-a2a-backend")
def deepep_is_used(subject: Subject) -> Iterator[Violation]:
    """Settings of DeepEP have no effect without it."""
    groups = serving_policy(subject)
    if not groups or any(spec.arguments.value("moe_a2a_backend") == "deepep" for spec in groups):
        return
    if subject.rollout_architecture.experts is None:
        return
    for spec in groups:
        if spec.arguments.value("deepep_mode") != "auto":
            yield Violation(
                f"{placed(spec, 'deepep_mode')} has no effect with {shown(spec, 'moe_a2a_backend')}",
                ((set_argument(subject, spec, "deepep_mode", None),), (set_argument(subject, spec, "moe_a2a_backend", "deepep"),)),
            )


@rule("PLAN-DEEPEP-NVSHMEM", "--env", "--sglang-moe-a2a-backend", "--moe-enable-deepep", severity=Severity.WARNING)
def nvshmem_leaves_nccl_alone(subject: Subject) -> Iterator[Violation]:
    """DeepEP between nodes runs on NVSHMEM, which must not use NCCL itself."""
    config, name = subject.config, "NVSHMEM_DISABLE_NCCL"
    engines = [spec for spec in with_deepep(subject) if spec.num_gpus_per_engine > config.cluster.num_gpus_per_node]
    trainer = config.parallel.moe_enable_deepep and config.cluster.actor_num_nodes > 1
    if (not engines and not trainer) or config.cluster.env.get(name) == "1":
        return
    given = config.cluster.env.get(name)
    cause = shown(engines[0], "moe_a2a_backend") if engines else "--moe-enable-deepep"
    text = f"{cause} spans nodes and needs {name}=1 in --env, " + (f"but it is {given}" if given else "but it is not set")
    yield Violation(text, ((Change(("cluster", "env", name), "1"),),))


@group_rule("PLAN-DEEPEP-FP8-CHANNEL", "--sglang-moe-a2a-backend", "--hf-checkpoint", groups=with_deepep)
def deepep_takes_blocks(subject: Subject, spec: EngineGroupSpec) -> Iterator[Violation]:
    """SGLang's DeepEP path takes FP8 weights quantized in blocks, not per channel or tensor."""
    quantization = quantization_of(subject)
    if quantization is None or "weight_block_size" in quantization:
        return
    method = quantization.get("quant_method", "unknown")
    yield Violation(
        f"{placed(spec, 'moe_a2a_backend')}: the FP8 weights of --hf-checkpoint are not quantized in blocks "
        f"(quant_method {method}), which DeepEP needs",
        ((set_argument(subject, spec, "moe_a2a_backend", None),),),
        "convert the checkpoint: fuligo convert fp8 --strategy block --block-size 128 128",
    )


@group_rule("PLAN-FP8-BLOCKS", "--rollout-num-gpus-per-engine", "--sglang-ep-size", "--hf-checkpoint")
def shares_are_whole_blocks(subject: Subject, spec: EngineGroupSpec) -> Iterator[Violation]:
    """A GPU's share of a block-quantized matrix must be a whole number of blocks."""
    architecture, quantization = subject.rollout_architecture, quantization_of(subject)
    size = (quantization or {}).get("weight_block_size")
    block = max(size) if isinstance(size, list) and size and all(isinstance(each, int) for each in size) else None
    if block is None:
        return
    experts, dense = architecture.experts, spec.arguments.get("moe_dense_tp_size") or spec.tp_size
    sizes_of_mlps = [width for layer in architecture.layers if (width := architecture.dense_size_of(layer))]
    widths = {"a dense MLP": (min(sizes_of_mlps), dense)} if sizes_of_mlps else {}
    if experts is not None and spec.tp_size % spec.ep_size == 0:
        widths["an expert"] = (experts.intermediate_size, spec.tp_size // spec.ep_size)
    for name, (width, share) in widths.items():
        if share > 1 and width % share == 0 and width // share % block:
            spread = set_each(subject, spec, "ep_size", spec.tp_size) if name == "an expert" else ()
            sizes = nearest_first(spec.num_gpus_per_engine, divisors(spec.num_gpus))
            yield Violation(
                f"{engine_size(subject, spec)}: {share} GPUs share {name} of {width} columns; {width // share} is not a multiple of "
                f"the FP8 block size {block}",
                (*spread, *resizes(subject, spec, sizes)),
            )


def quantization_of(subject: Subject) -> dict[str, object] | None:
    """Return the quantization_config of the engines' checkpoint, or None if it is not quantized or not known."""
    found = subject.engine_config_json
    value = None if found is None else found.values.get("quantization_config")
    return value if isinstance(value, dict) else None
