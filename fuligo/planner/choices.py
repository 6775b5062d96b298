"""Values for unset flags, chosen from the plan: memory, requests and CUDA graphs of engines; compilation and rows of the trainer.

A run on GPUs and `fuligo plan` make the same choices from the same figures, before any rule is checked. Given flags are never changed.
"""

from collections.abc import Callable, Container, Iterable, Iterator
from dataclasses import replace
from functools import partial
from math import ceil

from fuligo.config import Config
from fuligo.config.changes import apply_changes
from fuligo.config.findings import Change
from fuligo.config.rules.cluster import SHARED_FRACTION
from fuligo.config.rules.rule import set_flag
from fuligo.config.topology import EngineGroupSpec, engine_groups, policy_model
from fuligo.errors import ConfigError
from fuligo.layout.megatron import layout_of
from fuligo.planner.gpus import GIB
from fuligo.planner.layout import make_layout
from fuligo.planner.lengths import (
    DEFAULT_PACKED_TOKENS,
    average_prompt,
    average_response,
    longest_prompt,
    longest_sample,
    num_micro_batches,
)
from fuligo.planner.memory.bars import engine_bars, planned_engines, trainer_bars
from fuligo.planner.memory.engine import EngineMemory, state_bytes_per_request
from fuligo.planner.memory.torch_trainer import compiles_layers
from fuligo.planner.plan import Choice
from fuligo.planner.server_settings import given_graph_batch, has_graphs
from fuligo.planner.subject import Subject
from fuligo.quantities import count, gibibytes, magnitude

MAX_REQUESTS = 1024
"""Maximum number of requests that an attention replica runs at a time: the largest measured batch (docs/benchmarks-gpu.md). At this size
decoding of a 135M model is bound by SGLang's scheduler process, and of a 4B model by the bandwidth of its KV cache."""
SPARE_SLOTS = 1
"""Slots of an attention replica beyond its requests in flight. SGLang 0.5.15 counts a request twice while its prompt is prefilled in
chunks: without a spare slot, the last request would wait for another to end, and the rollout would end with this request alone."""
MIN_REQUESTS = 256
"""Minimum number of requests of an engine, even if a wave is smaller, since evaluations send more. By default, SGLang captures CUDA
graphs up to this batch size on GPUs of 60 to 160 GiB."""
KEPT_MARGIN_BYTES = 4 * GIB
"""Memory that must be free beside a trainer that is not offloaded: PyTorch's allocator may hold parts of blocks between kept tensors."""
STATES_PER_REQUEST = 5
"""Maximum number of states of linear attention per running request of an engine: SGLang 0.5.15 keeps further ones for its prefix cache."""
CACHE_MARGIN = 1.25
"""KV cache of an engine that shares its GPUs, relative to all its requests at their longest: prompts may be longer than assumed, and
prefixes of finished requests stay in the cache to be reused."""
SMALLEST_COMPILED = 50_000_000
"""Parameters of the smallest model whose layers are compiled by default. Compiling takes 10 to 30 s and saves 10% of a step at 135 M."""
SMALLEST_ROW_TOKENS = 1024
"""Smallest number of tokens per row to choose: with shorter rows a GPU waits for kernel launches."""
LONGER_ROWS = (12288, 16384, 24576, 32768)
"""Row lengths to choose from where memory allows: long rows are faster, especially with small models (docs/benchmarks-gpu.md)."""
SPARE_SHARE = 0.04
"""Share of a GPU's memory that longer rows must leave free: the plan of a trainer's memory is off by up to 3%."""
RECOMPUTE_ALL = (set_flag("recompute_granularity", "full"), set_flag("recompute_method", "uniform"), set_flag("recompute_num_layers", 1))
_OFFLOADED_ADAM = ("optimizer_cpu_offload", "overlap_cpu_optimizer_d2h_h2d", "use_precision_aware_optimizer")
ADAM_ON_CPU = tuple(set_flag(name, True) for name in _OFFLOADED_ADAM)


def choose(subject: Subject) -> tuple[Subject, tuple[Choice, ...]]:
    """Return the subject with the chosen values, and the choices; nothing is chosen for a CPU."""
    if subject.config.cluster.device == "cpu":
        return subject, ()
    try:
        make_layout(subject)
    except ConfigError:
        return subject, ()  # the rules report the invalid sizes
    chosen: list[Choice] = []
    caches = partial(_cache_choices, places={spec.place for spec in _without_share(subject.config)})
    offload = partial(_offload_choices, cache_choices=caches)
    for choices in (_memory_choices, offload, _engine_choices, caches, _compile_choices, _trainer_choices):
        try:
            found = tuple(choices(subject))
            changed = replace(subject, config=apply_choices(subject.config, found))
        except ConfigError:
            continue  # sizes that allow no layout: the rules report them
        subject = changed
        chosen += found
    return subject, tuple(chosen)


