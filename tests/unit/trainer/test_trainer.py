"""The torch trainer of one rank through the protocol that the loop uses."""

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch

from fuligo.errors import CheckpointError, ConfigError, TrainerError
from fuligo.trainer.objective import KlLoss, LossSettings
from fuligo.trainer.packing import Capacity
from fuligo.trainer.ranks.settings import LearningRateSchedule, OptimizerSettings, TrainedParameters
from fuligo.trainer.ranks.trainer import LocalTrainer
from fuligo.trainer.torch_backend.settings import TorchTrainerSettings
from fuligo.types import TrainSample
from tests import tiny, train_batches

LENGTHS = [(4, 9), (1, 3), (6, 9), (2, 4), (5, 14), (3, 9), (7, 6), (8, 2)]


@pytest.fixture
def settings(checkpoint) -> TorchTrainerSettings:
    return TorchTrainerSettings(
        hf_checkpoint=checkpoint,
        initial_weights=checkpoint,
        optimizer=OptimizerSettings(LearningRateSchedule(peak=1e-3)),
        capacity=Capacity(max_tokens=64),
    )


async def loaded(settings: TorchTrainerSettings) -> LocalTrainer:
    trainer = LocalTrainer(settings)
    await trainer.load()
    return trainer


def weights(trainer: LocalTrainer) -> dict[str, torch.Tensor]:
    return {name: tensor.clone() for name, tensor in trainer.worker.named_weights()}


async def test_supervised_training_reduces_the_loss(settings):
    trainer = await loaded(replace(settings, loss=LossSettings(loss_type="sft_loss")))
    batch = train_batches.batch(train_batches.samples(LENGTHS))
    losses = [(await trainer.train(batch)).metrics["train/loss"] for _ in range(20)]
    assert losses[-1] < 0.5 * losses[0]
    await trainer.close()


async def test_tokens_with_positive_advantage_become_likelier_and_others_rarer(settings):
    trainer = await loaded(settings)
    samples = [
        replace(s, advantages=np.full(s.response_length, 1.0 if s.index % 2 else -1.0, np.float32), loss_mask=np.ones_like(s.loss_mask))
        for s in train_batches.samples(LENGTHS)
    ]
    samples = [replace(s, mask_sum=float(s.response_length)) for s in samples]
    first = await trainer.train(train_batches.batch(samples))
    second = await trainer.train(train_batches.batch(samples))
    for position, s in enumerate(samples):
        change = second.scores[position].logprobs.mean() - first.scores[position].logprobs.mean()
        assert np.sign(change) == np.sign(s.advantages[0])
    await trainer.close()


async def test_one_optimizer_step_for_every_entry_of_the_batch(settings):
    schedule = LearningRateSchedule(peak=1e-3, warmup_steps=3)
    trainer = await loaded(replace(settings, optimizer=OptimizerSettings(schedule)))
    samples = train_batches.samples(LENGTHS)
    result = await trainer.train(train_batches.batch(samples, num_steps=4))
    assert trainer.worker.progress.num_optimizer_steps == 4
    assert result.metrics["train/lr"] == pytest.approx(np.mean([schedule.at(step) for step in range(4)]))
    assert result.metrics["train/num_micro_batches"] == 1
    assert result.num_tokens == sum(len(s.tokens) - 1 for s in samples)
    assert sorted(result.scores) == list(range(len(samples)))
    await trainer.close()


def without_advantages(samples: list[TrainSample], *, every: int) -> list[TrainSample]:
    """Set the advantages of every second, third, ... sample to 0."""
    return [replace(s, advantages=np.zeros_like(s.advantages)) if i % every == 0 else s for i, s in enumerate(samples)]


