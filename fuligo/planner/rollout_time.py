"""Time of a rollout and of scoring by a served teacher: prefill is bound by FLOPs, decoding by memory bandwidth and launches."""

from dataclasses import dataclass, replace

from fuligo.config import Config
from fuligo.config.topology import EngineGroupSpec, policy_model
from fuligo.layout.flops import forward_flops
from fuligo.planner import speeds
from fuligo.planner.lengths import average_prompt, average_response
from fuligo.planner.memory.activations import BF16
from fuligo.planner.memory.bars import planned_engines
from fuligo.planner.memory.engine import EngineMemory, embedded_items, is_fp8, serves_teacher
from fuligo.planner.plan import ClusterLayout, Phase
from fuligo.planner.sampled_groups import SampledGroups, sampled_groups
from fuligo.planner.server_settings import ServerSettings
from fuligo.planner.subject import Subject
from fuligo.planner.training_time import rollout_forward_flops
from fuligo.quantities import count, magnitude


@dataclass(frozen=True, slots=True)
class _Decoding:
    """Decoding by the engines of one group."""

    seconds: float
    batch: float
    """Requests that one engine decodes at once, on average."""
    step_s: float
    accept_length: float = 1.0
    """Tokens per request and step."""


def rollout_phase(subject: Subject, layout: ClusterLayout) -> Phase:
    """Estimate the rollout: all sampled responses, kept or not, all engines in parallel."""
    config, sampled = subject.config, sampled_groups(subject)
    forward, prompt, response = forward_flops(subject.rollout_architecture), average_prompt(config), average_response(config)
    square = 2 * prompt * response + (2 * response) ** 2 / 3
    # All tokens without drafts, counting each prompt once.
    flops = sampled.started * forward.sequence(prompt, prompt**2, 0)
    flops += sampled.decoded * config.rollout.n_samples_per_prompt * forward.sequence(response, square, response)
    groups_note = ""
    if sampled.started > config.rollout.rollout_batch_size:
        groups_note = f"; {sampled.started:.0f} groups started for the {config.rollout.rollout_batch_size} to keep"
    if config.engine_capabilities.beside_trainer:
        decoding = _embedded(subject, sampled)
        requests = count(round(decoding.batch), "request")
        note = f"{requests} decoded at once, {decoding.step_s * 1e3:.1f} ms per step, embedded engine{groups_note}"
        return Phase("rollout", "engines", 0.0, decoding.seconds, flops, note)
    groups = policy_servers(subject)
    decoders = [(spec, memory) for spec, memory in groups if spec.worker_type != "prefill"]
    if not decoders:
        return Phase("rollout", "engines", 0.0, 0.0, flops, "external engines: not estimated")
    num_gpus = sum(spec.num_gpus for spec, _ in decoders)
    slowest = max(
        (_decoding(subject, spec, memory, sampled, spec.num_gpus / num_gpus) for spec, memory in decoders), key=lambda each: each.seconds
    )
    prefill_s, prefill_note = _prefill(subject, groups, sampled)
    drafts = "" if slowest.accept_length == 1.0 else f" for {slowest.accept_length:.2f} tokens"
    step = f"{slowest.step_s * 1e3:.1f} ms per step{drafts}"
    note = f"{count(round(slowest.batch), 'request')} decoded at once per engine, {step}; {prefill_note}{groups_note}"
    return Phase("rollout", "engines", 0.0, slowest.seconds + prefill_s, flops, note)


def policy_servers(subject: Subject) -> list[tuple[EngineGroupSpec, EngineMemory]]:
    """Return the groups of servers of the policy, and the memory of one GPU of each; empty with external engines."""
    engines = planned_engines(subject)
    policy = policy_model(subject.config) if engines else None
    return [(spec, memory) for _, spec, memory in engines if spec.model == policy]