def apply_choices(config: Config, choices: Iterable[Choice]) -> Config:
    """Return the config with the chosen values."""
    return apply_changes(config, [change for choice in choices for change in choice.changes])


def _memory_choices(subject: Subject) -> Iterator[Choice]:
    """Yield the choice of the static memory fraction of engines that share their GPUs with a trainer."""
    if open_groups := _without_share(subject.config):
        changes = tuple(dict.fromkeys(_argument(spec, "mem_fraction_static", SHARED_FRACTION) for spec in open_groups))
        yield Choice(changes, "the trainer keeps some memory of the engines' GPUs")


def _without_share(config: Config) -> list[EngineGroupSpec]:
    """Return the engine groups that share their GPUs with a trainer and have no `mem_fraction_static` set by a flag."""
    groups = engine_groups(config) if config.takes_turns else ()
    return [spec for spec in groups if spec.num_engines and spec.arguments.get("mem_fraction_static") is None]


def _offload_choices(subject: Subject, cache_choices: Callable[[Subject], Iterator[Choice]]) -> Iterator[Choice]:
    """Yield the choice not to offload a colocated trainer whose state fits beside a KV cache for all requests at their longest."""
    config = subject.config
    if not config.takes_turns or config.cluster.offload_train is not None:
        return
    change = set_flag("offload_train", False)
    kept = replace(subject, config=apply_changes(config, [change]))
    kept = replace(kept, config=apply_choices(kept.config, _engine_choices(kept)))
    engines = engine_bars(replace(kept, config=apply_choices(kept.config, cache_choices(kept))))
    if len(engines) < len([spec for spec in engine_groups(config) if spec.num_engines]):
        return  # the memory of an unknown model is not planned
    if any(bar.used_bytes + KEPT_MARGIN_BYTES > bar.capacity_bytes for bar in engines):
        return
    # Check a cache in all the memory beside the trainer: the chosen one is smaller only where fewer requests than a share run at a time.
    longest, sampling = longest_sample(config), _sampling(kept)
    num_engines = sum(spec.num_engines for spec, _ in sampling)
    shares = [min(ceil(requests_wanted(kept) / num_engines), MAX_REQUESTS * spec.dp_size) for spec, _ in sampling]
    if all(_holds(spec, memory, share, longest) for (spec, memory), share in zip(sampling, shares, strict=True)):
        yield Choice((change,), f"beside the trainer, the KV cache still holds all requests, at {longest} tokens each")


def _holds(spec: EngineGroupSpec, memory: EngineMemory, num_requests: int, num_tokens: int) -> bool:
    """Return whether one engine of a group runs this many requests at a time without evicting any, each of `num_tokens`."""
    if memory.kv_tokens * spec.dp_size < num_requests * num_tokens:
        return False
    if not memory.states:
        return True
    num_states = memory.states // state_bytes_per_request(spec, memory.architecture)
    per_request = 1 if spec.arguments.get("disable_radix_cache") else STATES_PER_REQUEST
    return num_states * spec.dp_size >= num_requests * per_request


def _engine_choices(subject: Subject) -> Iterator[Choice]:
    """Yield the choices of requests and CUDA graphs of the engines that sample, then of the requests in flight."""
    config = subject.config
    sampling = _sampling(subject)
    if not sampling or any(memory.kv_tokens < 1 for _, memory in sampling):
        return  # no room for a KV cache is an error, whose fixes would keep the few requests chosen here
    num_engines = sum(spec.num_engines for spec, _ in sampling)
    in_flight = 0
    for spec, memory in sampling:
        requests, reason = _requests(subject, spec, memory, num_engines)
        in_flight += requests * spec.num_engines
        if memory.settings.uses_deepep or spec.arguments.get("speculative_algorithm") is not None:
            continue  # their graphs and requests follow other limits, which have their own rules
        changes = []
        # By default no more are in flight than `requests`; a given --rollout-concurrency may fill the spare slots, which then need graphs.
        may_fill, decides_graphs = config.rollout.rollout_concurrency is not None, _decides_graphs(spec)
        if spec.arguments.get("max_running_requests") is None:
            spare = 0 if may_fill and decides_graphs else SPARE_SLOTS * spec.dp_size
            changes.append(_argument(spec, "max_running_requests", requests + spare))
        if not decides_graphs:
            graphs = max(memory.settings.graph_batch, ceil(requests / spec.dp_size) + (SPARE_SLOTS if may_fill else 0))
            changes.append(_argument(spec, "cuda_graph_max_bs_decode", graphs))
        if changes:
            yield Choice(tuple(changes), reason)
    if in_flight and config.rollout.rollout_concurrency is None:
        engines = f"the requests that {count(num_engines, 'engine')} can run at a time"
        yield Choice((set_flag("rollout_concurrency", in_flight),), engines)


