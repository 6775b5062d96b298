"""Time of the trainer's phases."""

from math import hypot

from fuligo.layout.flops import forward_flops
from fuligo.layout.megatron import Layout, layout_of
from fuligo.models.architecture import Layer
from fuligo.planner import speeds
from fuligo.planner.lengths import average_prompt, average_response, computed_tokens, num_micro_batches, samples_per_tree
from fuligo.planner.memory.torch_trainer import compiles_layers
from fuligo.planner.memory.trainer import gradient_bytes, offloaded_share, optimizer_parameters, trainer_state
from fuligo.planner.plan import ClusterLayout, Phase
from fuligo.planner.subject import Subject
from fuligo.quantities import count


def train_phase(subject: Subject, layout: ClusterLayout) -> Phase:
    """Estimate the forward and backward passes of all optimizer steps of a rollout."""
    shape, config = layout_of(subject.config), subject.config
    # Frozen weights have no gradients, which are a third of the FLOPs; the gradients of an adapter are too small to count.
    passes = (3 if subject.adapter is None else 2) + recomputed_passes(subject)
    flops = num_trained_models(subject) * passes * trainer_forward_flops(subject, shape)
    efficiency = trainer_efficiency(subject, shape)
    bubble = pipeline_bubble(subject, shape)
    exchange = _expert_exchange_s(subject, shape, layout, passes=1 + 1 + min(1.0, recomputed_passes(subject)))
    exchange *= num_trained_models(subject)
    computed_s = flops / (shape.num_ranks * subject.gpu.bf16_flops * efficiency)
    launched_s = num_trained_models(subject) * (2 + recomputed_passes(subject)) * launch_s(subject, shape, subject.loaded_mtp_layers)
    seconds = _with_launches(subject, computed_s, launched_s) / (1 - bubble) + exchange
    note = f"{passes:g} x forward FLOPs at {efficiency:.0%} of {subject.gpu.bf16_flops / 1e12:.0f} TFLOP/s per GPU"
    if launched_s > computed_s:
        num = num_micro_batches(subject, shape)
        note += f" would take {computed_s:.1f} s, but kernel launches for {num} micro-batch{'' if num == 1 else 'es'} take longer"
    if config.trains_values:
        note += ", of policy and value model"
    if (num_samples := samples_per_tree(config, shape)) > 1:
        note += f", each prompt computed once for {num_samples} responses"
    if shape.pp > 1:
        note += f", pipeline bubble {bubble:.0%} ({count(num_micro_batches(subject, shape), 'micro-batch')})"
    if exchange:
        note += f", {exchange:.1f} s of token exchange with experts on other nodes"
    if config.resolved_num_steps_per_rollout > 1:
        note += f", {config.resolved_num_steps_per_rollout} optimizer steps"
    return Phase("train", "trainer", 0.0, seconds, flops, note)


def score_phase(subject: Subject, layout: ClusterLayout) -> Phase | None:
    """Estimate the scoring before the first optimizer step by reference, teacher, old policy and value model; None if none is needed."""
    config, shape = subject.config, layout_of(subject.config)
    models = (
        ("reference", subject if config.needs_reference else None),
        ("teacher", subject.teacher),
        ("old policy", subject if config.needs_old_logprobs else None),
        ("value model", subject if config.trains_values else None),
    )
    wanted = {name: model for name, model in models if model is not None}
    if not wanted:
        return None
    flops = sum(trainer_forward_flops(model, shape) for model in wanted.values())
    efficiency = trainer_efficiency(subject, shape)
    computed_s = flops / (shape.num_ranks * subject.gpu.bf16_flops * efficiency)
    launched_s = sum(launch_s(model, shape) for model in wanted.values())
    seconds = _with_launches(subject, computed_s, launched_s) / (1 - pipeline_bubble(subject, shape))
    seconds += _expert_exchange_s(subject, shape, layout, passes=len(wanted))
    *others, last = wanted
    listed = f"{', '.join(others)} and {last}" if others else last
    note = f"forward passes of {listed} at {efficiency:.0%} of the peak"
    if launched_s > computed_s:
        note += f" would take {computed_s:.1f} s, but kernel launches take longer"
    # Without an adapter, the reference's weights differ from the policy's.
    swapped = [model for name, model in wanted.items() if name == "teacher" or (name == "reference" and subject.adapter is None)]
    if subject.is_megatron and swapped:
        stages_of = [[stage for stage in layout.stages if stage.pipeline_rank == rank] for rank in range(shape.pp)]
        num_bytes = sum(max(trainer_state(model, shape, stages).weights for stages in stages_of) for model in swapped)
        # Megatron swaps another model's weights in and out: four copies between GPU and host.
        swaps_s = 4 * num_bytes / (speeds.HOST_COPY * subject.gpu.host_bytes_per_s)
        seconds += swaps_s
        note += f", {swaps_s:.1f} s for swaps of weights with the host"
    return Phase("score", "trainer", 0.0, seconds, flops, note)


