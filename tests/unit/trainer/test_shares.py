"""Each replica gets the samples that it computes and the counts of the whole step; nothing else depends on the division."""

import pickle
from dataclasses import fields, replace
from pathlib import Path

import numpy as np
import pytest

from fuligo.formats.hugging_face import read_config_json
from fuligo.layout.flops import forward_flops
from fuligo.layout.megatron import Layout
from fuligo.models.registry import architecture_of
from fuligo.trainer.megatron_backend.settings import MegatronTrainerSettings
from fuligo.trainer.objective import LossSettings
from fuligo.trainer.packing import Capacity, sequence_flops
from fuligo.trainer.ranks.settings import LearningRateSchedule, OptimizerSettings, TrainerSettings
from fuligo.trainer.shares import SampleScores, join_by_position, score_shares, skip_metrics, step_shares
from fuligo.trainer.step import StepSamples
from fuligo.trainer.torch_backend.settings import TorchTrainerSettings
from fuligo.types import TrainBatch, TrainSample
from tests import train_batches

LENGTHS = [(4, 9), (1, 3), (6, 9), (2, 1), (5, 14), (3, 9), (7, 6), (8, 2), (4, 30)] * 3
FLOPS = sequence_flops(linear=1000.0, attention=4.0)
COMMON = TrainerSettings(
    hf_checkpoint=Path(),
    initial_weights=Path(),
    optimizer=OptimizerSettings(LearningRateSchedule(peak=1e-3)),
    capacity=Capacity(max_tokens=34),
    score_capacity=Capacity(max_tokens=50),
)


def megatron(layout: Layout, **given: object) -> MegatronTrainerSettings:
    common = {field.name: getattr(COMMON, field.name) for field in fields(COMMON)}
    return MegatronTrainerSettings(**{**common, "layout": layout, "num_ranks": layout.num_ranks, **given})


TRAINERS = {
    "torch, 1": COMMON,
    "torch, 4": replace(COMMON, num_ranks=4),
    "tp2 pp2": megatron(Layout(tp=2, pp=2, num_ranks=4)),
    "cp2 dp2": megatron(Layout(cp=2, num_ranks=4)),
    "pp2 vpp2 dp4": megatron(Layout(pp=2, vpp=2, num_ranks=8)),
    "ep2 pp2, rows of one length": megatron(Layout(pp=2, ep=2, num_ranks=4), model_flags={"num_experts": 4}),
}
EVERY_TRAINER = pytest.mark.parametrize("settings", TRAINERS.values(), ids=TRAINERS)


def samples() -> list[TrainSample]:
    """Return samples; every third one has recorded experts."""
    drawn = train_batches.samples(LENGTHS)
    return [
        replace(sample, routed_experts=np.zeros((len(sample.tokens) - 1, 2, 4), np.uint8)) if sample.index % 3 == 0 else sample
        for sample in drawn
    ]


@EVERY_TRAINER
@pytest.mark.parametrize("balance_by", [None, FLOPS], ids=["", "balanced"])
def test_replicas_take_what_is_planned_for_all_and_together_every_sample(settings: TrainerSettings, balance_by) -> None:
    batch = train_batches.batch(samples(), num_steps=2)
    of_replicas = step_shares(batch, settings, balance_by)
    for step, positions in enumerate(batch.steps):
        planned = settings.micro_batch_schedules([batch.samples[i] for i in positions], settings.capacity, balance_by)
        shares = [of_replica[step] for of_replica in of_replicas]
        for schedule, share in zip(planned, shares, strict=True):
            meant = [[positions[i] for i in plan.samples] for plan in schedule.plans]
            assert [[share.samples.positions[i] for i in plan.samples] for plan in share.schedule.plans] == meant
            assert [plan.counts for plan in share.schedule.plans] == [plan.counts for plan in schedule.plans]
            assert share.schedule.num_tokens == schedule.num_tokens
            assert set(share.samples.positions) == {i for row in meant for i in row}, "no sample that it does not compute"
            assert all(sample is batch.samples[i] for sample, i in zip(share.samples.samples, share.samples.positions, strict=True))
        assert {i for share in shares for i in share.samples.positions} == set(positions)


@EVERY_TRAINER
def test_samples_are_scored_by_the_replica_that_has_them(settings: TrainerSettings) -> None:
    given = samples()
    shares = score_shares(given, settings, FLOPS)
    found = [
        {
            share.positions[i]: SampleScores(old_logprobs=np.full(1, share.samples[i].index, np.float32))
            for plan in share.schedule.plans
            for i in plan.samples
        }
        for share in shares
    ]
    scores = join_by_position(found)
    filled = [of_sample.filled_into(sample) for of_sample, sample in zip(scores, given, strict=True)]
    assert [sample.old_logprobs for sample in filled] == [sample.index for sample in given]
    assert all(after.routed_experts is before.routed_experts for after, before in zip(filled, given))


