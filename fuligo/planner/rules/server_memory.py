"""Memory settings and batch sizes of engines.

Source: SGLang 0.5.15.post1, `ServerArgs._handle_gpu_memory_settings`, `_handle_data_parallelism`, `check_server_args`,
`arg_groups/overrides.py` (page sizes), `arg_groups/speculative_hook.py` (requests).
"""

from collections.abc import Iterator

from fuligo.config.findings import Severity
from fuligo.config.rules.cluster import SHARED_FRACTION
from fuligo.config.topology import EngineGroupSpec
from fuligo.planner.rules.rule import Violation, nearest_first, rule
from fuligo.planner.rules.servers import group_rule, option, running, serving_policy, set_argument, set_each, shown, where
from fuligo.planner.server_settings import SPECULATIVE_REQUESTS, given_graph_batch, max_running_requests, server_settings
from fuligo.planner.subject import Subject

MAX_SHARED_FRACTION = 0.8
"""Largest share of a GPU's memory for an engine colocated with a trainer, which keeps some memory even if it is offloaded."""
_PAGE_SIZES = {"flashmla": 64, "cutlass_mla": 128}
"""Attention backend -> page size that it forces."""
_DSA_PAGE = 64


@group_rule("PLAN-MEM-FRACTION", "--sglang-mem-fraction-static", "--colocate", severity=Severity.WARNING)
def engines_leave_room(subject: Subject, spec: EngineGroupSpec) -> Iterator[Violation]:
    """A colocated trainer keeps some memory while the engines work."""
    if not subject.config.cluster.colocate or subject.config.debug.debug_rollout_only:
        return
    given = spec.arguments.get("mem_fraction_static")
    fraction = server_settings(spec, subject.rollout_architecture, subject.gpu).mem_fraction_static
    if fraction <= MAX_SHARED_FRACTION:
        return
    chosen = shown(spec, "mem_fraction_static") if given else f"--sglang-mem-fraction-static {fraction} (SGLang's default)"
    text = f"{chosen}{where(spec)} with --colocate: the trainer keeps some of the GPU's memory too"
    yield Violation(text, set_each(subject, spec, "mem_fraction_static", SHARED_FRACTION))


def page_size(subject: Subject, spec: EngineGroupSpec) -> int:
    """Return the tokens per page of the KV cache, as SGLang resolves them."""
    if subject.rollout_architecture.sparse_index is not None:
        return _DSA_PAGE
    backends = {spec.arguments.get("attention_backend"), spec.arguments.get("decode_attention_backend")}
    forced = [size for backend, size in _PAGE_SIZES.items() if backend in backends]
    return forced[0] if forced else spec.arguments.get("page_size") or 1


