"""Host memory of samples: rollouts on the driver, and the batches of the trainer's ranks (`trainer/shares.py`)."""

from collections.abc import Sequence
from dataclasses import dataclass

from fuligo.config.launcher import chosen_launcher
from fuligo.models.architecture import Architecture
from fuligo.planner.lengths import longest_sample
from fuligo.planner.plan import TrainerRank
from fuligo.planner.subject import Subject

SAMPLE_TOKEN_BYTES = 4 + 1 + 4 + 4 + 4
"""A token in `types.Sample`: id, mask, engine's log-probability, version; about four letters of text."""
TRAIN_TOKEN_BYTES = 4 + 1 + 4 + 4 + 4
"""A token in `types.TrainSample`: id, mask, engine's log-probability, version, advantage."""
SCORE_BYTES = 4
"""One log-probability of trainer, reference or teacher, one value, or one return (fp32)."""
NEW_TOKEN_BYTES = 4 + 4
"""Part of `TRAIN_TOKEN_BYTES` that does not share the sample's arrays: id and advantage."""


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
    """Part of `batch_token_bytes` that the driver's samples do not have."""
    num_drawn_tokens: int
    """Tokens of all samples on the driver at a time, including dropped ones and rollouts sampled ahead."""

    @property
    def drawn(self) -> int:
        return self.num_drawn_tokens * self.sample_token_bytes

    @property
    def new(self) -> int:
        return self.num_tokens * self.new_token_bytes

    def shares(self, number: int, num_replicas: int) -> int:
        """Return the bytes of the batch's shares of `number` out of `num_replicas` replicas."""
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


@dataclass(frozen=True, slots=True)
class SharesHere:
    """Number of replicas' shares of a batch on one node, packed for the ranks and unpacked by them."""

    num_packed: int
    num_unpacked: int


def shares_here(subject: Subject, ranks: Sequence[TrainerRank], num_replicas: int, *, has_driver: bool) -> SharesHere:
    """Return the shares of a batch on one node, which may have the driver, which packs for all ranks."""
    if chosen_launcher(subject.config, {}) == "ray":
        # Ranks read from Ray's object store, which holds on a node what its ranks requested.
        return SharesHere(num_replicas if has_driver else len({rank.dp for rank in ranks}), num_unpacked=0)
    followers = [rank for rank in ranks if rank.rank > 0]  # rank 0 is the driver, which has the whole batch
    return SharesHere(len({rank.dp for rank in followers}), num_unpacked=len(followers))


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