def optimizer_phase(subject: Subject, layout: ClusterLayout) -> Phase:
    """Estimate gradient reduction, Adam and weight all-gather for all optimizer steps of a rollout."""
    config, shape, gpu = subject.config, layout_of(subject.config), subject.gpu
    num_steps = config.resolved_num_steps_per_rollout * num_trained_models(subject)
    if not subject.is_megatron:
        share = subject.num_trained_parameters / shape.num_ranks
        seconds = num_steps * share * speeds.ADAM_TRAFFIC_BYTES / gpu.memory_bytes_per_s
        return Phase("optimizer", "trainer", 0.0, seconds, 0.0, f"{share / 1e9:.2f} B parameters per GPU at the GPU's memory bandwidth")
    num_ranks_on_node = min(shape.num_ranks, layout.num_gpus_per_node)
    host_adam_bytes_per_s = min(speeds.HOST_ADAM_BYTES_PER_S, num_ranks_on_node * speeds.HOST_ADAM_RANK_BYTES_PER_S)
    slowest, note = 0.0, ""
    for rank in range(shape.pp):
        state = trainer_state(subject, shape, [stage for stage in layout.stages if stage.pipeline_rank == rank])
        sharded = optimizer_parameters(subject, shape, state.trained)
        on_host = offloaded_share(subject)
        on_gpu_s = sharded * (1 - on_host) * speeds.ADAM_TRAFFIC_BYTES / gpu.memory_bytes_per_s
        on_node = sharded * on_host * num_ranks_on_node
        on_host_s = on_node * speeds.ADAM_TRAFFIC_BYTES / host_adam_bytes_per_s
        copied_s = sharded * on_host * (gradient_bytes(subject) + 2) / (speeds.HOST_COPY * gpu.host_bytes_per_s)
        reduced_s = _reduction_s(subject, shape, layout, state.trained.dense, state.trained.experts)
        copies_s = max(copied_s, on_host_s) if config.optimizer.overlap_cpu_optimizer_d2h_h2d else copied_s + on_host_s
        seconds = on_gpu_s + copies_s + reduced_s
        if seconds >= slowest:
            slowest = seconds
            note = f"{sharded / 1e9:.2f} B parameters per GPU; communication of gradients and weights {reduced_s:.2f} s"
            if on_host:
                note += f"; CPU Adam {on_host_s:.1f} s at {host_adam_bytes_per_s / 1e9:.0f} GB/s of host memory, copies {copied_s:.1f} s"
    return Phase("optimizer", "trainer", 0.0, num_steps * slowest, 0.0, note)


def num_trained_models(subject: Subject) -> int:
    """Return the number of trained models: the policy, and a value model of its size."""
    return 1 + subject.config.trains_values


def rollout_forward_flops(subject: Subject, num_sharing: int = 1) -> float:
    """Return the FLOPs of one forward pass over all samples of a rollout, each `num_sharing` of which compute their prompt once.

    Every response still attends to its whole prompt. Lengths are uniform up to the longest, so their mean square is longest^2 / 3.
    """
    config = subject.config
    prompt, response = average_prompt(config), average_response(config)
    square = prompt**2 / num_sharing + 2 * prompt * response + (2 * response) ** 2 / 3
    return config.samples_per_rollout * forward_flops(subject.architecture).sequence(prompt / num_sharing + response, square, response)


def trainer_forward_flops(subject: Subject, shape: Layout) -> float:
    """Return the FLOPs of one forward pass of the trainer over all samples of a rollout, with shared prompts computed once."""
    return rollout_forward_flops(subject, samples_per_tree(subject.config, shape))


def recomputed_passes(subject: Subject) -> float:
    """Return the recomputed share of the forward pass: 1 with full recomputation, a part of the layers with its block method, else 0."""
    flags = subject.config.parallel
    if subject.config.model.gradient_checkpointing:
        return 1.0
    if flags.recompute_granularity != "full" or flags.recompute_method != "block":
        return float(flags.recompute_granularity == "full")
    layers_of_stage = subject.architecture.num_layers / flags.pipeline_model_parallel_size
    return min(1.0, (flags.recompute_num_layers or 1) / layers_of_stage)