def teacher_phase(subject: Subject, rollout_s: float) -> Phase | None:
    """Estimate a served teacher's prefill of every sample; None without one, or if its model is unknown.

    It scores each finished group while others are sampled, so only the last group is left at the end of a rollout of `rollout_s`.
    """
    config = subject.config
    found = [(spec, memory.architecture) for _, spec, memory in planned_engines(subject) if serves_teacher(spec, config)]
    if not found:
        return None
    scored = sampled_groups(subject).finished  # before a filter sees them
    per_kept = scored / config.rollout.rollout_batch_size
    flops = per_kept * rollout_forward_flops(replace(subject, architecture=found[0][1]))
    num_gpus = sum(spec.num_gpus for spec, _ in found)
    seconds = flops / (num_gpus * subject.gpu.bf16_flops * speeds.PREFILL)
    last_s = seconds / scored
    tokens = round(per_kept * config.samples_per_rollout * (average_prompt(config) + average_response(config)))
    note = f"{magnitude(tokens)} tokens at {speeds.PREFILL:.0%} of the peak, during the rollout; only the last group comes after it"
    return Phase("prefill", "teacher", max(0.0, rollout_s + last_s - seconds), seconds, flops, note)


def accept_length(subject: Subject, settings: ServerSettings) -> float:
    """Return the tokens per request and decoding step: one, and the drafts before the first rejected one."""
    depth = settings.accepted_drafts
    if depth and subject.assumed.accept_length is not None:
        return min(subject.assumed.accept_length, depth + 1.0)
    return sum(speeds.DRAFT_ACCEPTANCE**k for k in range(depth + 1))


def _decoding(subject: Subject, spec: EngineGroupSpec, memory: EngineMemory, sampled: SampledGroups, share: float) -> _Decoding:
    """Estimate the decoding of a `share` of the sampled groups by the engines of one group."""
    config, settings, replicas = subject.config, memory.settings, spec.dp_size
    context = average_prompt(config) + average_response(config)
    per_engine = share * config.rollout.n_samples_per_prompt / spec.num_engines
    wave = sampled.wave_size * per_engine
    room = memory.kv_tokens / context * replicas
    in_flight = config.resolved_rollout_concurrency * share / spec.num_engines
    running = max(1.0, min(wave, room, in_flight, settings.max_running_requests or wave))
    tokens_per_step = accept_length(subject, settings)
    tokens = sampled.decoded * per_engine * average_response(config)
    steps = _steps(config, sampled, wave, running, tokens) / tokens_per_step
    batch = min(running, tokens / tokens_per_step / steps)
    bytes_per_s = subject.gpu.memory_bytes_per_s * speeds.DECODE_BANDWIDTH
    layer_s = speeds.DECODE_LAYER_S if running / replicas <= settings.graph_batch else speeds.EAGER_LAYER_S
    # Matrix products read the weights while they compute; attention, which reads the cache, is not hidden behind them.
    step_s = _forward_s(subject, spec, memory, batch) + batch / replicas * context * memory.cached_bytes_per_token / bytes_per_s
    step_s += layer_s * subject.rollout_architecture.num_layers + speeds.DECODE_REQUEST_S * batch / replicas
    if settings.draft_steps:
        step_s += speeds.SPECULATIVE_STEP_S + _draft_s(subject, spec, memory, batch, layer_s)
    arrivals_s = speeds.ARRIVAL_S * running * sampled.num_waves
    return _Decoding(steps * step_s + arrivals_s, batch, step_s, tokens_per_step)


def _steps(config: Config, sampled: SampledGroups, wave: float, running: float, tokens: float) -> float:
    """Return the decoding steps without drafts of an engine that runs up to `running` of a wave's requests at a time."""
    longest = config.rollout.rollout_max_response_len
    if running >= wave:
        return longest * sampled.duration
    return max(longest * sampled.duration, tokens / running + longest / 2)


