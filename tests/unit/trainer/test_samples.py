"""Selection of a rollout's samples to train on, and what they share."""

from dataclasses import replace

import numpy as np
import pytest

from fuligo.errors import RewardError, RolloutError
from fuligo.rollout.judging import TOO_FEW_USABLE
from fuligo.trainer.samples import SampleSettings, train_samples
from fuligo.types import Episode, PromptImage, Sample, SampleGroup, SampleStatus, Turn, TurnReward


def sample(index, *, length=2, loss_mask=None, status=SampleStatus.COMPLETED, reward=1.0):
    mask = np.ones(length, np.int8) if loss_mask is None else np.array(loss_mask, np.int8)
    return Sample(
        index=index,
        group_index=0,
        prompt="p",
        prompt_ids=np.array([5, 6, 7], np.int32),
        response_ids=np.arange(len(mask), dtype=np.int32),
        loss_mask=mask,
        engine_logprobs=np.full(len(mask), -0.5, np.float32),
        versions=np.zeros(len(mask), np.int32),
        status=status,
        reward=reward,
    )


def group(*samples):
    return SampleGroup(index=0, row=0, samples=list(samples))


def test_a_sample_carries_over_token_by_token():
    image = PromptImage("7.png", b"pixels", "digest", 1, 1, 1)
    (trained, _) = train_samples([group(replace(sample(3, loss_mask=[1, 0, 1]), images=(image,)), sample(4))], SampleSettings())
    assert trained.tokens.tolist() == [5, 6, 7, 0, 1, 2]
    assert (trained.prompt_length, trained.response_length, trained.mask_sum) == (3, 3, 2)
    assert trained.loss_mask.tolist() == [1, 0, 1]
    assert trained.engine_logprobs.tolist() == [-0.5] * 3
    assert (trained.index, trained.group_index, trained.reward) == (3, 0, 1.0)
    assert trained.images == (image,)


@pytest.mark.parametrize(("loss_mask", "num_needed"), [([1, 0, 1], 5), ([1, 1, 0], 4), ([0, 0, 0], 0)])
def test_experts_are_needed_of_every_token_that_a_trained_one_sees(loss_mask, num_needed):
    samples = [sample(0, loss_mask=loss_mask), sample(1, loss_mask=loss_mask)]
    for each in samples:
        each.routed_experts = np.ones((num_needed, 2, 3), np.uint8)
    (trained, _) = train_samples([group(*samples)], SampleSettings(needs_routing=True))
    assert trained.routed_experts is samples[0].routed_experts
    assert train_samples([group(*samples)], SampleSettings())[0].routed_experts is None
    if num_needed:
        samples[1].routed_experts = None
        with pytest.raises(RolloutError, match=f"sample 1: .* its first {num_needed} tokens, but only 0 are recorded"):
            train_samples([group(*samples)], SampleSettings(needs_routing=True))


def test_rewards_by_turn_belong_to_the_sample_that_holds_the_turn():
    """The last sample of an episode lists the turns of all; an episode with a single reward has no turn rewards."""
    turns = [turn(0, 0, 2, 0.25), turn(1, 0, 1, 0.5), turn(1, 3, 2, 1.0)]
    parts = [sample(0, length=2), replace(sample(0, length=5), episode=Episode([], [], turns))]
    agent = replace(sample(1), episode=Episode([], [], [turn(0, 0, 2, None)]))
    first, second, other = train_samples([group(*parts, agent)], SampleSettings())
    assert first.turn_rewards == (TurnReward(2, 0.25),)
    assert second.turn_rewards == (TurnReward(1, 0.5), TurnReward(5, 1.0))
    assert other.turn_rewards is None


def turn(number, first_token, num_tokens, reward):
    return Turn(number, first_token, num_tokens, {"role": "assistant", "content": ""}, [], reward, [], 0.0, 0.0)


