"""Host memory of samples: what the driver keeps of rollouts, and what the trainer's ranks get of them to train on (`trainer/shares.py`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from fuligo.config.launcher import chosen_launcher
from fuligo.models.architecture import Architecture
from fuligo.planner.lengths import longest_sample
from fuligo.planner.plan import TrainerRank
from fuligo.planner.subject import Subject

SAMPLE_TOKEN_BYTES = 4 + 1 + 4 + 4 + 4
"""Of a token in `types.Sample`: id, mask, engine's log-probability, version; about four letters of text."""
TRAIN_TOKEN_BYTES = 4 + 1 + 4 + 4 + 4
"""Of one in `types.TrainSample`: id, mask, engine's log-probability, version, advantage."""
SCORE_BYTES = 4
"""Of one log-probability of the trainer, the reference or the teacher, value, or return (fp32)."""
NEW_TOKEN_BYTES = 4 + 4
"""Of these, what is not the sample's own array: id and advantage."""


@dataclass(frozen=True, slots=True)
class SampleBytes:
    """Every sample counted as long as the flags admit: a policy that stops ending its responses makes them so."""

    num_tokens: int
    """Of one rollout that is trained on."""
    sample_token_bytes: int
    """Of a token as the driver keeps it."""
    batch_token_bytes: int
    """Of a token as the trainer gets it."""
    new_token_bytes: int
    """Of these, what the driver did not have in its samples."""
    num_drawn_tokens: int
    """Of all samples that the driver keeps at a time: dropped ones too, and those of rollouts that are sampled ahead."""

    @property
    def drawn(self) -> int:
        return self.num_drawn_tokens * self.sample_token_bytes

    @property
    def new(self) -> int:
        return self.num_tokens * self.new_token_bytes

    def shares(self, number: int, num_replicas: int) -> int:
        """Of the batch that `num_replicas` train on, the parts of so many."""
        return -(-self.num_tokens * number // num_replicas) * self.batch_token_bytes


def sample_bytes(subject: Subject) -> SampleBytes:
    """Of one run."""
    config = subject.config
    routed = routing_bytes(subject.architecture) if config.replays_routing else 0
    own_teacher = config.teacher_from == "trainer"
    scores = SCORE_BYTES * (config.needs_old_logprobs + config.needs_reference + own_teacher + 2 * config.trains_values)
    taught = SCORE_BYTES * (config.teacher_from == "engine")
    num_tokens = config.samples_per_rollout * longest_sample(config)
    oversampled = config.resolved_over_sampling_batch_size / config.rollout.rollout_batch_size
    return SampleBytes(
        num_tokens=num_tokens,
        sample_token_bytes=SAMPLE_TOKEN_BYTES + taught + (routed if config.replays_engine_routing else 0),
        batch_token_bytes=TRAIN_TOKEN_BYTES + scores + taught + routed,
        new_token_bytes=NEW_TOKEN_BYTES + scores + (0 if config.replays_engine_routing else routed),
        num_drawn_tokens=round(num_tokens * oversampled * num_rollouts_at_a_time(subject)),
    )


@dataclass(frozen=True, slots=True)
class SharesHere:
    """How many replicas' parts of a batch one node holds, packed for the ranks and unpacked by them."""

    num_packed: int
    num_unpacked: int


def shares_here(subject: Subject, ranks: Sequence[TrainerRank], num_replicas: int, *, has_driver: bool) -> SharesHere:
    """
    Args:
        ranks: of the node.
        num_replicas: data-parallel replicas of the trainer.
        has_driver: the driver, which packs for all ranks, is on the node.
    """
    if chosen_launcher(subject.config, {}) == "ray":
        # Ranks read in Ray's object store itself, where a node has what its ranks have asked for.
        return SharesHere(num_replicas if has_driver else len({rank.dp for rank in ranks}), num_unpacked=0)
    followers = [rank for rank in ranks if rank.rank > 0]  # rank 0 is the driver, and has it all
    return SharesHere(len({rank.dp for rank in followers}), num_unpacked=len(followers))


def routing_bytes(architecture: Architecture) -> int:
    """Of the experts of one token in all layers that have some (`models/routing.RoutingShape`, which needs numpy)."""
    if architecture.experts is None:
        return 0
    choice = 1 if architecture.experts.num_experts <= 256 else 2
    return choice * architecture.experts.num_experts_per_token * sum(layer.is_moe for layer in architecture.layers)


def num_rollouts_at_a_time(subject: Subject) -> int:
    """Rollouts that the driver holds at once: the one that is trained on, and those that are sampled meanwhile."""
    config = subject.config
    if config.rollout.async_mode == "full":  # `rollout/continuous.py`
        return 1 + ((config.rollout.max_staleness or 0) + 1) * config.weight_sync.update_weights_interval
    return 2 if config.rollout.async_mode == "one-step" else 1
