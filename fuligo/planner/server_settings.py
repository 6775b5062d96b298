"""What an SGLang server makes of its arguments where they are not given: the sizes that depend on the GPU.

Rules of SGLang 0.5.15.post1 (`srt/server_args.py`: `_handle_gpu_memory_settings`, `_handle_data_parallelism`;
`srt/arg_groups/speculative_hook.py`), NVIDIA GPUs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from fuligo.config.topology import EngineGroupSpec
from fuligo.models.architecture import Architecture, LatentAttention
from fuligo.planner.gpus import GIB, MIB, Gpu

DEFAULT_PREFILL_TOKENS = 16384
"""`max_prefill_tokens` where it is not given."""
SPECULATIVE_REQUESTS = 48
"""`max_running_requests` of a server that drafts, where it is not given; its attention replicas share them."""
DRAFTS_OF_MODEL = ("EAGLE", "NEXTN")
"""Speculative algorithms whose draft is the model's own layer for multi-token prediction."""


@dataclass(frozen=True, slots=True)
class ServerSettings:
    """Of one server."""

    mem_fraction_static: float
    chunked_prefill_tokens: int
    """Of one data-parallel rank of attention."""
    graph_batch: int
    """Largest batch with a CUDA graph for decoding; 0 where there are none."""
    num_prefill_graphs: int
    max_running_requests: int | None
    """Of the whole server."""
    uses_deepep: bool
    drafts_with_own_layers: bool
    draft_tokens: int
    """Tokens that one decoding step verifies; 1 without speculative decoding."""


@dataclass(frozen=True, slots=True)
class _Size:
    """What SGLang chooses for GPUs below a size in MiB."""

    below_mib: float
    chunk: int
    batch: int
    wide_batch: int
    """From tensor-parallel size 4 on."""


_SIZES = (
    _Size(20 * 1024, 2048, 8, 8),
    _Size(35 * 1024, 2048, 24, 80),
    _Size(60 * 1024, 4096, 32, 160),
    _Size(160 * 1024, 8192, 256, 512),
    _Size(float("inf"), 16384, 512, 512),
)


def server_settings(spec: EngineGroupSpec, architecture: Architecture, gpu: Gpu) -> ServerSettings:
    """The settings of the servers of one group on `gpu`."""
    arguments = spec.arguments
    size = next(size for size in _SIZES if gpu.memory_bytes / MIB < size.below_mib)
    chunk = arguments.get("chunked_prefill_size") or size.chunk
    if chunk < 0:  # one piece, up to the largest batch of prompts
        chunk = arguments.get("max_prefill_tokens") or DEFAULT_PREFILL_TOKENS
    batch = _graph_batch(spec, size)
    algorithm = arguments.get("speculative_algorithm")
    num_prefill_graphs = 0 if spec.worker_type == "decode" or arguments.get("disable_prefill_cuda_graph") else _num_prefill_graphs(chunk)
    settings = ServerSettings(
        mem_fraction_static=0.0,
        chunked_prefill_tokens=max(1, chunk // spec.dp_size),
        graph_batch=batch,
        num_prefill_graphs=num_prefill_graphs,
        max_running_requests=max_running_requests(spec),
        uses_deepep=arguments.get("moe_a2a_backend") == "deepep",
        drafts_with_own_layers=algorithm in DRAFTS_OF_MODEL and arguments.get("speculative_draft_model_path") is None,
        draft_tokens=1 if algorithm is None else arguments.get("speculative_num_draft_tokens") or 1,
    )
    given = arguments.get("mem_fraction_static")
    fraction = _default_fraction(spec, architecture, gpu, settings, chunk) if given is None else float(given)
    return replace(settings, mem_fraction_static=fraction)


def max_running_requests(spec: EngineGroupSpec) -> int | None:
    """Of one server; None: as many as its memory holds."""
    default = None if spec.arguments.get("speculative_algorithm") is None else SPECULATIVE_REQUESTS
    return spec.arguments.get("max_running_requests") or default


def _graph_batch(spec: EngineGroupSpec, size: _Size) -> int:
    arguments = spec.arguments
    if spec.worker_type == "prefill" or arguments.get("disable_decode_cuda_graph"):
        return 0
    given = arguments.get("cuda_graph_bs_decode")
    if given:
        return max(int(batch) for batch in given)
    return arguments.get("cuda_graph_max_bs_decode") or (size.batch if spec.tp_size < 4 else size.wide_batch)


def _num_prefill_graphs(chunk: int) -> int:
    """Sizes that `_generate_prefill_cuda_graph_batch_sizes` captures up to a chunk."""
    ranges = ((4, 33, 4), (48, 257, 16), (288, 513, 32), (576, 1025, 64), (1280, 4097, 256), (4608, chunk + 1, 512))
    return sum(1 for bounds in ranges for size in range(*bounds) if size <= chunk)


def prefill_graph_bytes(settings: ServerSettings, architecture: Architecture) -> int:
    """SGLang's own reckoning: 8 MiB a graph, or 1.5 GiB together with latent attention."""
    if not settings.num_prefill_graphs:
        return 0
    return 3 * GIB // 2 if isinstance(architecture.attention, LatentAttention) else 8 * MIB * settings.num_prefill_graphs


def decode_graph_bytes(settings: ServerSettings) -> int:
    """SGLang's own reckoning: 2 MiB for each sequence of the largest batch."""
    return 2 * MIB * settings.graph_batch


def _default_fraction(spec: EngineGroupSpec, architecture: Architecture, gpu: Gpu, settings: ServerSettings, chunk: int) -> float:
    """--mem-fraction-static where it is not given: what is left of the GPU after a reserve, in MiB."""
    reserve = 512.0
    if spec.worker_type == "decode":
        # Reckoned before SGLang limits a server that drafts.
        running = spec.arguments.get("max_running_requests") or settings.graph_batch or 1
        reserve += max(running * settings.draft_tokens, 2048) * 1.5
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