@group_rule("PLAN-CHUNK-PAGES", "--sglang-chunked-prefill-size", "--sglang-page-size", "--sglang-dp-size")
def chunks_are_whole_pages(subject: Subject, spec: EngineGroupSpec) -> Iterator[Violation]:
    """Each attention replica's share of a prefill chunk must be a whole number of pages."""
    chunk, page = spec.arguments.get("chunked_prefill_size"), page_size(subject, spec)
    settings = server_settings(spec, subject.rollout_architecture, subject.gpu)
    if spec.worker_type == "decode" or (chunk is not None and chunk <= 0):
        return
    share = settings.chunked_prefill_tokens if chunk is None else chunk // spec.dp_size
    if share % page == 0 and share > 0:
        return
    whole = page * spec.dp_size
    total = chunk or share * spec.dp_size
    fitting = [whole * number for number in {max(1, total // whole), total // whole + 1}]
    replicas = f" / {shown(spec, 'dp_size')} = {share}" if spec.dp_size > 1 else ""
    name = shown(spec, "chunked_prefill_size") if chunk else f"--sglang-chunked-prefill-size (by default {total})"
    text = f"{name}{replicas} tokens are not a multiple of the page size {page}{where(spec)}"
    yield Violation(text, set_each(subject, spec, "chunked_prefill_size", *nearest_first(total, fitting)))


@group_rule("PLAN-RUNNING-REQUESTS", "--sglang-max-running-requests", "--sglang-dp-size", groups=running)
def every_replica_runs_requests(subject: Subject, spec: EngineGroupSpec) -> Iterator[Violation]:
    """An engine's attention replicas share its requests, so each must get at least one."""
    requests = max_running_requests(spec)
    if requests is None or requests >= spec.dp_size:
        return
    limit = shown(spec, "max_running_requests")
    if spec.arguments.get("max_running_requests") is None:
        algorithm = shown(spec, "speculative_algorithm")
        limit = f"--sglang-max-running-requests {SPECULATIVE_REQUESTS} (SGLang's default with {algorithm})"
    text = f"{limit} leaves some of the attention replicas ({shown(spec, 'dp_size')}) without requests{where(spec)}"
    enough = max(spec.dp_size, _requests_wanted(subject, spec))
    yield Violation(text, set_each(subject, spec, "max_running_requests", enough))


@group_rule("PLAN-SPEC-REQUESTS", "--sglang-speculative-algorithm", "--sglang-max-running-requests", severity=Severity.WARNING)
def drafting_engines_run_few_requests(subject: Subject, spec: EngineGroupSpec) -> Iterator[Violation]:
    """SGLang runs few requests at a time with speculative decoding, unless --sglang-max-running-requests is given."""
    requests, wanted = max_running_requests(spec), _requests_wanted(subject, spec)
    is_given = spec.arguments.get("max_running_requests") is not None
    if is_given or requests is None or wanted <= requests or requests < spec.dp_size or spec.worker_type == "prefill":
        return
    share = f", {requests // spec.dp_size} for each of {spec.dp_size} attention replicas" if spec.dp_size > 1 else ""
    yield Violation(
        f"with {shown(spec, 'speculative_algorithm')} and without --sglang-max-running-requests an engine{where(spec)} runs {requests} "
        f"requests at a time{share}; its share of a rollout is {wanted}",
        set_each(subject, spec, "max_running_requests", wanted),
    )


def _requests_wanted(subject: Subject, spec: EngineGroupSpec) -> int:
    """Return an engine's share of a rollout's requests: equal for its attention replicas, and at most their largest CUDA graph if given."""
    num_engines = sum(other.num_engines for other in serving_policy(subject) if other.worker_type != "prefill") or 1
    per_replica = -(-subject.config.samples_per_rollout // (num_engines * spec.dp_size))
    return spec.dp_size * min(per_replica, given_graph_batch(spec.arguments) or per_replica)


def _in_flight(subject: Subject) -> float:
    """Return the limit of requests in flight per attention replica that samples; infinity without --rollout-concurrency."""
    limit = subject.config.rollout.rollout_concurrency
    replicas = sum(spec.num_engines * spec.dp_size for spec in serving_policy(subject) if spec.worker_type != "prefill")
    return float("inf") if limit is None or not replicas else limit / replicas


@group_rule(
    "PLAN-GRAPH-BATCH", "--sglang-cuda-graph-max-bs-decode", "--sglang-cuda-graph-bs-decode", severity=Severity.WARNING, groups=running
)
def batches_have_graphs(subject: Subject, spec: EngineGroupSpec) -> Iterator[Violation]:
    """Batches above the largest CUDA graph run without a graph, which is much slower."""
    given, requests = spec.arguments.get("cuda_graph_bs_decode"), spec.arguments.get("max_running_requests")
    largest = max(map(int, given)) if given else spec.arguments.get("cuda_graph_max_bs_decode")
    if largest is None or requests is None or spec.worker_type == "prefill":
        return
    share = -(-requests // spec.dp_size)
    if share <= largest or _in_flight(subject) <= largest:
        return
    name = "cuda_graph_bs_decode" if given else "cuda_graph_max_bs_decode"
    per_replica = f" / {shown(spec, 'dp_size')} = {share}" if spec.dp_size > 1 else ""
    yield Violation(
        f"CUDA graphs end at {largest} ({shown(spec, name)}), but up to {share} requests run "
        f"({shown(spec, 'max_running_requests')}{per_replica}){where(spec)}: larger batches decode without one, about 3 x slower",
        (
            (set_argument(subject, spec, "max_running_requests", largest * spec.dp_size),),
            (set_argument(subject, spec, name, [*given, share] if given else share),),
        ),
        flags=(option(name), "--sglang-max-running-requests"),
    )


@rule("PLAN-CHECKPOINT-GPU", "--hf-checkpoint", severity=Severity.WARNING)
def gpu_computes_fp8(subject: Subject) -> Iterator[Violation]:
    """FP8 weights save memory on every GPU, but time only on those that compute in FP8."""
    if not subject.config.needs_engine or not subject.rollout_architecture.is_quantized or subject.gpu.fp8_flops > subject.gpu.bf16_flops:
        return
    if serving_policy(subject):
        yield Violation(
            f"--hf-checkpoint holds FP8 weights, but {subject.gpu.name} does not compute in FP8, and block kernels may be missing",
            advice="use the BF16 checkpoint on this GPU",
        )