def _cache_choices(subject: Subject, places: Container[tuple[int, int] | None]) -> Iterator[Choice]:
    """Yield the choice of a KV cache no larger than the requests need, for the engine groups at `places`, which share GPUs with a trainer.

    The rest of the memory stays free for the trainer and for other processes. Nothing is chosen if the lengths of requests are unknown:
    those of a user's function, an environment or an agent, of prompts with images and no limit, and of evaluations with their own settings.
    """
    runs = (subject.config, *subject.sharing)
    if any(map(_has_unknown_lengths, runs)):
        return
    longest = max(max(longest_sample(run), longest_prompt(run) + run.eval_rollout.rollout_max_response_len) for run in runs)
    for spec, memory in _sampling(subject):
        requests, arguments = memory.settings.max_running_requests, spec.arguments
        if spec.place not in places or requests is None or memory.states or arguments.get("max_total_tokens") is not None:
            continue
        context = arguments.get("context_length") or memory.architecture.max_position_embeddings
        # SGLang keeps tokens free for each request whose prompt another engine has prefilled.
        reserved = arguments.value("num_reserved_decode_tokens") if spec.worker_type == "decode" else 0
        needed = ceil(ceil(requests / spec.dp_size) * (CACHE_MARGIN * longest + reserved))
        tokens = max(needed, context, 2 * memory.settings.chunked_prefill_tokens)
        if tokens < memory.kv_tokens:
            reason = f"{count(requests, 'request')} of up to {longest} tokens, and a quarter more; the rest of the memory stays free"
            yield Choice((_argument(spec, "max_total_tokens", tokens),), reason)


def _has_unknown_lengths(config: Config) -> bool:
    by_function = config.has_custom_generation or config.rollout.rollout_function_path or config.eval.eval_function_path
    has_open_images = config.data.multimodal_keys and config.max_sample_tokens is None
    return bool(by_function or has_open_images or config.eval.eval_config)


def _sampling(subject: Subject) -> list[tuple[EngineGroupSpec, EngineMemory]]:
    """Return the groups of engines that generate the policy's tokens, and the memory of one GPU of each."""
    planned = [(spec, memory) for _, spec, memory in planned_engines(subject) if spec.worker_type in ("regular", "decode")]
    return [(spec, memory) for spec, memory in planned if spec.model == policy_model(subject.config)]


