"""Peak memory of a GPU of an SGLang server, and of the embedded engine, which shares the trainer's first GPU.

Sources: SGLang 0.5.15.post1, `srt/state_capturer` (`RoutedExpertsCapturer`, `BaseHostCache`, `BaseDeviceCache`) for the record of each
token's experts (--use-rollout-routing-replay); `LogitsProcessor.forward` and `process_input_logprobs_by_chunk` for the scoring of given
tokens by a teacher's server.
"""

import math
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from fuligo.config import Config
from fuligo.config.server_groups import TEACHER
from fuligo.config.topology import EngineGroupSpec, policy_model
from fuligo.models.architecture import Architecture, GroupedAttention, LatentAttention, Part, PartKind, Split
from fuligo.models.registry import family_of
from fuligo.planner.gpus import MIB, Gpu
from fuligo.planner.lengths import longest_sample
from fuligo.planner.memory.activations import BF16, FP32
from fuligo.planner.memory.parameters import COLLECTIVE_BYTES, CUDA_CONTEXT_BYTES, DEEPEP_BYTES, POINT_TO_POINT_BYTES, billions
from fuligo.planner.plan import MemoryItem
from fuligo.planner.server_settings import ServerSettings, decode_graph_bytes, prefill_graph_bytes, server_settings
from fuligo.planner.subject import Subject
from fuligo.quantities import amount, count

FP8_BLOCK = 128 * 128
"""Weights that share one fp32 scale in a block-quantized checkpoint."""
MXFP4_BYTES = 17 / 32
"""Bytes of a weight in MXFP4: 4 bits, and an 8-bit scale per 32 weights."""
INDEX_BLOCK = 128
"""Elements of an index key that share one fp32 scale (`DSATokenToKVPool.quant_block_size`)."""
WORKSPACE_BYTES = 512 * MIB
"""Workspace of attention kernels, as reserved by SGLang (`_handle_gpu_memory_settings`)."""


CHOICE_BYTES = 4
"""Bytes per expert choice of one token (int32)."""
FEWEST_REQUESTS, MOST_REQUESTS = 2048, 4096
REQUESTS_A_CONTEXT = 512
"""Default of --sglang-max-running-requests per attention replica: 512 for each sequence of full context length that its KV cache holds,
within these bounds (`_resolve_max_num_reqs`)."""


@dataclass(frozen=True, slots=True)
class RoutingRecord:
    """Bytes of the record of each token's experts, per GPU. Every rank holds the record of its whole attention replica, for all layers."""

    gpu_bytes: int = 0
    """Buffer for the forward pass of one batch."""
    host_bytes: int = 0
    """Pinned buffer with one entry per token of the KV cache."""


def records_routing(spec: EngineGroupSpec, config: Config) -> bool:
    """Return whether the servers run with --enable-return-routed-experts."""
    asked = config.replays_engine_routing and spec.model == policy_model(config)
    return asked or bool(spec.arguments.get("enable_return_routed_experts"))


