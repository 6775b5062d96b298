"""Warnings about settings that are allowed but probably not intended."""

from collections.abc import Iterator
from pathlib import Path

from fuligo.algorithms.estimators import ESTIMATORS
from fuligo.config import Config
from fuligo.config.findings import Change, Rule, Severity, simple_rule
from fuligo.config.flag import option_name
from fuligo.config.rules.rule import Violation, rule, set_flag, unset_flag
from fuligo.config.topology import engine_groups

_HIGHEST_LR = 1e-2
_WIDE_FOR_A_MEAN = 0.05
"""Distance from 1 that the mean ratio of a whole response hardly ever reaches."""


@rule("CFG-MODEL-CONFIG", "--model-config-file", "--hf-checkpoint", severity=Severity.WARNING)
def unread_model_config(config: Config) -> Iterator[Violation]:
    """Warn about a --model-config-file given with a checkpoint on this machine, whose own config.json is used."""
    given, checkpoint = config.model.model_config_file, config.model.hf_checkpoint
    if given is not None and checkpoint is not None and (own := Path(checkpoint) / "config.json").is_file():
        file = Path(given) / "config.json" if Path(given).is_dir() else Path(given)
        if not file.is_file() or file.read_bytes() != own.read_bytes():
            text = (
                f"--model-config-file {given} is not read: --hf-checkpoint {checkpoint} is on this machine, and its own config.json is used"
            )
            yield Violation(text, (unset_flag("model_config_file"),), advice="to plan with the file, leave out --hf-checkpoint")


@rule("CFG-NOTHING-PARTIAL", "--partial-rollout", severity=Severity.WARNING)
def partial_rollout_without_aborts(config: Config) -> Iterator[Violation]:
    """Warn about partial rollouts in a run that never aborts a sample."""
    rollout = config.rollout
    stops_early = config.resolved_over_sampling_batch_size > rollout.rollout_batch_size or rollout.dynamic_sampling_filter_path
    if rollout.partial_rollout and not (stops_early or rollout.rollout_function_path) and rollout.async_mode != "full":
        text = (
            "--partial-rollout continues aborted samples, but without --over-sampling-batch-size above --rollout-batch-size "
            "or a --dynamic-sampling-filter-path no sample is aborted"
        )
        yield Violation(text, (set_flag("over_sampling_batch_size", 2 * rollout.rollout_batch_size),))


@rule("CFG-WARMUP", "--lr-warmup-iters", "--critic-lr-warmup-iters", "--num-rollout", severity=Severity.WARNING)
def warmup_longer_than_the_run(config: Config) -> Iterator[Violation]:
    """Warn if the warm-up is longer than the run, so that the learning rate never reaches its peak."""
    flags, rollouts = config.optimizer, config.data.num_rollout
    if rollouts is None:
        return
    steps = rollouts * config.resolved_num_steps_per_rollout
    for name, warmup, peak in (
        ("--lr-warmup-iters", flags.lr_warmup_iters, "--lr"),
        ("--critic-lr-warmup-iters", flags.critic_lr_warmup_iters, "--critic-lr"),
    ):
        if warmup > steps:
            text = f"{name} {warmup} exceeds the number of optimizer steps of the run ({steps}): the learning rate never reaches {peak}"
            yield Violation(text, advice="shorten the warm-up", flags=(name, "--num-rollout"))
            return


@rule("CFG-LR-HIGH", "--lr", "--critic-lr", severity=Severity.WARNING)
def learning_rate_is_plausible(config: Config) -> Iterator[Violation]:
    """Warn about a learning rate far above those that language models are trained with."""
    high = {"--lr": config.optimizer.lr, "--critic-lr": config.optimizer.critic_lr if config.trains_values else None}
    high = {name: rate for name, rate in high.items() if rate is not None and rate > _HIGHEST_LR}
    if high and config.trains:
        given = " and ".join(f"{name} {rate:g}" for name, rate in high.items())
        text = f"{given}: the weights will most likely be destroyed in the first step; policies are trained with 1e-7 to 1e-4"
        yield Violation(text, advice=f"lower {' and '.join(high)} to 1e-4 or less", flags=tuple(high))


