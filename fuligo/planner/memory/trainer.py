"""Peak memory of a GPU of the Megatron trainer, pipeline rank by pipeline rank."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from fuligo.config import Config
from fuligo.layout.adapter import Matrix
from fuligo.layout.megatron import Layout, layout_of
from fuligo.models.architecture import Layer
from fuligo.planner.layout import stage_layers
from fuligo.planner.lengths import micro_batch_tokens, num_micro_batches
from fuligo.planner.memory.activations import BF16, FP32, LayerBytes, chunks_in_flight, layer_bytes, logits_bytes
from fuligo.planner.memory.parameters import (
    COLLECTIVE_BYTES,
    CUDA_CONTEXT_BYTES,
    DEEPEP_BYTES,
    FRAGMENTATION,
    POINT_TO_POINT_BYTES,
    SPLIT_FRAGMENTATION,
    TRAINER_HELD_BYTES,
    TRAINER_WORKSPACE_BYTES,
    LocalParameters,
    adapter_parameters,
    billions,
    frozen_parameters,
    local_parameters,
    trained_parameters,
)
from fuligo.planner.plan import ClusterLayout, MemoryItem, Stage
from fuligo.planner.subject import Subject
from fuligo.quantities import amount

DTYPE_BYTES = {"fp32": 4, "bf16": 2, "fp16": 2, "fp8": 1}
ADAM_BYTES_ON_HOST = 16
"""Bytes per parameter with the optimizer on the CPU: fp32 weight, gradient and two moments (Megatron-Core, `hybrid_optimizer`)."""


@dataclass(frozen=True, slots=True)
class TrainerState:
    """Persistent state of a trainer rank: numbers of parameters, and bytes."""

    trained: LocalParameters
    """Number of trained parameters: those of the adapter in a LoRA run."""
    frozen: LocalParameters
    """Number of frozen parameters."""
    weights: int
    """Bytes of the model's weights without the adapter."""
    adapter: int
    """Bytes of the adapter's weights."""
    gradients: int
    """Bytes of the gradient buffer."""
    optimizer: int
    """Bytes of the optimizer state on the GPU."""
    optimizer_on_host: int
    """Bytes of the optimizer state on the CPU."""


def trainer_state(subject: Subject, shape: Layout, stages: list[Stage]) -> TrainerState:
    trained, frozen = trained_parameters(subject, shape, stages), frozen_parameters(subject, shape, stages)
    sharded = optimizer_parameters(subject, shape, trained)
    on_host = offloaded_share(subject)
    adapter = 0 if subject.adapter is None else trained.total
    return TrainerState(
        trained=trained,
        frozen=frozen,
        weights=BF16 * (trained.total - adapter + frozen.total),
        adapter=FP32 * adapter,
        gradients=gradient_bytes(subject) * trained.total,
        optimizer=round(adam_bytes(subject) * sharded * (1 - on_host)),
        optimizer_on_host=round(ADAM_BYTES_ON_HOST * sharded * on_host),
    )


def optimizer_parameters(subject: Subject, shape: Layout, trained: LocalParameters) -> int:
    """Return the number of parameters whose optimizer state is on one rank; the distributed optimizer shards it over DP ranks."""
    if not subject.config.optimizer.use_distributed_optimizer:
        return trained.total
    return trained.dense // shape.shards_dense_optimizer + trained.experts // shape.expert_dp


def gradient_bytes(subject: Subject) -> int:
    """Return the bytes per parameter in the gradient buffer of Megatron's DDP: fp32 by default (Megatron-LM, `validate_args`).

    An adapter is fp32, and so are its gradients.
    """
    return BF16 if subject.config.megatron.get("grad_reduce_in_bf16") and subject.adapter is None else FP32


def adam_bytes(subject: Subject) -> int:
    """Return the optimizer's bytes per parameter on the GPU: fp32 weight and two moments.

    The precision-aware optimizer takes their dtypes from flags and stores only the 16 bits of an fp32 weight that the bf16 weight lacks
    (Megatron-Core, `OptimizerConfig.store_param_remainders`), unless a part of the state is on the CPU: `HybridDeviceOptimizer` knows fp32
    only. An adapter is fp32 itself: its state is two moments only.
    """
    if subject.adapter is not None:
        return 2 * FP32
    if not subject.config.optimizer.use_precision_aware_optimizer or subject.config.optimizer.optimizer_cpu_offload:
        return 3 * FP32
    megatron = subject.config.megatron
    names = ("main_params_dtype", "exp_avg_dtype", "exp_avg_sq_dtype")
    main, first, second = (DTYPE_BYTES.get(str(megatron.get(name) or "fp32"), FP32) for name in names)
    keeps_remainder = main == FP32 and megatron.get("store_param_remainders") is not False
    return (BF16 if keeps_remainder else main) + first + second


