"""Host memory of the fullest node: optimizer, reference, teacher, offloaded tensors, engines, and samples (`trainer/shares.py`)."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from fuligo.config import Config
from fuligo.config.launcher import chosen_launcher
from fuligo.config.topology import EngineGroupSpec, keeps_draft, policy_model
from fuligo.layout.megatron import layout_of
from fuligo.models.architecture import Architecture
from fuligo.planner.layout import stages
from fuligo.planner.lengths import longest_sample
from fuligo.planner.memory.activations import BF16
from fuligo.planner.memory.engine import EngineMemory
from fuligo.planner.memory.torch_trainer import torch_offloaded_items
from fuligo.planner.memory.trainer import TrainerState, trainer_state
from fuligo.planner.plan import ClusterLayout, MemoryItem, PlacedGpu, TrainerRank
from fuligo.planner.subject import Subject
from fuligo.quantities import amount, count, magnitude

SAMPLE_TOKEN_BYTES = 4 + 1 + 4 + 4 + 4
"""Bytes of a token in `types.Sample`: id, mask, engine's log-probability, version; about four letters of text."""
TRAIN_TOKEN_BYTES = 4 + 1 + 4 + 4 + 4
"""Bytes of a token in `types.TrainSample`: id, mask, engine's log-probability, version, advantage."""
SCORE_BYTES = 4
"""Bytes of one log-probability of trainer, reference or teacher, one value, or one return (fp32)."""
NEW_TOKEN_BYTES = 4 + 4
"""Part of `TRAIN_TOKEN_BYTES` in arrays that are not shared with the `Sample`: id and advantage."""
STANDBY_BYTES = 400_000_000
"""Bytes of a process that has imported torch and the trainer (`trainer/ranks/standby.py`), measured without TransformerEngine."""