def _forward_s(subject: Subject, spec: EngineGroupSpec, memory: EngineMemory, batch: float) -> float:
    """Return the seconds of the matrix products that compute, or verify, the next tokens of `batch` requests."""
    architecture, num_tokens = subject.rollout_architecture, batch * memory.settings.draft_tokens
    # The share of the routed experts that no token uses is not read.
    experts = architecture.experts
    untouched = 0.0 if experts is None else (1 - experts.num_experts_per_token / experts.num_experts) ** num_tokens * memory.expert_weights
    read_s = (memory.weights - untouched) / (subject.gpu.memory_bytes_per_s * speeds.DECODE_BANDWIDTH)
    flops = forward_flops(architecture).per_token * num_tokens
    return max(read_s, flops / _engine_flops_per_s(subject, spec))


def _draft_s(subject: Subject, spec: EngineGroupSpec, memory: EngineMemory, batch: float, layer_s: float) -> float:
    """Return the seconds in which the model's own MTP layers draft: as many passes as the drafts are deep, each through the head.

    A separate draft model, whose sizes are unknown, and drafts without a model count as 0.
    """
    architecture = subject.rollout_architecture
    if not memory.settings.drafts_with_own_layers:
        return 0.0
    head_tp = spec.tp_size // spec.dp_size if spec.arguments.get("enable_dp_lm_head") else spec.tp_size
    head = BF16 * architecture.vocab_size * architecture.hidden_size / head_tp
    read_s = (memory.draft_weights + head) / (subject.gpu.memory_bytes_per_s * speeds.DECODE_BANDWIDTH)
    matrices = sum(architecture.active(part) for layer in architecture.mtp_layers for part in layer.parts if part.is_matmul)
    flops = (2.0 * matrices + forward_flops(architecture).per_logit) * batch
    pass_s = max(read_s, flops / _engine_flops_per_s(subject, spec)) + layer_s * len(architecture.mtp_layers)
    return memory.settings.draft_steps * pass_s


def _engine_flops_per_s(subject: Subject, spec: EngineGroupSpec) -> float:
    """Return the FLOP/s that one engine reaches in matrix products of many tokens."""
    peak = subject.gpu.fp8_flops if is_fp8(spec, subject.rollout_architecture) else subject.gpu.bf16_flops
    return spec.num_gpus_per_engine * peak * speeds.PREFILL


def _prefill(subject: Subject, groups: list[tuple[EngineGroupSpec, EngineMemory]], sampled: SampledGroups) -> tuple[float, str]:
    """Return the seconds of the prefill, and a note. Each prompt is computed once, since its other samples hit the prefix cache."""
    config = subject.config
    workers = [spec for spec, _ in groups if spec.worker_type == "prefill"] or [spec for spec, _ in groups if spec.worker_type == "regular"]
    num_gpus = sum(spec.num_gpus for spec in workers)
    if not num_gpus:
        return 0.0, "no engine prefills"
    tokens = round(sampled.started * average_prompt(config))
    flops = tokens * forward_flops(subject.rollout_architecture).per_token
    seconds = flops / (num_gpus * subject.gpu.bf16_flops * speeds.PREFILL)
    return seconds, f"{tokens} prompt tokens in {seconds:.1f} s at {speeds.PREFILL:.0%} of the peak"


def _embedded(subject: Subject, sampled: SampledGroups) -> _Decoding:
    config, architecture = subject.config, subject.rollout_architecture
    weights, cache, _ = embedded_items(subject)
    wave = sampled.wave_size * config.rollout.n_samples_per_prompt
    running = min(wave, config.engine.embedded_max_running_requests, config.resolved_rollout_concurrency)
    tokens = sampled.decoded * config.rollout.n_samples_per_prompt * average_response(config)
    steps = _steps(config, sampled, wave, running, tokens)
    read_s = (weights.num_bytes + cache.num_bytes / 2) / (subject.gpu.memory_bytes_per_s * speeds.DECODE_BANDWIDTH)
    step_s = read_s + speeds.EAGER_LAYER_S * architecture.num_layers
    return _Decoding(steps * step_s, min(running, tokens / steps), step_s)
