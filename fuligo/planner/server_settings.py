"""Defaults of an SGLang server that depend on the GPU.

Rules of SGLang 0.5.15.post1 (`srt/server_args.py`: `_handle_gpu_memory_settings`, `_handle_data_parallelism`;
`srt/arg_groups/speculative_hook.py`), NVIDIA GPUs.
"""

from dataclasses import dataclass, replace
from typing import Any, Literal

from fuligo.config.passthrough import SglangArguments
from fuligo.config.topology import EngineGroupSpec
from fuligo.models.architecture import Architecture, LatentAttention
from fuligo.planner.gpus import GIB, MIB, Gpu

DEFAULT_PREFILL_TOKENS = 16384
"""Default of `max_prefill_tokens`."""
SPECULATIVE_REQUESTS = 48
"""Default of `max_running_requests` with speculative decoding, shared by the attention replicas."""

LLAMA_TREE, CHAIN = (5, 4, 8), (3, 1, 4)
"""Defaults of speculative decoding: steps, branches and draft tokens, for LlamaForCausalLM and for other models."""
NGRAM_TOKENS, NGRAM_BREADTH, DFLASH_TOKENS = 12, 10, 16
"""Defaults of draft tokens, and of the branches of NGRAM."""


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Resolved settings of one server."""

    mem_fraction_static: float
    chunked_prefill_tokens: int
    """Chunk size of one data-parallel rank of attention."""
    graph_batch: int
    """Largest decoding batch with a CUDA graph; 0 without graphs."""
    num_prefill_graphs: int
    max_running_requests: int | None
    """Limit of the whole server; None: limited only by its memory."""
    uses_deepep: bool
    drafts_with_own_layers: bool
    draft_steps: int
    """Depth of the drafts; 0 without speculative decoding."""
    draft_tokens: int
    """Tokens verified per decoding step; 1 without speculative decoding."""

    @property
    def accepted_drafts(self) -> int:
        """Largest number of drafts that one decoding step accepts; one of the verified tokens is not a draft."""
        return min(self.draft_steps, self.draft_tokens - 1)


@dataclass(frozen=True, slots=True)
class _Size:
    """SGLang's defaults for GPUs below a memory size."""

    below_mib: float
    chunk: int
    batch: int
    wide_batch: int
    """Batch with tensor-parallel size 4 or more."""


_SIZES = (
    _Size(20 * 1024, 2048, 8, 8),
    _Size(35 * 1024, 2048, 24, 80),
    _Size(60 * 1024, 4096, 32, 160),
    _Size(160 * 1024, 8192, 256, 512),
    _Size(float("inf"), 16384, 512, 512),
)