@dataclass(frozen=True, slots=True)
class SampleBytes:
    """Sizes of samples at the longest length that the flags allow, which a degenerate policy reaches."""

    num_tokens: int
    """Tokens of one rollout to train on."""
    sample_token_bytes: int
    """Bytes per token on the driver."""
    batch_token_bytes: int
    """Bytes per token in the trainer's batch."""
    new_token_bytes: int
    """Part of `batch_token_bytes` that the driver holds in addition to its samples."""
    num_drawn_tokens: int
    """Tokens of all samples on the driver at a time, including dropped ones and rollouts sampled ahead."""

    @property
    def drawn(self) -> int:
        return self.num_drawn_tokens * self.sample_token_bytes

    @property
    def new(self) -> int:
        return self.num_tokens * self.new_token_bytes

    def shares(self, number: int, num_replicas: int) -> int:
        """Return the bytes of the parts of a batch for `number` of `num_replicas` data-parallel replicas."""
        return -(-self.num_tokens * number // num_replicas) * self.batch_token_bytes


def sample_bytes(subject: Subject) -> SampleBytes:
    config = subject.config
    routed = routing_bytes(subject.architecture) if config.replays_routing else 0
    own_teacher = config.teacher_from == "trainer"
    scores = SCORE_BYTES * (config.needs_old_logprobs + config.needs_reference + own_teacher + 2 * config.trains_values)
    teacher = SCORE_BYTES * (config.teacher_from == "engine")
    num_tokens = config.samples_per_rollout * longest_sample(config)
    oversampled = config.resolved_over_sampling_batch_size / config.rollout.rollout_batch_size
    return SampleBytes(
        num_tokens=num_tokens,
        sample_token_bytes=SAMPLE_TOKEN_BYTES + teacher + (routed if config.replays_engine_routing else 0),
        batch_token_bytes=TRAIN_TOKEN_BYTES + scores + teacher + routed,
        new_token_bytes=NEW_TOKEN_BYTES + scores + (0 if config.replays_engine_routing else routed),
        num_drawn_tokens=round(num_tokens * oversampled * num_rollouts_at_a_time(subject)),
    )


def shares_here(subject: Subject, ranks: Sequence[TrainerRank], num_replicas: int, *, has_driver: bool) -> tuple[int, int]:
    """Return the numbers of shares of a batch in the memory of one node: as the driver packs them, and as ranks have unpacked them.

    Each data-parallel replica has one share. If the driver runs there (`has_driver`), it packs the shares of all ranks.
    """
    if chosen_launcher(subject.config, {}) == "ray":
        # Ranks read from Ray's object store, which holds on a node what its ranks requested.
        return num_replicas if has_driver else len({rank.dp for rank in ranks}), 0
    followers = [rank for rank in ranks if rank.rank > 0]  # rank 0 is the driver, which has the whole batch
    return len({rank.dp for rank in followers}), len(followers)


def routing_bytes(architecture: Architecture) -> int:
    """Return the bytes of one token's routing (as `models/routing.RoutingShape`, which needs numpy)."""
    if architecture.experts is None:
        return 0
    choice = 1 if architecture.experts.num_experts <= 256 else 2
    return choice * architecture.experts.num_experts_per_token * sum(layer.is_moe for layer in architecture.layers)


def num_rollouts_at_a_time(subject: Subject) -> int:
    """Return the rollouts that the driver holds at once: the one in training, and those sampled meanwhile."""
    config = subject.config
    if config.rollout.async_mode == "full":  # `rollout/continuous.py`
        return 1 + ((config.rollout.max_staleness or 0) + 1) * config.weight_sync.update_weights_interval
    return 2 if config.rollout.async_mode == "one-step" else 1


DRIVER_NODE = 0
"""Node of `fuligo train`: Ray's head, which comes first."""


@dataclass(frozen=True, slots=True)
class EngineOnHost:
    """Host memory of a server per GPU, in bytes; each GPU has its own process."""

    record: int
    """Record of experts, pinned."""
    weights: int
    """Weights that are never synced (those of another model, or of MTP layers for drafting), kept here while the trainer has the GPU."""


def engine_on_host(config: Config, spec: EngineGroupSpec, memory: EngineMemory) -> EngineOnHost:
    """Return the host memory per GPU for the servers of one group."""
    shares_gpus = config.cluster.colocate and not config.debug.debug_rollout_only
    is_restored = shares_gpus and spec.model != policy_model(config)
    draft = memory.draft_weights if shares_gpus and keeps_draft(config, spec) else 0
    return EngineOnHost(memory.record.host_bytes, memory.weights if is_restored else draft)


def host_items(subject: Subject, layout: ClusterLayout, engines: Mapping[int, EngineOnHost]) -> tuple[MemoryItem, ...]:
    """Return the items of the node that needs most memory. `engines`: engine group -> host memory per GPU."""
    states = _states(subject, layout)
    value_states = _states(subject.value_model, layout) if subject.config.trains_values else []
    nodes: list[list[PlacedGpu]] = [[] for _ in range(layout.num_nodes)]
    for placed in layout.gpus:
        nodes[placed.node].append(placed)
    found: list[list[MemoryItem]] = []
    for node, gpus in enumerate(nodes):
        ranks = [gpu.trainer for gpu in gpus if gpu.trainer is not None]
        items: list[MemoryItem] = []
        if states:
            items += _state_items(subject, [states[rank.pp] for rank in ranks])
        elif subject.config.offloads_trainer:
            items += torch_offloaded_items(subject, len(ranks))
        if value_states:
            items += _value_items(subject, [value_states[rank.pp] for rank in ranks])
        if any(rank.rank == 0 for rank in ranks):
            note = "bf16 weights of the MTP layer, which rank 0 keeps for checkpoints and exports (--mtp-num-layers 1 loads it)"
            items.append(MemoryItem("mtp_layer", BF16 * subject.num_carried_mtp_parameters, note))
        items += _sample_items(subject, ranks, layout.dp, has_driver=node == DRIVER_NODE)
        if subject.config.checkpoint.max_restarts > 0 and chosen_launcher(subject.config, {}) != "ray":  # standby processes of ranks
            items.append(MemoryItem("standbys", len(ranks) * STANDBY_BYTES, f"{count(len(ranks), 'rank')} in reserve (--max-restarts)"))
        items += _engine_items([engines[gpu.engine.group] for gpu in gpus if gpu.engine is not None and gpu.engine.group in engines])
        found.append(items)
    return tuple(item for item in max(found, key=lambda items: sum(item.num_bytes for item in items)) if item.num_bytes)


def moved_bytes(subject: Subject) -> int:
    """Return the bytes of a trainer GPU's state that moves to the host while the engines sample, on the GPU that has most.

    Raises ConfigError if the layers cannot be split over the pipeline ranks.
    """
    if not subject.is_megatron:
        return sum(item.num_bytes for item in torch_offloaded_items(subject, num_ranks=1))
    shape, placed = layout_of(subject.config), stages(subject)
    models = [subject, subject.value_model] if subject.config.trains_values else [subject]

    def moved(pipeline_rank: int) -> int:
        own = [stage for stage in placed if stage.pipeline_rank == pipeline_rank]
        states = [trainer_state(model, shape, own) for model in models]
        return sum(state.weights + state.adapter + state.optimizer for state in states)

    return max(map(moved, range(shape.pp)))


def _states(subject: Subject, layout: ClusterLayout) -> list[TrainerState]:
    """Return the states of the Megatron trainer by pipeline rank; empty for the torch trainer."""
    if not subject.is_megatron:
        return []
    shape = layout_of(subject.config)
    return [trainer_state(subject, shape, [stage for stage in layout.stages if stage.pipeline_rank == rank]) for rank in range(layout.pp)]


def _state_items(subject: Subject, ranks: Sequence[TrainerState]) -> Iterator[MemoryItem]:
    config, gpus = subject.config, count(len(ranks), "GPU")
    one_copy, adapter = sum(rank.weights for rank in ranks), sum(rank.adapter for rank in ranks)
    adam = sum(rank.optimizer_on_host for rank in ranks)
    has_teacher = config.teacher_from == "trainer"
    has_reference = config.needs_reference and subject.adapter is None  # with an adapter, the reference is the policy without it
    swapped = has_reference or has_teacher or config.offloads_trainer
    moments = sum(rank.optimizer for rank in ranks) if config.offloads_trainer else 0
    yield MemoryItem("optimizer", adam, f"CPU Adam of {gpus}: fp32 weight, gradient and two moments, 16 bytes per parameter")
    yield MemoryItem("reference", one_copy if has_reference else 0, f"bf16 weights of the reference model, {gpus}")
    yield MemoryItem("teacher", one_copy if has_teacher else 0, f"bf16 weights of the teacher, {gpus}")
    users = {"the reference": has_reference, "the teacher": has_teacher, "the engines": config.offloads_trainer}
    then = f"while the GPUs are used by {' or '.join(user for user, is_one in users.items() if is_one)}"
    yield MemoryItem("weights", one_copy if swapped else 0, f"bf16 weights of the policy {then}")
    yield MemoryItem("adapter", adapter if swapped else 0, f"fp32 weights of the adapter {then}")
    yield MemoryItem("offloaded_optimizer", moments, f"{amount(moments)} of optimizer state while the engines have the GPUs")


def _value_items(subject: Subject, ranks: Sequence[TrainerState]) -> Iterator[MemoryItem]:
    on_cpu = sum(rank.optimizer_on_host for rank in ranks)
    away = sum(rank.weights + rank.optimizer for rank in ranks) if subject.config.offloads_trainer else 0
    note = f"the value model's CPU Adam ({amount(on_cpu)}), and weights and optimizer while the engines have the GPUs ({amount(away)})"
    yield MemoryItem("value_model", on_cpu + away, note)


def _sample_items(subject: Subject, ranks: Sequence[TrainerRank], num_replicas: int, *, has_driver: bool) -> Iterator[MemoryItem]:
    """Yield the rollouts of the driver, and the batches of the node's trainer ranks."""
    samples = sample_bytes(subject)
    if has_driver:
        held = f"{magnitude(samples.num_drawn_tokens)} tokens x {samples.sample_token_bytes} bytes"
        note = f"the driver, {count(num_rollouts_at_a_time(subject), 'rollout')} at a time: {held}, every sample at its longest"
        yield MemoryItem("samples", samples.drawn, note)
    if ranks:
        num_packed, num_unpacked = shares_here(subject, ranks, num_replicas, has_driver=has_driver)
        held = f"{magnitude(samples.num_tokens)} tokens x {samples.batch_token_bytes} bytes"
        unpacked = f" and {num_unpacked} unpacked by ranks" if num_unpacked else ""
        made = f"; {samples.new_token_bytes} bytes per token that the driver adds to its samples" if has_driver else ""
        note = f"{held} over {count(num_replicas, 'replica')}: {count(num_packed, 'share')} packed{unpacked}{made}"
        num_bytes = samples.shares(num_packed + num_unpacked, num_replicas) + (samples.new if has_driver else 0)
        yield MemoryItem("batches", num_bytes, note)


def _engine_items(engines: Sequence[EngineOnHost]) -> Iterator[MemoryItem]:
    for name, sizes, what in (
        (
            "routing_record",
            [engine.record for engine in engines],
            "SGLang's record of experts, pinned, one entry per token of the KV cache",
        ),
        (
            "engine_weights",
            [engine.weights for engine in engines],
            "models and MTP layers that are never synced, while the trainer has the GPUs",
        ),
    ):
        held = [size for size in sizes if size]
        yield MemoryItem(name, sum(held), f"{what}: {count(len(held), 'GPU')} x up to {amount(max(held, default=0))}")