@rule("CFG-INTERVAL", "--update-weights-interval", "--ref-update-interval", "--num-rollout", severity=Severity.WARNING)
def intervals_longer_than_the_run(config: Config) -> Iterator[Violation]:
    """Warn about an interval that is longer than the run."""
    rollouts = config.data.num_rollout
    intervals = {
        "update_weights_interval": config.weight_sync.update_weights_interval if config.needs_engine and not config.is_sft else None,
        "ref_update_interval": config.train.ref_update_interval if config.needs_reference else None,
    }
    late = {name: every for name, every in intervals.items() if rollouts is not None and every is not None and every > rollouts}
    if late:
        shown = {name: option_name(name) for name in late}
        given = " and ".join(f"{shown[name]} {every}" for name, every in late.items())
        text = f"{given}: longer than the run, which ends after --num-rollout {rollouts}"
        yield Violation(text, tuple(unset_flag(name) for name in late), "or raise --num-rollout", flags=tuple(shown.values()))


@rule("CFG-DRAFT-WEIGHTS", "--enable-mtp-training", "--update-weight-transport", severity=Severity.WARNING)
def trained_mtp_with_broadcast(config: Config) -> Iterator[Violation]:
    """Warn if trained MTP layers are synced by broadcast: SGLang 0.5.15 updates the served model, not the draft model built from them."""
    transport, cluster = config.weight_sync.update_weight_transport, config.cluster
    chosen = not cluster.colocate and cluster.device != "cpu" and not config.engine.rollout_external_engine_addrs
    if config.train.enable_mtp_training and (transport in ("nccl", "gloo") or (transport == "auto" and chosen)):
        drafting = [group for group in engine_groups(config) if group.arguments.get("speculative_algorithm") is not None]
        if any(group.arguments.get("speculative_draft_model_path") is None for group in drafting):
            text = (
                f"--enable-mtp-training with --update-weight-transport {transport}: a broadcast does not reach the draft model, so engines "
                "keep drafting with the initial MTP layers and accept fewer tokens as training continues"
            )
            yield Violation(text, (set_flag("update_weight_transport", "disk"),))


@rule("CFG-GSPO-CLIP", "--advantage-estimator", "--eps-clip", severity=Severity.WARNING)
def gspo_clip_distance(config: Config) -> Iterator[Violation]:
    """Warn about token-sized clip distances with GSPO: the ratio of a whole response stays far closer to 1 than that of a token."""
    clip = config.algorithm.eps_clip
    ratios_differ = config.resolved_num_steps_per_rollout > 1 or config.algorithm.use_rollout_logprobs
    if (
        not config.is_sft
        and ESTIMATORS[config.algorithm.advantage_estimator].ratio_level == "sequence"
        and ratios_differ
        and clip >= _WIDE_FOR_A_MEAN
    ):
        given = f"--advantage-estimator gspo with --eps-clip {clip}"
        text = f"{given}: the ratio of a response is hardly ever that far from 1, so nothing is clipped"
        yield Violation(text, (set_flag("eps_clip", 3e-4), set_flag("eps_clip_high", 4e-4)))


@rule("CFG-SEQUENCE-MASK", "--tis-mode", "--tis-clip", "--tis-clip-low", severity=Severity.WARNING)
def sequence_mask_bounds(config: Config) -> Iterator[Violation]:
    """Warn about wide bounds of a sequence mask: the geometric mean of a response's weights is hardly ever far from 1."""
    flags = config.algorithm
    low, high = flags.tis_clip_low, flags.tis_clip
    if flags.use_tis and flags.tis_mode == "sequence-mask" and low <= 1 - _WIDE_FOR_A_MEAN and high >= 1 + _WIDE_FOR_A_MEAN:
        given = f"--tis-mode sequence-mask with --tis-clip-low {low} and --tis-clip {high}"
        text = f"{given}: the geometric mean of a response's weights is hardly ever outside, so no response is masked"
        yield Violation(text, advice="choose bounds near 1, such as 0.99 and 1.01, and tune them by train/tis_cut_fraction")