def offloaded_share(subject: Subject) -> float:
    """Return the share of the optimizer on the CPU: 0 without --optimizer-cpu-offload, else --optimizer-offload-fraction (default 1)."""
    if not subject.config.optimizer.optimizer_cpu_offload:
        return 0.0
    given = subject.config.megatron.get("optimizer_offload_fraction")
    return 1.0 if given is None else float(given)


def trainer_items(subject: Subject, layout: ClusterLayout, pipeline_rank: int) -> tuple[MemoryItem, ...]:
    """Return the parts of the peak memory of a GPU of `pipeline_rank`, without engines."""
    shape = layout_of(subject.config)
    stages = [stage for stage in layout.stages if stage.pipeline_rank == pipeline_rank]
    state = trainer_state(subject, shape, stages)
    activations = _activations(subject, shape, stages, pipeline_rank)
    passing = (*activations, _fragmentation(_sum(activations), state.optimizer if offloaded_share(subject) else None))
    gradients = _main_gradients(subject, shape, state)
    return (
        *_state_items(subject, shape, state),
        *_value_items(subject, shape, stages),
        *_fp8_items(subject, shape, stages),
        *(gradients if _sum(gradients) > _sum(passing) else passing),
        *_communication(subject, shape),
        MemoryItem("workspace", TRAINER_WORKSPACE_BYTES, "Transformer Engine, cuBLAS and the micro-batch; measured"),
        MemoryItem("runtime", CUDA_CONTEXT_BYTES, "CUDA context, kernels, cuBLAS workspace"),
    )


def trainer_resident_bytes(subject: Subject) -> int:
    """Return the bytes that an offloaded trainer keeps on a GPU before its first step, when engines start."""
    shape = layout_of(subject.config)
    return CUDA_CONTEXT_BYTES + (TRAINER_WORKSPACE_BYTES if subject.is_megatron else 0) + _sum(_communication(subject, shape))


def _sum(items: Iterable[MemoryItem]) -> int:
    return sum(item.num_bytes for item in items)


def _fragmentation(moving: int, optimizer: int | None) -> MemoryItem:
    """Return the memory lost to fragmentation with `moving` bytes of temporary tensors.

    It is at most `moving` if the optimizer's state is on the GPU only (`optimizer` is None). Otherwise the optimizer step leaves gaps as
    well, more of them the more bytes of the state are on the GPU (`optimizer`).
    """
    held = TRAINER_HELD_BYTES + round(FRAGMENTATION * moving)
    share = f"{FRAGMENTATION:.0%} of the activations' {amount(moving)}"
    if optimizer is None:
        held, share = min(moving, held), f"{share}, but at most {amount(moving)}"
    elif optimizer:
        held += round(SPLIT_FRAGMENTATION * optimizer)
        share += f" and {SPLIT_FRAGMENTATION:.0%} of the optimizer's {amount(optimizer)}"
    note = f"held by PyTorch and CUDA in addition to tensors: {amount(TRAINER_HELD_BYTES)} plus {share}"
    return MemoryItem("fragmentation", held, note)


def _main_gradients(subject: Subject, shape: Layout, state: TrainerState) -> tuple[MemoryItem, ...]:
    """Return the fp32 copy of bf16 gradients that exists during the optimizer step, when activations do not.

    See `distrib_optimizer._copy_model_grads_to_main_grads`; the precision-aware optimizer needs no copy.
    """
    if gradient_bytes(subject) == FP32 or subject.config.optimizer.use_precision_aware_optimizer:
        return ()
    sharded = round(optimizer_parameters(subject, shape, state.trained) * (1 - offloaded_share(subject)))
    note = f"{billions(sharded)} x 4 bytes: fp32 copy of the bf16 gradients for the optimizer step, when activations are freed"
    return (MemoryItem("main_gradients", FP32 * sharded, note),)