@pytest.mark.parametrize("per_token", [False, True])
def test_counts_are_over_the_whole_step(per_token: bool) -> None:
    settings = replace(COMMON, num_ranks=4, loss=LossSettings(per_token=per_token))
    batch = train_batches.batch(samples(), num_steps=2)
    for step, of_replicas in enumerate(zip(*step_shares(batch, settings, None), strict=True)):
        whole = StepSamples.of(batch, step, settings.loss)
        weights = dict(zip(whole.positions, whole.weights, strict=True))
        assert whole.num_tokens == sum(len(sample.tokens) - 1 for sample in whole.samples)
        assert whole.num_choices == sum(s.routed_experts.size for s in whole.samples if s.routed_experts is not None) > 0
        for share in (each.samples for each in of_replicas):
            assert (share.denominators, share.num_tokens, share.num_choices) == (whole.denominators, whole.num_tokens, whole.num_choices)
            assert all(np.array_equal(own, weights[i]) for own, i in zip(share.weights, share.positions, strict=True))


@EVERY_TRAINER
def test_samples_without_advantage_are_in_no_share(settings: TrainerSettings) -> None:
    batch = train_batches.batch(samples(), num_steps=3)
    for position in [*batch.steps[0], *batch.steps[1][1:]]:
        batch.samples[position].advantages[batch.samples[position].loss_mask != 0] = 0.0
    whole = StepSamples.of(batch, 1, settings.loss)

    of_replicas = step_shares(batch, replace(settings, skips_zero_advantages=True), None)
    assert all([step is None for step in steps] == [True, False, False] for steps in of_replicas), "the first step is skipped"
    shares = [steps[1].samples for steps in of_replicas]
    assert {position for share in shares for position in share.positions} == {batch.steps[1][0]}
    assert all(share.denominators == whole.denominators for share in shares), "samples that are left out still count"
    assert all(share.num_tokens == len(batch.samples[batch.steps[1][0]].tokens) - 1 for share in shares)


@EVERY_TRAINER
def test_a_rollout_without_any_advantage_has_skipped_steps(settings: TrainerSettings) -> None:
    batch = train_batches.batch([replace(sample, advantages=np.zeros(sample.response_length, np.float32)) for sample in samples()])
    assert step_shares(batch, replace(settings, skips_zero_advantages=True), None) == [[None]] * settings.num_replicas
    assert None not in step_shares(batch, settings, None)[0]
    assert skip_metrics(batch) == {"train/num_skipped_steps": 1, "train/skipped_share": 1.0}


def test_all_shares_together_are_little_more_than_one_batch() -> None:
    batch = train_batches.batch(train_batches.samples([(40, 400), (60, 200), (20, 600), (30, 300)] * 32), num_steps=2)
    settings = replace(COMMON, num_ranks=8, capacity=Capacity(max_tokens=1000))
    sent = [len(pickle.dumps(share)) for share in step_shares(batch, settings, FLOPS)]
    whole = len(pickle.dumps(batch))
    assert sum(sent) < 1.05 * whole
    assert max(sent) < 1.2 * whole / 8


def test_a_cost_can_be_pickled(checkpoint: Path) -> None:
    flops = forward_flops(architecture_of(read_config_json(checkpoint)))
    for cost in (sequence_flops(2.0, 3.0), flops.whole_sequence):
        assert [pickle.loads(pickle.dumps(cost))(length) for length in (1, 100)] == [cost(1), cost(100)]


def test_a_step_of_fewer_samples_than_replicas_gives_the_others_a_repetition_that_weighs_nothing() -> None:
    shares = step_shares(TrainBatch(samples()[:2], [[0, 1]], [2]), replace(COMMON, num_ranks=4), None)
    assert len(shares) == 4
    counts = sorted(plan.counts for (share,) in shares for plan in share.schedule.plans)
    assert counts == [False, False, True, True]


def test_shared_prefixes_are_those_of_each_replicas_own_samples() -> None:
    common = {field.name: getattr(COMMON, field.name) for field in fields(COMMON)}
    settings = TorchTrainerSettings(**{**common, "num_ranks": 3, "capacity": Capacity(max_tokens=100), "shares_prefixes": True})
    given = samples()
    prompts = [given[3 * group].tokens[:1].repeat(20) for group in range(9)]
    given = [replace(s, tokens=np.concatenate([prompts[i % 9], s.tokens]), prompt_length=20 + s.prompt_length) for i, s in enumerate(given)]
    plans = [(share, plan) for (share,) in step_shares(train_batches.batch(given), settings, FLOPS) for plan in share.schedule.plans]
    assert any(plan.shared for _, plan in plans)
    for share, plan in plans:
        own = [share.samples.samples[i].tokens for i in plan.samples]
        for shared, before, tokens in zip(plan.shared[1:], own, own[1:]):
            assert np.array_equal(before[:shared], tokens[:shared])
