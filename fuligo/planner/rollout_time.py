"""Time of a rollout and of scoring by a served teacher: prefill is bound by FLOPs, decoding by memory bandwidth and launches."""

from dataclasses import dataclass, replace

from fuligo.config.topology import EngineGroupSpec, policy_model
from fuligo.layout.flops import forward_flops
from fuligo.planner import speeds
from fuligo.planner.lengths import average_prompt, average_response
from fuligo.planner.memory.bars import planned_engines
from fuligo.planner.memory.engine import EngineMemory, embedded_items, is_fp8, serves_teacher
from fuligo.planner.plan import ClusterLayout, Phase
from fuligo.planner.subject import Subject
from fuligo.planner.training_time import rollout_forward_flops
from fuligo.quantities import magnitude


@dataclass(frozen=True, slots=True)
class _Decoding:
    """Decoding by the engines of one group."""

    seconds: float
    batch: float
    """Requests that one engine decodes at once, on average."""
    step_s: float


def rollout_phase(subject: Subject, layout: ClusterLayout) -> Phase:
    """Estimate the rollout: all kept responses, all engines in parallel."""
    config = subject.config
    requests = config.samples_per_rollout
    flops = _flops(subject, requests)
    if config.engine_capabilities.beside_trainer:
        decoding = _embedded(subject, requests)
        note = f"{decoding.batch:.0f} requests decoded at once, {decoding.step_s * 1e3:.1f} ms per step, embedded engine"
        return Phase("rollout", "engines", 0.0, decoding.seconds, flops, note)
    engines = planned_engines(subject)
    policy = policy_model(config) if engines else None
    groups = [(spec, memory) for _, spec, memory in engines if spec.model == policy]
    decoders = [(spec, memory) for spec, memory in groups if spec.worker_type != "prefill"]
    if not decoders:
        return Phase("rollout", "engines", 0.0, 0.0, flops, "external engines: not estimated")
    num_gpus = sum(spec.num_gpus for spec, _ in decoders)
    slowest = max(
        (_decoding(subject, spec, memory, requests * spec.num_gpus / num_gpus) for spec, memory in decoders), key=lambda each: each.seconds
    )
    prefill_s, prefill_note = _prefill(subject, groups)
    note = f"{slowest.batch:.0f} requests decoded at once per engine, {slowest.step_s * 1e3:.1f} ms per step; {prefill_note}"
    return Phase("rollout", "engines", 0.0, slowest.seconds + prefill_s, flops, note)


def teacher_phase(subject: Subject, rollout_s: float) -> Phase | None:
    """Estimate a served teacher's prefill of every sample; None without one, or if its model is unknown.

    It scores each finished group while others are sampled, so only the last group is left at the end of a rollout of `rollout_s`.
    """
    config = subject.config
    found = [(spec, memory.architecture) for _, spec, memory in planned_engines(subject) if serves_teacher(spec, config)]
    if not found:
        return None
    flops = rollout_forward_flops(replace(subject, architecture=found[0][1]))
    num_gpus = sum(spec.num_gpus for spec, _ in found)
    seconds = flops / (num_gpus * subject.gpu.bf16_flops * speeds.PREFILL)
    last_s = seconds / config.rollout.rollout_batch_size
    tokens = config.samples_per_rollout * (average_prompt(config) + average_response(config))
    note = f"{magnitude(tokens)} tokens at {speeds.PREFILL:.0%} of the peak, during the rollout; only the last group comes after it"
    return Phase("prefill", "teacher", max(0.0, rollout_s + last_s - seconds), seconds, flops, note)