def routing_record(spec: EngineGroupSpec, architecture: Architecture, settings: ServerSettings, kv_tokens: int) -> RoutingRecord:
    """Return the size of the record per GPU of a server whose attention replicas each cache `kv_tokens`; 0 for models without experts."""
    experts = architecture.experts
    if experts is None:
        return RoutingRecord()
    choices = architecture.num_layers * experts.num_experts_per_token
    held = (kv_tokens + (spec.arguments.get("page_size") or 1)) * choices * CHOICE_BYTES
    columns = experts.num_experts_per_token
    if spec.ep_size == 1 and not spec.arguments.get("disable_shared_experts_fusion"):
        columns += experts.num_shared_experts  # as SGLang's `determine_num_fused_shared_experts` decides
    requests = (settings.max_running_requests or 0) // spec.dp_size
    if settings.max_running_requests is None:
        context = spec.arguments.get("context_length") or architecture.max_position_embeddings
        requests = max(FEWEST_REQUESTS, min(kv_tokens * REQUESTS_A_CONTEXT // context, MOST_REQUESTS))
    rows = max(settings.chunked_prefill_tokens, min(requests, kv_tokens // 2)) * spec.dp_size  # of all attention replicas
    gathered = rows * (spec.tp_size // spec.dp_size) if settings.uses_deepep else 0
    return RoutingRecord(
        gpu_bytes=(rows * architecture.num_layers + gathered) * columns * CHOICE_BYTES,
        host_bytes=1 << (held - 1).bit_length(),  # PyTorch rounds pinned memory up to a power of two
    )


BY_CHUNK, CHUNK_TOKENS = "SGLANG_ENABLE_LOGITS_PROCESSER_CHUNK", "SGLANG_LOGITS_PROCESSER_CHUNK_SIZE"
"""Environment variables of SGLang that enable the computation of logits in chunks, and set the tokens per chunk."""
DEFAULT_CHUNK_TOKENS = 2048
_TRUE = ("true", "1", "yes", "y")
_WHOLE_BYTES = 2 * 4
"""Bytes per token and vocabulary entry without chunks: two fp32 tensors, first the logits and a copy of the rows to score, then the copy
and its log-softmax."""
_CHUNK_BYTES = 3 * 4
"""Bytes per token and vocabulary entry in chunks: one fp32 tensor more, since a chunk's logits outlive its log-softmax."""


def scored_bytes(spec: EngineGroupSpec, config: Config, prefill_tokens: int, vocab_size: int) -> int:
    """Return the bytes of log-probabilities on each GPU, which has the logits of the whole vocabulary; 0 unless it serves the teacher."""
    if not serves_teacher(spec, config):
        return 0
    environment = config.engine_environment
    gathers_replicas = spec.dp_size > 1 and not spec.arguments.get("enable_dp_lm_head")
    given = environment.get(CHUNK_TOKENS, "")
    chunk_tokens = int(given) if given.isdecimal() else DEFAULT_CHUNK_TOKENS
    if environment.get(BY_CHUNK, "").lower() not in _TRUE or gathers_replicas or prefill_tokens <= chunk_tokens:
        return _WHOLE_BYTES * prefill_tokens * vocab_size
    return _CHUNK_BYTES * chunk_tokens * vocab_size


def serves_teacher(spec: EngineGroupSpec, config: Config) -> bool:
    return spec.model == TEACHER and config.teacher_from == "engine" and config.algorithm.opd_teacher_url is None


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """Memory of one GPU of a server, in bytes; `kv_tokens` is the capacity of one attention replica's KV cache."""

    architecture: Architecture
    """Served model."""
    settings: ServerSettings
    weights: int
    expert_weights: int
    """Part of `weights`: routed experts; a small batch reads only some of them."""
    draft_weights: int
    before: int
    """Memory in use before the server loads: CUDA, NCCL, and what a colocated trainer keeps on the GPU."""
    static: int
    """--mem-fraction-static of the memory free at that time: weights, draft weights, states and KV cache."""
    bytes_per_token: int
    """Bytes per token by which SGLang sizes the cache."""
    cached_bytes_per_token: int
    """Allocated bytes per token; more than `bytes_per_token` for an fp8 cache of sparse attention, whose scales SGLang does not count and
    whose rotary keys it counts as fp8 although they are bf16."""
    kv_tokens: int
    states: int
    """Pool of the states of linear attention, in the static share; 0 without."""
    record: RoutingRecord
    """Record of experts, outside of the static share."""
    scored: int
    """Log-probabilities of a chunk to score; 0 if the server scores none."""


def engine_memory(spec: EngineGroupSpec, architecture: Architecture, gpu: Gpu, resident: int, config: Config) -> EngineMemory:
    """Return how a server of a group divides its GPUs' memory, next to `resident` bytes of a colocated trainer."""
    settings = server_settings(spec, architecture, gpu)
    before = CUDA_CONTEXT_BYTES + _communication_bytes(spec) + resident
    static = round(settings.mem_fraction_static * (gpu.memory_bytes - before))
    held = _holder(spec, architecture, settings)
    weights = held(part for layer in architecture.layers for part in layer.parts) // spec.pp_size + held(architecture.outer_parts)
    draft_layers = architecture.mtp_layers if settings.drafts_with_own_layers else ()
    draft = held(part for layer in draft_layers for part in layer.parts)
    counted, allocated = (round(size) for size in _cache_bytes(spec, architecture, len(draft_layers)))
    states = 0
    if architecture.linear_attention is not None:  # a share of the rest after weights (`model_runner_kv_cache_mixin`)
        ratio, per_request = spec.arguments.value("mamba_full_memory_ratio"), state_bytes_per_request(spec, architecture)
        states = int(max(0, static - weights - draft) * ratio / (1 + ratio)) // per_request * per_request
    tokens = max(0, static - weights - draft - states) // counted
    limit = spec.arguments.get("max_total_tokens")
    tokens = min(tokens, limit) if limit else tokens
    experts = [part for layer in architecture.layers for part in layer.parts if part.kind is PartKind.ROUTED_EXPERTS]
    return EngineMemory(
        architecture=architecture,
        settings=settings,
        weights=weights,
        expert_weights=held(experts) // spec.pp_size,
        draft_weights=draft,
        before=before,
        static=static,
        bytes_per_token=counted,
        cached_bytes_per_token=allocated,
        kv_tokens=tokens,
        states=states,
        record=routing_record(spec, architecture, settings, tokens) if records_routing(spec, config) else RoutingRecord(),
        scored=scored_bytes(spec, config, settings.chunked_prefill_tokens, architecture.vocab_size),
    )


def engine_items(spec: EngineGroupSpec, memory: EngineMemory, trainer_bytes: int, *, stays: bool = False) -> tuple[MemoryItem, ...]:
    """Return the parts of the peak memory of a GPU of the group `spec`; a trainer, which is offloaded or `stays`, has `trainer_bytes`."""
    settings, architecture = memory.settings, memory.architecture
    sizes = f"TP {spec.tp_size}" + (f", DP attention {spec.dp_size}" if spec.dp_size > 1 else "") + f", EP {spec.ep_size}"
    stored = "FP8 where quantized" if is_fp8(spec, architecture) else "experts in MXFP4" if architecture.is_mxfp4 else "bf16"
    items = [MemoryItem("weights", memory.weights, f"{billions(architecture.num_parameters)} parameters over {sizes}; {stored}")]
    before_cache = ("weights", *(["draft weights"] if memory.draft_weights else []), *(["states"] if memory.states else []))
    if memory.draft_weights:
        items.append(MemoryItem("draft_weights", memory.draft_weights, "the model's own MTP layers"))
    rest = f"the rest of --sglang-mem-fraction-static {settings.mem_fraction_static:g} ({amount(memory.static)})"
    source = f"{rest} after {' and '.join(before_cache)}"
    if memory.kv_tokens == spec.arguments.get("max_total_tokens"):
        source = "--sglang-max-total-tokens"
    note = f"{memory.kv_tokens} tokens x {memory.cached_bytes_per_token} bytes: {source}"
    items.append(MemoryItem("kv_cache", memory.kv_tokens * memory.cached_bytes_per_token, note))
    if memory.states:
        per_request = state_bytes_per_request(spec, architecture)
        requests = count(memory.states // per_request, "request")
        note = f"{requests} x {amount(per_request)} of linear attention (--sglang-mamba-full-memory-ratio)"
        items.append(MemoryItem("states", memory.states, note))
    items.append(_activations(spec, memory))
    if graphs := decode_graph_bytes(settings) + prefill_graph_bytes(settings, architecture):
        note = f"CUDA graphs for decoding up to batch {settings.graph_batch}, and {settings.num_prefill_graphs} for prefill"
        items.append(MemoryItem("graphs", graphs, note))
    if memory.record.gpu_bytes:
        items.append(MemoryItem("routing_record", memory.record.gpu_bytes, "experts of the largest batch's tokens, all layers, int32"))
    if settings.uses_deepep:
        items.append(MemoryItem("deepep", DEEPEP_BYTES, "DeepEP's dispatch buffers"))
    if _communication_bytes(spec):
        items.append(MemoryItem("communication", _communication_bytes(spec), "NCCL buffers"))
    items.append(MemoryItem("runtime", CUDA_CONTEXT_BYTES, "CUDA context, kernels, cuBLAS workspace"))
    if trainer_bytes:
        kept = "CUDA context, NCCL and DeepEP buffers, allocator"
        whose = "the trainer's weights and optimizer state," if stays else "kept by the offloaded trainer:"
        items.append(MemoryItem("trainer", trainer_bytes, f"{whose} {kept}"))
    return tuple(items)


def engine_resident_items(spec: EngineGroupSpec, memory: EngineMemory) -> tuple[MemoryItem, ...]:
    """Return what a colocated server keeps after releasing weights and KV cache."""
    settings, architecture = memory.settings, memory.architecture
    kept = CUDA_CONTEXT_BYTES + _communication_bytes(spec) + WORKSPACE_BYTES
    kept += decode_graph_bytes(settings) + prefill_graph_bytes(settings, architecture) + (DEEPEP_BYTES if settings.uses_deepep else 0)
    kept += memory.record.gpu_bytes
    return (MemoryItem("engine", kept, "kept by the released engine: CUDA context, NCCL buffers, workspace, CUDA graphs"),)


def is_fp8(spec: EngineGroupSpec, architecture: Architecture) -> bool:
    """Return whether the server holds FP8 matrices, by the checkpoint or --sglang-quantization."""
    return architecture.is_quantized or "fp8" in str(spec.arguments.get("quantization") or "")


def _holder(spec: EngineGroupSpec, architecture: Architecture, settings: ServerSettings) -> Callable[[Iterable[Part]], int]:
    """Return a function that maps parts of the model to their bytes on one rank."""
    fp8 = is_fp8(spec, architecture)
    arguments, tp_size, attention_tp = spec.arguments, spec.tp_size, spec.tp_size // spec.dp_size
    redundant = arguments.get("ep_num_redundant_experts") or 0
    num_experts = architecture.experts.num_experts if architecture.experts else 1
    dense = 1 / (arguments.get("moe_dense_tp_size") or tp_size)
    share = dict.fromkeys(PartKind, dense)  # of one rank, for parts that are not replicated
    share |= dict.fromkeys((PartKind.ATTENTION, PartKind.INDEXER, PartKind.EMBEDDING), 1 / attention_tp)
    share[PartKind.HEAD] = 1 / (attention_tp if arguments.get("enable_dp_lm_head") else tp_size)
    share[PartKind.SHARED_EXPERT] = 1.0 if settings.uses_deepep else dense
    share[PartKind.ROUTED_EXPERTS] = (1 + redundant / num_experts) / tp_size

    def held(parts: Iterable[Part]) -> int:
        counts: Counter[tuple[PartKind, Split, bool]] = Counter()
        for part in parts:
            counts[part.kind, part.split, part.quantizable] += part.num_parameters
        total = 0.0
        for (kind, split, quantizable), num_parameters in counts.items():
            size = 1 + 4 / FP8_BLOCK if fp8 and quantizable else 2
            if architecture.is_mxfp4 and kind is PartKind.ROUTED_EXPERTS and quantizable:
                size = MXFP4_BYTES
            total += num_parameters * size * (1.0 if split is Split.REPLICATED else share[kind])
        return round(total)

    return held


def _cache_bytes(spec: EngineGroupSpec, architecture: Architecture, num_draft_layers: int) -> tuple[float, float]:
    """Return bytes per token of all layers on one rank: as SGLang counts (`pool_configurator._compute_cell_size`), and as it allocates."""
    attention, index = architecture.attention, architecture.sparse_index
    dtype = str(spec.arguments.get("kv_cache_dtype") or "auto")
    size = 1 if "fp8" in dtype else 0.5 if "fp4" in dtype else 2
    if isinstance(attention, GroupedAttention):
        elements = _grouped_elements(spec, architecture, num_draft_layers)
        return elements * size, elements * size
    layers = math.ceil(architecture.num_cached_layers / spec.pp_size) + num_draft_layers
    counted = attention.kv_elements_per_token * size
    if index is None:
        return layers * counted, layers * counted
    keys = index.head_dim + index.head_dim // INDEX_BLOCK * 4
    scaled = attention.kv_lora_rank + attention.kv_lora_rank // INDEX_BLOCK * 4 + 2 * attention.qk_rope_head_dim
    return layers * (counted + keys), layers * ((scaled if size == 1 else counted) + keys)


def _grouped_elements(spec: EngineGroupSpec, architecture: Architecture, num_draft_layers: int) -> float:
    """Return the elements of keys and values per token on one rank.

    Layers with windows may have their own pool, which holds a share of the tokens (`pool_configurator.HybridSWAPoolConfigurator`). Layers
    that borrow keys and values have an entry as well, which stays empty.
    """
    attention_tp = spec.tp_size // spec.dp_size
    has_pool = family_of(architecture).has_window_pool and not spec.arguments.get("disable_hybrid_swa_memory")
    share = spec.arguments.value("swa_full_tokens_ratio") if has_pool else 1.0

    def on_a_rank(heads: GroupedAttention) -> int:
        return 2 * max(1, heads.num_kv_heads // attention_tp) * heads.head_dim

    kinds: Counter[tuple[GroupedAttention, bool]] = Counter()
    for layer in architecture.layers:
        heads = architecture.attention_of(layer)
        if not layer.is_linear and isinstance(heads, GroupedAttention):
            owner = replace(heads, borrows_keys=False) if heads.borrows_keys else heads
            kinds[owner, has_pool and layer.window is not None] += 1
    total = 0.0
    for (heads, is_apart), num_layers in kinds.items():
        total += math.ceil(num_layers / spec.pp_size) * on_a_rank(heads) * (share if is_apart else 1.0)
    drafting = architecture.attention
    return total + (num_draft_layers * on_a_rank(drafting) if isinstance(drafting, GroupedAttention) else 0)


def state_bytes_per_request(spec: EngineGroupSpec, architecture: Architecture) -> int:
    """Return the bytes per rank of a request's linear attention: states in float32, inputs of the convolution in bf16, split by heads."""
    linear = architecture.linear_attention
    assert linear is not None
    layers = math.ceil(architecture.num_linear_layers / spec.pp_size)
    return layers * (FP32 * linear.state_elements + BF16 * linear.window_elements) * spec.dp_size // spec.tp_size


def _activations(spec: EngineGroupSpec, memory: EngineMemory) -> MemoryItem:
    """Return the largest of a prefill chunk, a batch's sampling and the scoring of a chunk, plus attention's workspace."""
    settings, architecture = memory.settings, memory.architecture
    tokens = settings.chunked_prefill_tokens
    chunk = tokens * _forward_bytes(spec, architecture, tokens)
    rows = settings.graph_batch * settings.draft_tokens
    sampling = 3 * 4 * rows * architecture.vocab_size
    scored = f", fp32 log-probabilities of a scored chunk ({amount(memory.scored)})" if memory.scored else ""
    note = f"maximum of a prefill chunk of {tokens} tokens ({amount(chunk)}), fp32 logits of {rows} rows ({amount(sampling)}){scored}"
    return MemoryItem("activations", round(max(chunk, sampling, memory.scored)) + WORKSPACE_BYTES, f"{note}; and attention's workspace")


def _forward_bytes(spec: EngineGroupSpec, architecture: Architecture, tokens: int) -> float:
    """Return the bytes per token of a forward pass: four hidden states, and the tensors of attention or the MLP.

    Experts process the tokens of all data-parallel ranks, divided among the expert-parallel ranks.
    """
    hidden, experts, attention_tp = architecture.hidden_size, architecture.experts, spec.tp_size // spec.dp_size
    attention = architecture.attention
    if isinstance(attention, GroupedAttention):
        heads = max(2 * (each.num_heads + each.num_kv_heads) * each.head_dim for each in architecture.grouped_attentions) / attention_tp
    else:
        per_head = 2 * (attention.qk_nope_head_dim + attention.qk_rope_head_dim) + 2 * attention.v_head_dim
        heads = attention.num_heads * per_head / attention_tp
    dense_tp = spec.arguments.get("moe_dense_tp_size") or spec.tp_size
    mlp = 3 * max(layer.dense_size or architecture.intermediate_size for layer in architecture.layers) / dense_tp
    if experts is not None:
        copies = spec.dp_size * experts.num_experts_per_token / spec.ep_size
        width = experts.intermediate_size * spec.ep_size / spec.tp_size
        mlp = max(mlp, copies * (2 * hidden + 3 * width))
    return 2 * (4 * hidden + max(heads, mlp))


def _communication_bytes(spec: EngineGroupSpec) -> int:
    """Return the bytes of NCCL's communicators: tensor-parallel group, attention's group with DP attention, and pipeline."""
    attention_tp = spec.tp_size // spec.dp_size
    num_collective = (spec.tp_size > 1) + (1 < attention_tp < spec.tp_size)
    return num_collective * COLLECTIVE_BYTES + (spec.pp_size > 1) * POINT_TO_POINT_BYTES


def embedded_items(subject: Subject) -> tuple[MemoryItem, ...]:
    """Return the items of the embedded engine's process: weights and the full KV cache."""
    architecture = subject.rollout_architecture
    size = FP32 if subject.config.engine.embedded_dtype == "fp32" else BF16
    tokens = embedded_kv_tokens(subject)
    per_token = size * cached_elements_per_token(architecture)
    applied = 0 if subject.adapter is None or not subject.config.syncs_adapter else subject.adapter.num_parameters
    held = architecture.num_parameters + applied
    note = f"{billions(held)} x {size} bytes{', the adapter included' if applied else ''}"
    return (
        MemoryItem("engine_weights", size * held, note),
        MemoryItem("kv_cache", tokens * per_token, f"{tokens} tokens x {per_token} bytes, at most"),
        MemoryItem("engine", CUDA_CONTEXT_BYTES, "CUDA context of the engine's process"),
    )


def cached_elements_per_token(architecture: Architecture) -> int:
    """Return the number of elements per token in the embedded engine's KV cache, all heads and layers.

    Keys and values are stored in rows of the longer of the two, and all layers in rows of the widest layer. Layers that borrow keys and
    values keep a copy.
    """
    attention = architecture.attention
    if isinstance(attention, LatentAttention):
        longest = max(attention.qk_nope_head_dim + attention.qk_rope_head_dim, attention.v_head_dim)
        return 2 * attention.num_heads * longest * architecture.num_layers
    return architecture.num_cached_layers * max(heads.reserved_kv_elements for heads in architecture.grouped_attentions)


def embedded_kv_tokens(subject: Subject) -> int:
    """Return the size of the embedded engine's KV cache in tokens.

    It is --embedded-max-total-tokens, else the length of the longest sample times the requests that run at a time.
    """
    config = subject.config
    if config.engine.embedded_max_total_tokens is not None:
        return config.engine.embedded_max_total_tokens
    requests = min(
        config.engine.embedded_max_running_requests,
        config.resolved_rollout_concurrency,
        config.resolved_over_sampling_batch_size * config.rollout.n_samples_per_prompt,
    )
    return requests * longest_sample(config)