def pipeline_bubble(subject: Subject, shape: Layout) -> float:
    """Return the share of time that a stage waits: (pp - 1) / (m v + pp - 1) (Narayanan et al. 2021, arXiv 2104.04473, section 2.2)."""
    return (shape.pp - 1) / (num_micro_batches(subject, shape) * shape.vpp + shape.pp - 1)


def trainer_efficiency(subject: Subject, shape: Layout) -> float:
    """Return the share of the GPU's dense bf16 peak that the trainer reaches, without the pipeline bubble."""
    if not subject.is_megatron:
        return speeds.TORCH_TRAINER if compiles_layers(subject) else speeds.TORCH_EAGER
    factor, has_experts = speeds.DENSE_ONE_GPU, subject.architecture.experts is not None
    for applies, share in (
        (shape.tp > 1, speeds.WITH_TP),
        (shape.cp > 1, speeds.WITH_CP),
        (shape.pp > 1, speeds.WITH_PP),
        (has_experts, speeds.WITH_EXPERTS),
        (has_experts and shape.ep > 1, speeds.WITH_EP),
        (subject.config.megatron.get("fp8_format") is not None, speeds.WITH_FP8),
    ):
        factor *= share if applies else 1
    return factor


def _with_launches(subject: Subject, computed_s: float, launched_s: float) -> float:
    """Return the seconds of passes whose computation and whose kernel launches alone would take these times.

    The torch trainer does not hide all of the shorter one: with similar times, the GPU waits for some launches.
    """
    return max(computed_s, launched_s) if subject.is_megatron else hypot(computed_s, launched_s)


def launch_s(subject: Subject, shape: Layout, extra_layers: tuple[Layer, ...] = ()) -> float:
    """Return the least seconds of a forward or backward pass over a rollout: the time of its kernel launches.

    The CPU launches the kernels of a stage's layers, `extra_layers` among them, for each micro-batch.
    """
    layers = (*subject.architecture.layers, *extra_layers)
    num_experts_layers = sum(layer.is_moe for layer in layers) if subject.is_megatron else 0
    other = speeds.LAUNCH_COMPILED_S if not subject.is_megatron and compiles_layers(subject) else speeds.LAUNCH_LAYER_S
    per_micro_batch = num_experts_layers * speeds.LAUNCH_EXPERTS_S + (len(layers) - num_experts_layers) * other
    num_passes = num_micro_batches(subject, shape) * subject.config.resolved_num_steps_per_rollout
    return num_passes * per_micro_batch / shape.pp


def _expert_exchange_s(subject: Subject, shape: Layout, layout: ClusterLayout, passes: float) -> float:
    """Return the seconds of dispatch and combine over the network if an expert group spans nodes; a token travels to each node once."""
    experts, per_node = subject.architecture.experts, layout.num_gpus_per_node
    if experts is None or shape.ep * shape.etp <= per_node:
        return 0.0
    num_nodes = shape.ep * shape.etp / per_node
    destinations = min(experts.num_experts_per_token, num_nodes) * (num_nodes - 1) / num_nodes
    num_layers = sum(layer.is_moe for layer in subject.architecture.layers)
    config = subject.config
    tokens = config.samples_per_rollout * computed_tokens(config, shape)
    num_bytes = tokens * num_layers * 2 * destinations * subject.architecture.hidden_size * 2 * passes
    return num_bytes / (shape.num_ranks * subject.gpu.network_bytes_per_s)


def _reduction_s(subject: Subject, shape: Layout, layout: ClusterLayout, dense: int, experts: int) -> float:
    """Return the seconds of the gradient reduce-scatter and the bf16 weight all-gather among data-parallel ranks, without overlap."""
    size = gradient_bytes(subject) + 2

    def seconds(num_parameters: int, num_ranks: int, stride: int) -> float:
        inside = num_ranks * stride <= layout.num_gpus_per_node
        speed = subject.gpu.link_bytes_per_s if inside else subject.gpu.network_bytes_per_s
        return num_parameters * size * (num_ranks - 1) / num_ranks / speed

    return seconds(dense, shape.shards_dense_optimizer, shape.tp) + seconds(experts, shape.expert_dp, shape.etp * shape.ep)