def _state_items(subject: Subject, shape: Layout, state: TrainerState) -> Iterator[MemoryItem]:
    trained, adapter = state.trained, subject.adapter
    base = trained if adapter is None else state.frozen
    split = f"({billions(base.dense)} dense over TP {shape.tp}"
    if base.experts:
        split += f", {billions(base.experts)} of experts over EP {shape.ep} x ETP {shape.etp}"
    if adapter is None:
        frozen = f", {billions(state.frozen.total)} frozen MTP parameters" if state.frozen.total else ""
        note = f"{billions((trained + state.frozen).total)} parameters per GPU {split}{frozen}) x 2 bytes"
        yield MemoryItem("weights", state.weights, note)
    else:
        yield MemoryItem("weights", state.weights, f"{billions(base.total)} parameters per GPU {split}), frozen, x 2 bytes")
        held = f"{billions(trained.total)} parameters of the adapter of rank {adapter.config.rank} per GPU"
        yield MemoryItem("adapter", state.adapter, f"{held} x 4 bytes, fp32")
    size = gradient_bytes(subject)
    kind = "fp32" if size == FP32 else "bf16"
    yield MemoryItem("gradients", state.gradients, f"{billions(trained.total)} x {size} bytes ({kind} buffer of DDP)")
    sharded = optimizer_parameters(subject, shape, trained)
    spread = f"{billions(sharded)} of {billions(trained.total)} parameters"
    if subject.config.optimizer.use_distributed_optimizer:
        experts = f", experts over expert DP {shape.expert_dp}" if trained.experts else ""
        spread += f" (dense over DP x CP {shape.shards_dense_optimizer}{experts})"
    share = offloaded_share(subject)
    where = f", {share:.0%} of the state on the CPU" if share else ""
    yield MemoryItem("optimizer", state.optimizer, f"{spread} x {adam_bytes(subject)} bytes{where}")


def _value_items(subject: Subject, shape: Layout, stages: list[Stage]) -> Iterator[MemoryItem]:
    if subject.config.trains_values:
        state = trainer_state(subject.value_model, shape, stages)
        num_bytes = state.weights + state.gradients + state.optimizer
        note = f"{billions(state.trained.total + state.frozen.total)} parameters per GPU: weights, gradients and optimizer as the policy's"
        yield MemoryItem("value_model", num_bytes, f"{note}; all other memory is shared with the policy in turns")


def _fp8_items(subject: Subject, shape: Layout, stages: list[Stage]) -> Iterator[MemoryItem]:
    """Yield TransformerEngine's FP8 copies of the linear layers' weights, one by rows and one by columns (--fp8-format)."""
    if subject.config.megatron.get("fp8_format") is not None:
        layers = [layer for stage in stages for layer in stage_layers(subject.architecture, stage)]
        linear = local_parameters([part for layer in layers for part in layer.parts if part.quantizable], shape).total
        yield MemoryItem("fp8_weights", 2 * linear, f"{billions(linear)} parameters of linear layers x 2 bytes: by rows and by columns")


def _activations(subject: Subject, shape: Layout, stages: list[Stage], pipeline_rank: int) -> list[MemoryItem]:
    """Return the activations kept for the backward pass, and the largest temporary tensors allocated at the same time."""
    config, architecture = subject.config, subject.architecture
    tokens = micro_batch_tokens(config, shape)
    in_flight = chunks_in_flight(shape, pipeline_rank, num_micro_batches(subject, shape))
    chunks = [_chunk(stage_layers(architecture, stage), subject, shape) for stage in stages]
    if stages[-1].has_head:
        chunks[-1] += _chunk(subject.loaded_mtp_layers, subject, shape)
    stored = max(_stored(chunk, config) for chunk in chunks)
    if shape.vpp > 1:  # outputs of interleaved stages are kept until their backward pass
        stored += BF16 * architecture.hidden_size / shape.shards_sequence
    copies = 0  # of A and B in bf16, which a stage's forward pass casts and keeps unless it is computed again
    if subject.adapter is not None and config.parallel.recompute_granularity != "full":
        copies = BF16 * max(adapter_parameters(subject.adapter, shape, [stage]).total for stage in stages)
    each = f"{tokens} tokens x {stored / 1024:.0f} KiB"
    if copies:
        each = f"({each} + {amount(copies)} of A and B in bf16)"
    recompute = config.parallel.recompute_granularity or "no"
    note = f"{each} x {in_flight} micro-batch{'' if in_flight == 1 else 'es'} in flight; {recompute} recomputation"
    items = [MemoryItem("activations", round((tokens * stored + copies) * in_flight), note)]
    layer_work = tokens * max((_working(chunk, config) for chunk in chunks if chunk), default=0.0)
    logits = logits_bytes(architecture, shape, min(config.train.log_probs_chunk_size, tokens)) if stages[-1].has_head else 0
    if logits > layer_work:
        note = f"fp32 and twice bf16 [{min(config.train.log_probs_chunk_size, tokens)}, {architecture.vocab_size} / TP {shape.tp}]"
        return [*items, MemoryItem("logits", logits, f"{note}; a layer's backward pass ({amount(layer_work)}) comes later")]
    note = "recomputed activations and gradients" if config.parallel.recompute_granularity else "gradients"
    beside = f"; logits ({amount(logits)}) are freed by then" if logits else ""
    return [*items, MemoryItem("backward", round(layer_work), f"one layer's backward pass: {note} of {tokens} tokens{beside}")]