def test_a_served_teacher_has_scored_every_sample():
    samples = [sample(0), sample(1)]
    for each in samples:
        each.teacher_logprobs = np.full(2, -0.25, np.float32)
    (trained, _) = train_samples([group(*samples)], SampleSettings(needs_teacher=True))
    assert trained.teacher_logprobs is samples[0].teacher_logprobs
    assert train_samples([group(*samples)], SampleSettings())[0].teacher_logprobs is None, "the trainer's teacher scores by itself"
    samples[1].teacher_logprobs = None
    with pytest.raises(RolloutError, match=r"sample 1: it has no teacher_logprobs, which --use-opd"):
        train_samples([group(*samples)], SampleSettings(needs_teacher=True))


def test_truncated_samples_stay_even_fully_masked_and_failed_aborted_unrewarded_and_empty_ones_go():
    samples = [
        sample(0),
        sample(1, status=SampleStatus.TRUNCATED, loss_mask=[0, 0]),
        sample(2, status=SampleStatus.FAILED, reward=None),
        sample(3, status=SampleStatus.ABORTED),
        sample(4, reward=None),
        sample(5, length=0),
    ]
    assert [trained.index for trained in train_samples([group(*samples)], SampleSettings())] == [0, 1]


def test_a_group_left_with_one_sample_is_marked_as_dropped():
    lonely, whole = group(sample(0), sample(1, reward=None)), group(sample(2), sample(3))
    assert [trained.index for trained in train_samples([lonely, whole], SampleSettings())] == [2, 3]
    assert (lonely.kept, lonely.drop_reason) == (False, TOO_FEW_USABLE)
    assert (whole.kept, whole.drop_reason) == (True, None)


def test_the_parts_of_one_rollout_are_not_a_group():
    parts = group(sample(0), sample(0), sample(1, reward=None))
    assert train_samples([parts], SampleSettings()) == []


def test_a_group_that_was_one_sample_from_the_start_stays():
    assert len(train_samples([group(sample(0))], SampleSettings())) == 1


def test_samples_split_from_one_rollout_share_one_denominator():
    parts = group(sample(0, loss_mask=[1, 1]), sample(0, loss_mask=[1, 0, 1]), sample(1, loss_mask=[1]))
    assert [trained.mask_sum for trained in train_samples([parts], SampleSettings())] == [4, 4, 1]


def test_supervised_samples_need_no_reward():
    assert [trained.reward for trained in train_samples([group(sample(0, reward=None))], SampleSettings(has_rewards=False))] == [0.0]


def test_the_reward_key_chooses_the_value_to_learn_from():
    samples = group(sample(0, reward={"acc": 1, "style": 0.2}), sample(1, reward={"acc": 0, "style": 0.4}))
    assert [trained.reward for trained in train_samples([samples], SampleSettings(reward_key="style"))] == [0.2, 0.4]
    with pytest.raises(RewardError, match="--reward-key is 'score' and must name one of them"):
        train_samples([samples], SampleSettings(reward_key="score"))


def test_the_post_process_hook_replaces_the_rewards():
    def negate(samples):
        raw = [s.reward for s in samples]
        return raw, [-reward for reward in raw]

    samples = group(sample(0, reward=1.0), sample(1, reward=3.0))
    assert [trained.reward for trained in train_samples([samples], SampleSettings(post_process=negate))] == [-1, -3]


@pytest.mark.parametrize(
    ("result", "message"),
    [
        ([1.0, 2.0], r"must return \(raw, rewards\)"),
        (([], ["high", "low"]), "numbers for every sample: could not convert"),
        (([], None), "numbers for every sample"),
        (([], [1.0]), "1 reward for 2 samples"),
        (([], [1.0, float("nan")]), "sample 1: its reward is nan"),
    ],
)
def test_a_post_process_hook_that_returns_something_else_is_named(result, message):
    with pytest.raises(RewardError, match=message):
        train_samples([group(sample(0), sample(1))], SampleSettings(post_process=lambda samples: result))