def server_settings(spec: EngineGroupSpec, architecture: Architecture, gpu: Gpu) -> ServerSettings:
    """Resolve the settings of the servers of one group on `gpu`."""
    arguments = spec.arguments
    size = next(size for size in _SIZES if gpu.memory_bytes / MIB < size.below_mib)
    chunk = arguments.get("chunked_prefill_size") or size.chunk
    if chunk < 0:  # no chunks: one prefill of up to max_prefill_tokens
        chunk = arguments.get("max_prefill_tokens") or DEFAULT_PREFILL_TOKENS
    if spec.worker_type == "prefill" or not has_graphs(arguments, "decode"):
        batch = 0
    else:
        batch = given_graph_batch(arguments) or (size.batch if spec.tp_size < 4 else size.wide_batch)
    draft_steps, draft_tokens = _drafts(spec, architecture)
    num_prefill_graphs = 0
    if spec.worker_type != "decode" and has_graphs(arguments, "prefill"):
        # As `_generate_prefill_cuda_graph_batch_sizes` captures them, up to a chunk.
        ranges = ((4, 33, 4), (48, 257, 16), (288, 513, 32), (576, 1025, 64), (1280, 4097, 256), (4608, chunk + 1, 512))
        num_prefill_graphs = sum(size <= chunk for bounds in ranges for size in range(*bounds))
    settings = ServerSettings(
        mem_fraction_static=0.0,
        chunked_prefill_tokens=max(1, chunk // spec.dp_size),
        graph_batch=batch,
        num_prefill_graphs=num_prefill_graphs,
        max_running_requests=max_running_requests(spec),
        uses_deepep=arguments.get("moe_a2a_backend") == "deepep",
        drafts_with_own_layers=spec.drafts_with_own_layers,
        draft_steps=draft_steps,
        draft_tokens=draft_tokens,
    )
    given = arguments.get("mem_fraction_static")
    fraction = _default_fraction(spec, architecture, gpu, settings, chunk) if given is None else float(given)
    return replace(settings, mem_fraction_static=fraction)


def has_graphs(arguments: SglangArguments, phase: Literal["decode", "prefill"]) -> bool:
    """Return whether a server captures CUDA graphs for a phase (`_parse_cuda_graph_config`)."""
    backend = _graph_setting(arguments, phase, "backend")
    if backend is not None:
        return backend != "disabled"
    return not arguments.get(f"disable_{phase}_cuda_graph") and not arguments.get("disable_cuda_graph")


def given_graph_batch(arguments: SglangArguments) -> int | None:
    """Return the largest decoding batch for which the arguments ask for a CUDA graph; None if they leave it to SGLang."""
    batches = _graph_setting(arguments, "decode", "bs")
    return max(map(int, batches)) if batches else _graph_setting(arguments, "decode", "max_bs")


def _graph_setting(arguments: SglangArguments, phase: str, name: str) -> Any:
    """Return a setting of a phase's graphs: that of --sglang-cuda-graph-config, which wins, else of its own flag."""
    phases = arguments.get("cuda_graph_config")
    settings = phases.get(phase) if isinstance(phases, dict) else None
    if isinstance(settings, dict) and name in settings:
        return settings[name]
    return arguments.get(f"cuda_graph_{name}_{phase}")


def _drafts(spec: EngineGroupSpec, architecture: Architecture) -> tuple[int, int]:
    """Return the depth of the drafts and the number of tokens to verify (`_auto_choose_speculative_params`, `_handle_ngram`)."""
    arguments, algorithm = spec.arguments, str(spec.arguments.get("speculative_algorithm") or "").upper()
    if not algorithm:
        return 0, 1
    steps, branches, tokens = (arguments.get(f"speculative_{name}") for name in ("num_steps", "eagle_topk", "num_draft_tokens"))
    if algorithm == "NGRAM":
        tokens = tokens or NGRAM_TOKENS
        return steps or max(1, tokens // (arguments.get("speculative_ngram_max_bfs_breadth") or NGRAM_BREADTH)), tokens
    if algorithm == "DFLASH":
        tokens = tokens or DFLASH_TOKENS
        return tokens - 1, tokens
    if steps is None:
        has_tree = architecture.model_type == "llama" and algorithm != "STANDALONE"
        steps, branches, tokens = LLAMA_TREE if has_tree else CHAIN
    return steps, steps + 1 if branches in (None, 1) else tokens or steps + 1


def max_running_requests(spec: EngineGroupSpec) -> int | None:
    """Return the maximum number of requests that one server runs at a time; None: limited only by its memory."""
    default = None if spec.arguments.get("speculative_algorithm") is None else SPECULATIVE_REQUESTS
    return spec.arguments.get("max_running_requests") or default


def prefill_graph_bytes(settings: ServerSettings, architecture: Architecture) -> int:
    """Return SGLang's own estimate: 8 MiB per graph, or 1.5 GiB in total with latent attention."""
    if not settings.num_prefill_graphs:
        return 0
    return 3 * GIB // 2 if isinstance(architecture.attention, LatentAttention) else 8 * MIB * settings.num_prefill_graphs


def decode_graph_bytes(settings: ServerSettings) -> int:
    """Return SGLang's own estimate: 2 MiB per sequence of the largest batch."""
    return 2 * MIB * settings.graph_batch


def _default_fraction(spec: EngineGroupSpec, architecture: Architecture, gpu: Gpu, settings: ServerSettings, chunk: int) -> float:
    """Return SGLang's default of --mem-fraction-static: the share of the GPU left after a reserve."""
    reserve = 512.0
    if spec.worker_type == "decode":
        # SGLang computes this before it sets the defaults of speculative decoding.
        running = spec.arguments.get("max_running_requests") or settings.graph_batch or 1
        reserve += max(running * (spec.arguments.get("speculative_num_draft_tokens") or 1), 2048) * 1.5
    else:
        reserve += max(chunk, 2048) * 1.5
    reserve += settings.graph_batch * 2 + spec.tp_size * spec.pp_size / 8 * 1024
    if spec.dp_size > 1 and spec.worker_type != "prefill":
        reserve += settings.graph_batch * spec.dp_size * (4.5 if settings.graph_batch > 300 else 3)
    reserve += prefill_graph_bytes(settings, architecture) / MIB
    memory = gpu.memory_bytes / MIB
    if memory > 60 * 1024:
        reserve = max(reserve, 10 * 1024)
    if settings.uses_deepep and settings.graph_batch:
        reserve += 2 * 1024
    return round((memory - reserve) / memory, 3)