@pytest.mark.parametrize("per_token", [False, True])
async def test_skipped_samples_would_have_changed_nothing(per_token: bool, settings):
    samples = without_advantages(train_batches.samples(LENGTHS), every=2)
    after: dict[bool, dict[str, torch.Tensor]] = {}
    for skips in (False, True):
        trainer = await loaded(replace(settings, skips_zero_advantages=skips, loss=LossSettings(per_token=per_token)))
        result = await trainer.train(train_batches.batch(samples, num_steps=2))
        assert sorted(result.scores) == ([1, 3, 5, 7] if skips else list(range(8)))
        assert result.metrics.get("train/skipped_share") == (0.5 if skips else None)
        after[skips] = weights(trainer)
        await trainer.close()
    for name, whole in after[False].items():
        torch.testing.assert_close(after[True][name], whole, rtol=0, atol=2e-5)  # AdamW's first steps are lr * sign(gradient)


async def test_a_step_without_advantages_leaves_weights_and_optimizer_as_they_are(settings):
    """Trainer and engine are still compared, at the trained tokens alone."""
    trainer = await loaded(replace(settings, skips_zero_advantages=True, capacity=Capacity(max_tokens=128)))
    samples = train_batches.samples(LENGTHS)
    for sample in samples:
        sample.engine_logprobs[sample.loss_mask == 0] = np.nan
    await trainer.train(train_batches.batch(samples))
    before, progress, logprobs = weights(trainer), replace(trainer.worker.progress), await trainer.logprobs(samples)
    result = await trainer.train(train_batches.batch(without_advantages(samples, every=1), num_steps=2))
    expected = np.mean([np.abs(own - s.engine_logprobs)[s.loss_mask != 0].mean() for own, s in zip(logprobs, samples, strict=True)])
    skipped = {"train/num_skipped_steps": 2, "train/skipped_share": 1.0, "train/tokens_per_s": 0.0}
    assert result.metrics == skipped | {"train/logprob_abs_diff": pytest.approx(expected)}
    routed = [replace(s, routed_experts=np.zeros((4, 1, 1), np.int32)) for s in without_advantages(samples, every=1)]
    replayed = (await trainer.train(train_batches.batch(routed, num_steps=2))).metrics
    assert replayed == skipped, "the engine's routing is replayed only in training"
    assert result.scores == {} and result.num_tokens == 0
    assert trainer.worker.progress == replace(progress, num_rollouts=progress.num_rollouts + 2, num_optimizer_steps=5, num_skipped_steps=4)
    assert all(torch.equal(tensor, before[name]) for name, tensor in weights(trainer).items())
    await trainer.close()


async def test_a_result_holds_the_ranks_spans(settings):
    trainer = await loaded(replace(settings, needs_old_logprobs=True))
    samples = await trainer.score(train_batches.samples(LENGTHS))
    first = await trainer.train(train_batches.batch(samples, num_steps=2))
    second = await trainer.train(train_batches.batch(samples))
    assert [[span.name for span in of_rank] for of_rank in first.rank_spans] == [["score", *["forward, backward", "optimizer"] * 2]]
    assert [[span.name for span in of_rank] for of_rank in second.rank_spans] == [["forward, backward", "optimizer"]], "told once"
    ends = [moment for span in first.rank_spans[0] for moment in (span.start_s, span.end_s)]
    assert ends == sorted(ends)
    await trainer.close()


async def test_scores_only_what_the_loss_needs(settings, reference_checkpoint):
    samples = train_batches.samples(LENGTHS)
    for needs_old, reference in [(False, None), (True, None), (False, reference_checkpoint), (True, reference_checkpoint)]:
        trainer = await loaded(replace(settings, needs_old_logprobs=needs_old, reference_weights=reference))
        scored = await trainer.score(samples)
        assert [s.index for s in scored] == [s.index for s in samples]
        assert all((s.old_logprobs is not None) == needs_old for s in scored)
        assert all((s.ref_logprobs is not None) == (reference is not None) for s in scored)
        await trainer.close()


async def test_old_logprobs_give_a_ratio_of_one_on_policy(settings):
    trainer = await loaded(replace(settings, needs_old_logprobs=True, score_capacity=Capacity(max_tokens=20)))
    scored = await trainer.score(train_batches.samples(LENGTHS))
    metrics = (await trainer.train(train_batches.batch(scored))).metrics
    assert metrics["train/ratio_mean"] == pytest.approx(1.0, abs=1e-5)
    assert metrics["train/clip_fraction"] == 0
    await trainer.close()