def _decoding(subject: Subject, spec: EngineGroupSpec, memory: EngineMemory, requests: float) -> _Decoding:
    """Estimate the decoding of `requests` by the engines of one group."""
    config, architecture = subject.config, subject.rollout_architecture
    response = average_response(config)
    context = average_prompt(config) + response
    replicas = spec.dp_size
    per_engine = requests / spec.num_engines
    room = memory.kv_tokens / context * replicas
    running = max(1.0, min(per_engine, room, memory.settings.max_running_requests or per_engine))
    # One token, and the draft tokens before the first rejected one.
    tokens_per_step = sum(speeds.DRAFT_ACCEPTANCE**k for k in range(memory.settings.draft_tokens))
    tokens = per_engine * response
    longest = config.rollout.rollout_max_response_len
    steps = (longest if running >= per_engine else max(longest, tokens / running + longest / 2)) / tokens_per_step
    batch = tokens / tokens_per_step / steps
    experts = architecture.experts
    touched = 1.0 if experts is None else 1 - (1 - experts.num_experts_per_token / experts.num_experts) ** (batch * tokens_per_step)
    weights = memory.weights - memory.expert_weights * (1 - touched)
    cached = batch / replicas * context * memory.cached_bytes_per_token
    peak = subject.gpu.fp8_flops if is_fp8(spec, architecture) else subject.gpu.bf16_flops
    computed = (
        forward_flops(architecture).per_token * batch * memory.settings.draft_tokens / (spec.num_gpus_per_engine * peak * speeds.PREFILL)
    )
    bytes_per_s = subject.gpu.memory_bytes_per_s * speeds.DECODE_BANDWIDTH
    has_graph = running / replicas <= memory.settings.graph_batch
    layer_s = speeds.DECODE_LAYER_S if has_graph else speeds.EAGER_LAYER_S
    # Matrix products read the weights while they compute; attention, which reads the cache, is not hidden behind them.
    step_s = max(weights / bytes_per_s, computed) + cached / bytes_per_s
    step_s += layer_s * architecture.num_layers + speeds.DECODE_REQUEST_S * batch / replicas
    return _Decoding(steps * step_s + speeds.ARRIVAL_S * running, batch, step_s)


def _prefill(subject: Subject, groups: list[tuple[EngineGroupSpec, EngineMemory]]) -> tuple[float, str]:
    """Return the seconds of the prefill, and a note. Each prompt is computed once, since its other samples hit the prefix cache."""
    config = subject.config
    workers = [spec for spec, _ in groups if spec.worker_type == "prefill"] or [spec for spec, _ in groups if spec.worker_type == "regular"]
    num_gpus = sum(spec.num_gpus for spec in workers)
    if not num_gpus:
        return 0.0, "no engine prefills"
    tokens = config.rollout.rollout_batch_size * average_prompt(config)
    flops = tokens * forward_flops(subject.rollout_architecture).per_token
    seconds = flops / (num_gpus * subject.gpu.bf16_flops * speeds.PREFILL)
    return seconds, f"{tokens} prompt tokens in {seconds:.1f} s at {speeds.PREFILL:.0%} of the peak"


def _embedded(subject: Subject, requests: int) -> _Decoding:
    config, architecture = subject.config, subject.rollout_architecture
    weights, cache, _ = embedded_items(subject)
    response = average_response(config)
    running = min(requests, config.engine.embedded_max_running_requests, config.resolved_rollout_concurrency)
    longest = 2 * response
    steps = longest if running >= requests else max(longest, requests * response / running + longest / 2)
    read_s = (weights.num_bytes + cache.num_bytes / 2) / (subject.gpu.memory_bytes_per_s * speeds.DECODE_BANDWIDTH)
    step_s = read_s + speeds.EAGER_LAYER_S * architecture.num_layers
    return _Decoding(steps * step_s, requests * response / steps, step_s)


def _flops(subject: Subject, requests: int) -> float:
    """Return the FLOPs of all tokens, counting each prompt once."""
    config, forward = subject.config, forward_flops(subject.rollout_architecture)
    prompt, response = average_prompt(config), average_response(config)
    square = 2 * prompt * response + (2 * response) ** 2 / 3
    prompts = config.rollout.rollout_batch_size * forward.sequence(prompt, prompt**2, 0)
    return prompts + requests * forward.sequence(response, square, response)
