"""Timeline of one step: FLOPs and bytes of each phase at measured efficiencies."""

from collections.abc import Iterator
from dataclasses import replace

from fuligo.config.topology import engine_groups
from fuligo.planner import speeds
from fuligo.planner.lengths import AVERAGE_OF_LONGEST, average_prompt, average_response
from fuligo.planner.memory.activations import BF16, FP32
from fuligo.planner.memory.host import moved_bytes
from fuligo.planner.plan import ClusterLayout, Phase
from fuligo.planner.rollout_time import accept_length, policy_servers, rollout_phase, teacher_phase
from fuligo.planner.sampled_groups import LIKELY, has_filter, sampled_groups
from fuligo.planner.subject import Subject
from fuligo.planner.training_time import optimizer_phase, score_phase, train_phase
from fuligo.quantities import amount, magnitude


def phases(subject: Subject, layout: ClusterLayout) -> tuple[Phase, ...]:
    """Return the phases of one step: those of the engines, then those of the trainer.

    In one-step and fully asynchronous modes the engines sample the next rollout while the trainer works.
    """
    config = subject.config
    sampling: tuple[Phase, ...] = ()
    if config.needs_engine and not config.is_sft:
        rollout = rollout_phase(subject, layout)
        teacher = teacher_phase(subject, rollout.duration_s)
        sampling = (rollout,) if teacher is None else (rollout, teacher)
    if sampling and config.debug.debug_rollout_only:
        return sampling
    trainer = [phase for phase in (score_phase(subject, layout), train_phase(subject, layout), optimizer_phase(subject, layout)) if phase]
    weight_sync, sampled_s = _weight_sync(subject), step_seconds(sampling)
    if not sampling or config.rollout.async_mode != "sync":
        start_of_sync = max(sum(phase.duration_s for phase in trainer), sampled_s)
        sync = [replace(weight_sync, start_s=start_of_sync)] if sampling else []
        return (*sampling, *_one_after_another(trainer, 0.0), *sync)
    chain = [*trainer, weight_sync]
    if config.offloads_trainer:
        per_gpu, speed = moved_bytes(subject), speeds.HOST_COPY * subject.gpu.host_bytes_per_s
        note = f"{per_gpu / 1e9:.1f} GB per GPU at {speed / 1e9:.0f} GB/s"
        onload, offload = (Phase(name, "trainer", 0.0, per_gpu / speed, 0.0, note) for name in ("onload", "offload"))
        chain = [onload, *chain, offload]
    return (*sampling, *_one_after_another(chain, sampled_s))


def step_seconds(phases: tuple[Phase, ...]) -> float:
    """Return the end of the last phase."""
    return max((phase.start_s + phase.duration_s for phase in phases), default=0.0)


def assumptions(subject: Subject, layout: ClusterLayout) -> tuple[str, ...]:
    """Return the assumptions of the estimates, in addition to each phase's note."""
    config = subject.config
    stated = [
        f"Responses average {average_response(config)} tokens, {AVERAGE_OF_LONGEST:.0%} of the longest, uniformly distributed; "
        f"prompts {average_prompt(config)} tokens.",
        "Experts get equal shares of the tokens.",
        "Rewards and evaluation take no time.",
        *_sampling_assumptions(subject),
    ]
    if subject.architecture.vision_tower is not None:
        tower = magnitude(subject.architecture.vision_tower.num_parameters)
        passes = "its passes over images take no time and no memory, and image tokens count only as part of --rollout-max-prompt-len"
        images = passes if config.data.multimodal_keys else "the prompts have no images"
        stated.append(f"The vision tower's {tower} weights are counted; {images}.")
    if layout.pp > 1 or layout.tp > 1 or layout.cp > 1 or layout.ep > 1:
        stated.append("Efficiencies were measured with parallel sizes of 2 inside one node and assumed for larger ones.")
    unknown = {spec.model: spec.model_path for spec in engine_groups(config) if spec.num_engines and subject.served_by(spec) is None}
    stated += [
        f"Engines of model {name} are not estimated: {path} has no usable config.json on this machine." for name, path in unknown.items()
    ]
    if config.teacher_from == "engine" and config.algorithm.opd_teacher_url is not None:
        stated.append("The teacher at --opd-teacher-url takes no time.")
    return tuple(stated)


def _sampling_assumptions(subject: Subject) -> Iterator[str]:
    """Yield what is assumed of groups that are not trained on, and of drafts."""
    config, target = subject.config, subject.config.rollout.rollout_batch_size
    if not config.needs_engine or config.is_sft:
        return
    sampled = sampled_groups(subject)
    started = f"a rollout starts {sampled.started:.0f} groups, of which {sampled.finished:.0f} finish, to keep {target}"
    if has_filter(config):
        ends = f"; with probability {sampled.unfilled:.0%}, --max-sampling-waves ends the run before that"
        ends = ends if sampled.unfilled >= LIKELY else ""
        share = f"{100 * subject.assumed.kept_share:.3g}%"
        yield f"--dynamic-sampling-filter-path keeps {share} of the groups (--kept-share): {started}{ends}."
    elif sampled.started > target:
        yield f"With --over-sampling-batch-size {config.rollout.over_sampling_batch_size}, {started}."
    for spec, memory in policy_servers(subject):
        if not (depth := memory.settings.accepted_drafts):
            continue
        tokens = f"{accept_length(subject, memory.settings):.2f} tokens per verification of drafts (--accept-length)"
        if subject.assumed.accept_length is None:
            tokens += f": each of the {depth} drafts in a row is accepted with probability {speeds.DRAFT_ACCEPTANCE:g}"
        is_modelless = str(spec.arguments.get("speculative_algorithm")).upper() == "NGRAM"
        own = "" if is_modelless or memory.settings.drafts_with_own_layers else "; the draft model's time and memory are not counted"
        yield f"Engines {'' if spec.model is None else f'of model {spec.model} '}sample {tokens}{own}."


def _one_after_another(chain: list[Phase], start_s: float) -> Iterator[Phase]:
    for phase in chain:
        yield replace(phase, start_s=start_s)
        start_s += phase.duration_s


def _weight_sync(subject: Subject) -> Phase:
    speed = min(speeds.SYNC_BYTES_PER_S, subject.gpu.link_bytes_per_s)
    if subject.adapter is not None and subject.config.syncs_adapter:
        size = FP32 if subject.config.engine.embedded_dtype == "fp32" else BF16
        num_bytes = size * subject.adapter.num_parameters
        note = f"{amount(num_bytes)}, only the adapter, at {speed / 1e9:.0f} GB/s; the first sync also sends the base weights"
    else:
        architecture = subject.rollout_architecture
        parts = [part for layer in architecture.layers for part in layer.parts] + list(architecture.outer_parts)
        num_bytes = sum(part.num_parameters * (1 if architecture.is_quantized and part.quantizable else 2) for part in parts)
        note = f"{num_bytes / 1e9:.0f} GB, sent in full to each GPU of an engine, at {speed / 1e9:.0f} GB/s"
    return Phase("sync", "trainer", 0.0, num_bytes / speed, 0.0, note)