@pytest.mark.parametrize(
    ("trained", "moves"),
    [
        (TrainedParameters(only=(r"layers\.1\.mlp",)), lambda name: "layers.1.mlp" in name),
        (TrainedParameters(frozen=("embed", r"layers\.0\.")), lambda name: "embed" not in name and "layers.0." not in name),
    ],
)
async def test_only_chosen_parameters_move(settings, trained, moves):
    trainer = await loaded(replace(settings, trained=trained))
    before = weights(trainer)
    await trainer.train(train_batches.batch(train_batches.samples(LENGTHS)))
    after = weights(trainer)
    assert {name for name in before if not torch.equal(before[name], after[name])} == {name for name in before if moves(name)}
    await trainer.close()


@pytest.mark.parametrize(
    ("trained", "message"),
    [
        (TrainedParameters(only=("mlp",), frozen=("embed",)), "cannot be combined"),
        (TrainedParameters(only=("no_such_layer",)), "'no_such_layer' matches no parameter"),
        (TrainedParameters(frozen=("(",)), "not a regular expression"),
        (TrainedParameters(frozen=(".",)), "leaves no parameter to train"),
    ],
)
async def test_bad_lists_of_parameters_are_refused(settings, trained, message):
    with pytest.raises(ConfigError, match=message):
        await loaded(replace(settings, trained=trained))


async def test_norms_and_biases_do_not_decay(settings):
    settings = replace(settings, optimizer=OptimizerSettings(LearningRateSchedule(peak=0.1), weight_decay=0.5))
    trainer = await loaded(settings)
    groups = trainer.worker._learner.optimizer.param_groups
    assert {group["weight_decay"]: {p.dim() for p in group["params"]} for group in groups} == {0.5: {2}, 0.0: {1}}
    await trainer.close()


async def test_biases_of_experts_and_sinks_do_not_decay(settings, tmp_path):
    """gpt-oss holds the biases of all experts of a layer as one matrix."""
    decay = OptimizerSettings(LearningRateSchedule(peak=0.1), weight_decay=0.5)
    trainer = await loaded(replace(settings, optimizer=decay, initial_weights=tiny.save_checkpoint(tmp_path, "gpt_oss")))
    names = {parameter: name for name, parameter in trainer.worker.policy.model.named_parameters()}
    groups = trainer.worker._learner.optimizer.param_groups
    decayed = {names[p].rpartition(".")[2] for group in groups for p in group["params"] if group["weight_decay"]}
    assert decayed == {"weight", "gate_up_proj", "down_proj"}
    await trainer.close()


async def test_gradient_is_clipped_to_the_given_norm(settings):
    """AdamW hides the scale of the gradient; its first moment after one step is (1 - beta1) times the clipped gradient."""
    settings = replace(settings, optimizer=OptimizerSettings(LearningRateSchedule(peak=1e-3), clip_grad=0.01))
    trainer = await loaded(settings)
    metrics = (await trainer.train(train_batches.batch(train_batches.samples(LENGTHS)))).metrics
    state = trainer.worker._learner.optimizer.state
    norm = torch.sqrt(sum((s["exp_avg"] / 0.1).square().sum() for s in state.values()))
    assert metrics["train/grad_norm"] > 0.01
    assert norm.item() == pytest.approx(0.01, rel=1e-3)
    await trainer.close()


async def test_a_loss_that_is_not_finite_ends_training_and_leaves_the_weights(settings):
    trainer = await loaded(replace(settings, capacity=Capacity(max_samples=2)))
    samples = train_batches.samples(LENGTHS)
    await trainer.train(train_batches.batch(samples))
    before = weights(trainer)
    samples[4].advantages[-1] = np.inf
    with pytest.raises(TrainerError, match=r"optimizer step 1: the loss of micro-batch \d on rank 0 is not finite"):
        await trainer.train(train_batches.batch(samples))
    assert all(torch.equal(before[name], tensor) for name, tensor in weights(trainer).items())
    await trainer.close()