def _requests(subject: Subject, spec: EngineGroupSpec, memory: EngineMemory, num_engines: int) -> tuple[int, str]:
    """Return the number of requests that one engine of a group runs at a time, and the reason for this number."""
    given = memory.settings.max_running_requests
    if given is not None:
        return given, f"CUDA graphs for all requests that an engine runs ({given})"
    tokens = max(average_prompt(each) + average_response(each) for each in (subject.config, *subject.sharing))
    room = max(1, memory.kv_tokens // tokens) * spec.dp_size
    share = max(MIN_REQUESTS, ceil(requests_wanted(subject) / num_engines))
    most = MAX_REQUESTS * spec.dp_size
    requests = min(share, room, most)
    graphs = memory.settings.graph_batch * spec.dp_size
    if _decides_graphs(spec) and 0 < graphs < requests:
        return graphs, f"an engine's CUDA graphs end at {count(graphs, 'request')}; its share of a rollout is {share}"
    held = magnitude(memory.kv_tokens * spec.dp_size)
    if requests == share:
        return requests, f"an engine's share of a rollout, at least {MIN_REQUESTS}; the GPU has room for a KV cache of {held} tokens"
    if requests == room:
        return requests, f"an engine's KV cache of {held} tokens holds {count(requests, 'sample')} of {tokens} tokens"
    return requests, f"the largest batch to choose by default; an engine's share of a rollout is {share}"


def _decides_graphs(spec: EngineGroupSpec) -> bool:
    """Return whether the user's flags set the CUDA graphs for decoding."""
    return given_graph_batch(spec.arguments) is not None or not has_graphs(spec.arguments, "decode")


def requests_wanted(subject: Subject) -> int:
    """Return the requests that a run, and the runs that share its engines, would have in flight without a limit."""
    total = 0
    for config in (subject.config, *subject.sharing):
        rollout, prompts = config.rollout, config.resolved_over_sampling_batch_size
        if rollout.async_mode == "full":
            prompts = max(prompts, rollout.rollout_batch_size * ((rollout.max_staleness or 0) + 1))
        only_evaluates = not config.data.prompt_data and config.has_eval  # which sends everything at once
        most = MAX_REQUESTS * max(1, config.resolved_rollout_num_gpus)
        total += most if only_evaluates else prompts * rollout.n_samples_per_prompt
    return total


def _argument(spec: EngineGroupSpec, name: str, value: float) -> Change:
    if spec.place is None:
        return Change(("sglang", name), value)
    model, group = spec.place
    return Change(("engine", "sglang_config", model, "server_groups", group, "overrides", name), value)


def _compile_choices(subject: Subject) -> Iterator[Choice]:
    """Yield the choice not to compile the layers of a small model."""
    config, num_parameters = subject.config, subject.architecture.num_parameters
    is_open = config.trains and not subject.is_megatron and config.model.torch_compile is None
    if is_open and compiles_layers(subject) and num_parameters < SMALLEST_COMPILED:
        reason = f"compiling a model of {magnitude(num_parameters)} parameters takes longer than it saves"
        yield Choice((set_flag("torch_compile", False),), reason)


def _trainer_choices(subject: Subject) -> Iterator[Choice]:
    """Yield longer rows if memory allows them, or else the first choice that makes the trainer fit.

    Tried in this order: shorter rows, recomputation, recomputation and Adam on the CPU.
    """
    config, train = subject.config, subject.config.train
    rows_given = train.use_dynamic_batch_size or train.max_tokens_per_gpu is not None or train.micro_batch_size is not None
    if config.debug.debug_rollout_only or rows_given:
        return
    needed = _trainer_excess(subject)
    if needed <= 0:
        yield from _longer_rows(subject)
        return
    for changes, what in _smaller_trainers(subject):
        if _trainer_excess(replace(subject, config=apply_changes(config, changes))) <= 0:
            reason = f"rows of {DEFAULT_PACKED_TOKENS} tokens need {gibibytes(needed)} more than {subject.gpu.name} has"
            yield Choice(changes, f"{what}: {reason}")
            return


def _longer_rows(subject: Subject) -> Iterator[Choice]:
    """Yield the choice of the longest rows that fit and leave an optimizer step fewer micro-batches than shorter ones."""
    config, shape = subject.config, layout_of(subject.config)
    if shape.pp > 1:  # fewer micro-batches would lengthen the pipeline's bubble
        return
    spare = SPARE_SHARE * subject.gpu.memory_bytes
    best, fewest = 0, num_micro_batches(subject, shape)
    for tokens in LONGER_ROWS:
        longer = replace(subject, config=apply_changes(config, _rows(tokens)))
        if _trainer_excess(longer) + spare > 0:
            break
        if (count := num_micro_batches(longer, shape)) < fewest:
            best, fewest = tokens, count
    if best:
        yield Choice(_rows(best), f"rows of {best} tokens fit into {subject.gpu.name}'s memory, and long rows are faster")


def _trainer_excess(subject: Subject) -> int:
    """Return the bytes by which the fullest GPU of the trainer exceeds its memory; negative if it fits."""
    bars = trainer_bars(subject, make_layout(subject))
    return max((bar.used_bytes - bar.capacity_bytes for bar in bars), default=0)


def _smaller_trainers(subject: Subject) -> Iterator[tuple[tuple[Change, ...], str]]:
    """Yield changes that save memory, the cheapest first."""
    config, shape = subject.config, layout_of(subject.config)
    longest = ceil(longest_sample(config) / shape.cp)
    sizes = [tokens for tokens in (4096, 2048, SMALLEST_ROW_TOKENS) if tokens > longest]
    rows = [*sizes, max(longest, SMALLEST_ROW_TOKENS)]
    if subject.is_megatron:
        recompute = RECOMPUTE_ALL if config.parallel.recompute_granularity != "full" else ()
        offload = () if config.optimizer.optimizer_cpu_offload else ADAM_ON_CPU
    else:
        recompute, offload = () if config.model.gradient_checkpointing else (set_flag("gradient_checkpointing", True),), ()
    for tokens in rows:
        yield _rows(tokens), f"rows of {tokens} tokens"
    for extra, what in ((recompute, "recomputation"), (recompute + offload, "recomputation and Adam on the CPU")):
        if extra:
            for tokens in (DEFAULT_PACKED_TOKENS, *rows):
                yield (*_rows(tokens), *extra), f"{what}, rows of {tokens} tokens"


def _rows(tokens: int) -> tuple[Change, ...]:
    return (set_flag("use_dynamic_batch_size", True), set_flag("max_tokens_per_gpu", tokens))