def _chunk(layers: Iterable[Layer], subject: Subject, shape: Layout) -> list[LayerBytes]:
    """Return the activation bytes of each of the consecutive `layers`, computed once per kind of layer."""
    adapter = subject.adapter
    kinds: dict[tuple[bool, bool, tuple[Matrix, ...]], LayerBytes] = {}
    chunk = []
    for layer in layers:
        kind = layer.is_moe, layer.computes_index, () if adapter is None else adapter.adapted(layer)
        if kind not in kinds:
            kinds[kind] = layer_bytes(layer, subject.architecture, shape, subject.config, adapter)
        chunk.append(kinds[kind])
    return chunk


def _stored(chunk: list[LayerBytes], config: Config) -> float:
    """Return the bytes per token that a forward pass of `chunk` keeps."""
    flags = config.parallel
    if flags.recompute_granularity != "full":
        return sum(layer.stored for layer in chunk)
    count = flags.recompute_num_layers or 1
    if flags.recompute_method == "block":
        return sum(layer.entry for layer in chunk[:count]) + sum(layer.whole for layer in chunk[count:])
    return sum(layer.entry for layer in chunk[::count])


def _working(chunk: list[LayerBytes], config: Config) -> float:
    """Return the temporary bytes per token of the backward pass of `chunk`: recomputed activations and gradients."""
    flags = config.parallel
    passing = max(layer.passing for layer in chunk)
    if flags.recompute_granularity == "selective":
        return passing + max(layer.whole - layer.stored for layer in chunk)
    if flags.recompute_granularity is None:
        return passing
    count = 1 if flags.recompute_method == "block" else flags.recompute_num_layers or 1
    return passing + max(sum(layer.whole for layer in chunk[start : start + count]) for start in range(0, len(chunk), count))


def _communication(subject: Subject, shape: Layout) -> Iterator[MemoryItem]:
    """Yield the NCCL buffers of each group of ranks, by its operations, and DeepEP's buffers."""
    flags = subject.config.parallel
    deepep = flags.moe_enable_deepep and shape.ep > 1
    collective, point_to_point = COLLECTIVE_BYTES, POINT_TO_POINT_BYTES
    has_experts, is_tied = subject.architecture.experts is not None, subject.architecture.head is None
    sizes = {
        "TP": (shape.tp, collective),
        "CP": (shape.cp, collective if flags.allgather_cp else point_to_point + collective),  # log-probabilities are gathered
        "PP": (shape.pp, point_to_point + collective),  # activations, and the weight sync
        "DP x CP": (shape.shards_dense_optimizer, collective),
        "EP": (1 if deepep else shape.ep, collective if flags.moe_token_dispatcher_type == "allgather" else point_to_point),
        "experts' TP x EP": (shape.etp * shape.ep if has_experts else 1, collective),
        "expert DP": (shape.expert_dp if has_experts and subject.is_megatron else 1, collective),
        "embedding": (shape.pp if is_tied else 1, collective),
        "gradient norm": (shape.num_ranks, collective),
        "all ranks": (shape.num_ranks, collective),
    }
    if held := {name: num_bytes for name, (size, num_bytes) in sizes.items() if size > 1}:
        each = ", ".join(f"{name} {amount(num_bytes)}" for name, num_bytes in held.items())
        yield MemoryItem("communication", sum(held.values()), f"NCCL buffers: {each}")
    if deepep:
        yield MemoryItem("deepep", DEEPEP_BYTES, "DeepEP's dispatch buffers")