async def test_reference_takes_the_policys_weights_at_its_interval(settings, checkpoint):
    settings = replace(settings, reference_weights=checkpoint, ref_update_interval=2, loss=LossSettings(kl_loss=KlLoss(0.1, "k2")))
    trainer = await loaded(settings)
    kls = []
    for _ in range(3):
        scored = await trainer.score(train_batches.samples(LENGTHS))
        kls.append((await trainer.train(train_batches.batch(scored))).metrics["train/kl"])
    assert kls[0] == pytest.approx(0, abs=1e-9)
    assert kls[1] > 1e-6
    assert kls[2] == pytest.approx(0, abs=1e-9)
    await trainer.close()


async def test_weights_are_sent_in_the_checkpoints_type_and_tied_ones_once(settings, tmp_path):
    half = tiny.model_config("qwen3", tie_word_embeddings=True)
    half.dtype = torch.bfloat16
    half.save_pretrained(tmp_path)
    trainer = await loaded(replace(settings, hf_checkpoint=tmp_path))
    sent = dict(trainer.worker.named_weights())
    assert {tensor.dtype for tensor in sent.values()} == {torch.bfloat16}
    assert "model.embed_tokens.weight" in sent
    assert "lm_head.weight" not in sent
    await trainer.close()


async def test_the_event_loop_stays_free_while_a_step_computes(settings):
    trainer = await loaded(settings)
    training = asyncio.create_task(trainer.train(train_batches.batch(train_batches.samples(LENGTHS * 8))))
    turns = 0
    while not training.done():
        turns += 1
        await asyncio.sleep(0)
    assert turns > 10
    await trainer.close()


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("gemma2", {"head_dim": 16}, "logit soft-capping"),
        ("granite", {"logits_scaling": 8.0}, "differ by .* from its forward pass in transformers"),
        (
            "olmo_hybrid",
            {
                "head_dim": 16,
                "linear_num_key_heads": 4,
                "linear_num_value_heads": 4,
                "linear_key_head_dim": 16,
                "linear_value_head_dim": 16,
            },
            "linear_attention",
        ),
    ],
)
async def test_a_model_that_packing_would_change_is_refused(settings, tmp_path, family, changes, message):
    tiny.save_checkpoint(tmp_path, family, **changes)
    with pytest.raises(TrainerError, match=message):
        await loaded(replace(settings, hf_checkpoint=tmp_path, initial_weights=tmp_path))


@pytest.mark.parametrize(("family", "changes"), [("mistral", {"sliding_window": 6}), ("gemma3_text", {"head_dim": 16}), ("gpt2", {})])
async def test_sliding_windows_and_other_families_pass_the_check(settings, tmp_path, family, changes):
    tiny.save_checkpoint(tmp_path, family, **changes)
    trainer = await loaded(replace(settings, hf_checkpoint=tmp_path, initial_weights=tmp_path))
    await trainer.close()


async def test_a_checkpoint_without_all_weights_is_refused(settings, checkpoint, tmp_path):
    config = tiny.model_config("qwen3", tie_word_embeddings=True, layers=3)
    (tmp_path / "model.safetensors").symlink_to(checkpoint / "model.safetensors")
    config.save_pretrained(tmp_path)
    with pytest.raises(CheckpointError, match=r"weights are missing.*layers\.2"):
        await loaded(replace(settings, initial_weights=tmp_path))


async def test_balancing_never_moves_a_sample_between_optimizer_steps(settings):
    """Two steps of one rollout are bitwise equal to two rollouts of one step each."""
    settings = replace(settings, balance_data=True, capacity=Capacity(max_tokens=30))
    samples = train_batches.samples(LENGTHS)
    together, apart = await loaded(settings), await loaded(settings)
    await together.train(train_batches.batch(samples, num_steps=2))
    await apart.train(train_batches.batch(samples[:4]))
    await apart.train(train_batches.batch(samples[4:]))
    assert all(torch.equal(tensor, weights(apart)[name]) for name, tensor in weights(together).items())
    await together.close()
    await apart.close()