@rule("CFG-GROUP-OF-ONE", "--n-samples-per-prompt", "--advantage-estimator", severity=Severity.WARNING)
def groups_of_one(config: Config) -> Iterator[Violation]:
    """Warn about groups of one sample: with the group mean as baseline, every advantage is zero."""
    algorithm = config.algorithm
    by_hook = algorithm.custom_advantage_function_path or config.reward.custom_reward_post_process_path
    raw = config.is_sft or config.is_unjudged or algorithm.disable_rewards_normalization or by_hook
    if config.rollout.n_samples_per_prompt <= 1 and not raw and ESTIMATORS[algorithm.advantage_estimator].has_group_baseline:
        text = (
            f"--n-samples-per-prompt 1 with --advantage-estimator {algorithm.advantage_estimator}: the group mean is the baseline, "
            "so the advantage of a single sample is zero"
        )
        yield Violation(text, advice="raise --n-samples-per-prompt")


@rule("CFG-COLOCATE-IDLE", "--rollout-num-gpus", "--colocate", severity=Severity.WARNING)
def idle_shared_gpus(config: Config) -> Iterator[Violation]:
    """Warn if trainer GPUs have no engine, because they idle during the rollout."""
    given, trainer = config.cluster.rollout_num_gpus, config.num_train_gpus
    if config.cluster.colocate and given is not None and 0 < given < trainer:
        idle = f"{trainer - given} of the trainer's {trainer} GPUs idle"
        text = f"--rollout-num-gpus {given} with --colocate leaves {idle} while the engines sample"
        yield Violation(text, (unset_flag("rollout_num_gpus"),))


# fmt: off
TABLE: tuple[Rule[Config, Change], ...] = (
    simple_rule("CFG-KL-K1", "--kl-loss-type",
        "Warn about k1 as a loss: under the policy, the gradient of log(policy/reference) is zero on average.",
        lambda config: config.algorithm.use_kl_loss and config.algorithm.kl_loss_coef != 0 and config.algorithm.kl_loss_type == "k1"
        and not config.algorithm.use_unbiased_kl,
        "--kl-loss-type k1 has an on-policy gradient of zero on average, unlike k2, k3, low_var_kl and --use-unbiased-kl",
        set_flag("kl_loss_type", "low_var_kl"), severity=Severity.WARNING),
    simple_rule("CFG-MICRO-BATCH", "--micro-batch-size --use-dynamic-batch-size",
        "Warn about a micro-batch size that packing by tokens overrides.",
        lambda config: config.train.micro_batch_size is not None and config.train.use_dynamic_batch_size,
        lambda config: f"--micro-batch-size {config.train.micro_batch_size} is not used: --use-dynamic-batch-size packs by tokens",
        unset_flag("micro_batch_size"), severity=Severity.WARNING),
    simple_rule("CFG-CRITIC-ONLY", "--num-critic-only-steps --num-rollout", "Warn if only the value model learns in the whole run.",
        lambda config: config.algorithm.num_critic_only_steps and config.data.num_rollout is not None
        and config.algorithm.num_critic_only_steps >= config.data.num_rollout,
        lambda config: f"--num-critic-only-steps {config.algorithm.num_critic_only_steps} leaves no rollout of the run's "
        f"{config.data.num_rollout} for the policy to learn from",
        advice="raise --num-rollout, unless you only want the value model", severity=Severity.WARNING),
    simple_rule("CFG-RESTART-FROM-0", "--max-restarts --save-interval",
        "Warn about restarts of a run that saves only at its end: each starts over from the beginning.",
        lambda config: config.checkpoint.max_restarts and config.checkpoint.save_interval is None and config.trains,
        lambda config: f"--max-restarts {config.checkpoint.max_restarts} without --save-interval: a restart repeats all rollouts since the "
        "run began",
        set_flag("save_interval", 10), severity=Severity.WARNING),
)
# fmt: on
