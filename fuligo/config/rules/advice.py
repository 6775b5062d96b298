"""What is allowed and probably not meant: warnings."""

from __future__ import annotations

from fuligo.algorithms.estimators import ESTIMATORS
from fuligo.config import Config
from fuligo.config.findings import Severity
from fuligo.config.rules.rule import Violation, rule, set_flag, unset_flag
from fuligo.config.topology import engine_groups

_WIDE_FOR_A_MEAN = 0.05
"""From 1: a distance that the mean ratio of a whole response hardly ever has."""


@rule("CFG-TRUNCATED-SAMPLING", "--rollout-top-p", "--rollout-top-k", "--rollout-min-p", severity=Severity.WARNING)
def truncated_sampling_biases_the_ratio(config: Config) -> Violation | None:
    """Engine and trainer compare log-probabilities of the full vocabulary."""
    rollout = config.rollout
    given = {}
    if rollout.rollout_top_p < 1:
        given["rollout_top_p"] = f"--rollout-top-p {rollout.rollout_top_p}"
    if rollout.rollout_top_k > 0:
        given["rollout_top_k"] = f"--rollout-top-k {rollout.rollout_top_k}"
    if rollout.rollout_min_p > 0:
        given["rollout_min_p"] = f"--rollout-min-p {rollout.rollout_min_p}"
    if config.is_sft or not given:
        return None
    text = (
        f"{' and '.join(given.values())}: log-probabilities are of the full vocabulary, so the importance ratio is biased "
        "when tokens are drawn from a part of it"
    )
    return Violation(text, tuple(unset_flag(name) for name in given), flags=tuple(text.split()[0] for text in given.values()))


@rule("CFG-KL-K1", "--kl-loss-type", severity=Severity.WARNING)
def k1_loss_pulls_nowhere(config: Config) -> Violation | None:
    """The gradient of log(pi/ref) has the mean zero under pi."""
    algorithm = config.algorithm
    if not algorithm.use_kl_loss or algorithm.kl_loss_coef == 0 or algorithm.kl_loss_type != "k1" or algorithm.use_unbiased_kl:
        return None
    text = "--kl-loss-type k1 as a loss has an on-policy gradient of zero on average; k2, k3, low_var_kl and --use-unbiased-kl have not"
    return Violation(text, (set_flag("kl_loss_type", "low_var_kl"),))


@rule("CFG-GSPO-CLIP", "--advantage-estimator", "--eps-clip", severity=Severity.WARNING)
def sequence_ratios_are_clipped(config: Config) -> Violation | None:
    """The mean over a response stays far nearer to 1 than the ratio of a token: its bounds are of another magnitude."""
    clip = config.algorithm.eps_clip
    ratios_differ = config.resolved_num_steps_per_rollout > 1 or config.algorithm.use_rollout_logprobs
    if (
        config.is_sft
        or ESTIMATORS[config.algorithm.advantage_estimator].ratio_level != "sequence"
        or not ratios_differ
        or clip < _WIDE_FOR_A_MEAN
    ):
        return None
    text = (
        f"--advantage-estimator gspo with --eps-clip {clip}: the ratio of a whole response is hardly ever so far from 1, nothing is clipped"
    )
    return Violation(text, (set_flag("eps_clip", 3e-4), set_flag("eps_clip_high", 4e-4)))


@rule("CFG-SEQUENCE-MASK", "--tis-mode", "--tis-clip", "--tis-clip-low", severity=Severity.WARNING)
def sequence_masks_have_narrow_bounds(config: Config) -> Violation | None:
    """The geometric mean of a response's weights is hardly ever far from 1."""
    flags = config.algorithm
    low, high = flags.tis_clip_low, flags.tis_clip
    if not flags.use_tis or flags.tis_mode != "sequence-mask" or low > 1 - _WIDE_FOR_A_MEAN or high < 1 + _WIDE_FOR_A_MEAN:
        return None
    given = f"--tis-mode sequence-mask with --tis-clip-low {low} and --tis-clip {high}"
    text = f"{given}: a response's mean is hardly ever outside, none is masked"
    return Violation(text, advice="choose bounds near 1, such as 0.99 and 1.01, by train/logprob_abs_diff and train/tis_cut_fraction")


@rule("CFG-MICRO-BATCH", "--micro-batch-size", "--use-dynamic-batch-size", severity=Severity.WARNING)
def micro_batch_size_is_not_used(config: Config) -> Violation | None:
    """Packing by tokens decides how many samples a micro-batch has."""
    size = config.train.micro_batch_size
    if size is None or not config.train.use_dynamic_batch_size:
        return None
    return Violation(f"--micro-batch-size {size} is not used: --use-dynamic-batch-size packs by tokens", (unset_flag("micro_batch_size"),))


@rule("CFG-GROUP-OF-ONE", "--n-samples-per-prompt", "--advantage-estimator", severity=Severity.WARNING)
def groups_of_one_teach_nothing(config: Config) -> Violation | None:
    """A group's mean is the baseline of its samples."""
    algorithm = config.algorithm
    raw = config.is_sft or config.is_unjudged or algorithm.disable_rewards_normalization or algorithm.custom_advantage_function_path
    if config.rollout.n_samples_per_prompt > 1 or raw or not ESTIMATORS[algorithm.advantage_estimator].has_group_baseline:
        return None
    text = (
        f"--n-samples-per-prompt 1 with --advantage-estimator {algorithm.advantage_estimator}: a sample without others of its group "
        "to compare with has no advantage"
    )
    return Violation(text, advice="sample each prompt more than once")


@rule("CFG-NOTHING-PARTIAL", "--partial-rollout", severity=Severity.WARNING)
def nothing_is_partial(config: Config) -> Violation | None:
    """Only what is aborted can be continued."""
    rollout = config.rollout
    stops_early = config.resolved_over_sampling_batch_size > rollout.rollout_batch_size or rollout.dynamic_sampling_filter_path
    if not rollout.partial_rollout or stops_early or rollout.rollout_function_path or rollout.async_mode == "full":
        return None
    text = (
        "--partial-rollout continues what a rollout aborts, and without --over-sampling-batch-size above --rollout-batch-size "
        "or a --dynamic-sampling-filter-path it aborts nothing"
    )
    return Violation(text, (set_flag("over_sampling_batch_size", 2 * rollout.rollout_batch_size),))


@rule("CFG-WARMUP", "--lr-warmup-iters", "--critic-lr-warmup-iters", "--num-rollout", severity=Severity.WARNING)
def warmup_outlasts_the_run(config: Config) -> Violation | None:
    """The learning rate should reach its peak."""
    flags, rollouts = config.optimizer, config.data.num_rollout
    if rollouts is None:
        return None
    steps = rollouts * config.resolved_num_steps_per_rollout
    for name, warmup, peak in (
        ("--lr-warmup-iters", flags.lr_warmup_iters, "--lr"),
        ("--critic-lr-warmup-iters", flags.critic_lr_warmup_iters, "--critic-lr"),
    ):
        if warmup > steps:
            text = f"{name} {warmup} is more than the run's {steps} optimizer steps: the learning rate never reaches {peak}"
            return Violation(text, advice="shorten the warm-up", flags=(name, "--num-rollout"))
    return None


@rule("CFG-CRITIC-ONLY", "--num-critic-only-steps", "--num-rollout", severity=Severity.WARNING)
def the_policy_learns_too(config: Config) -> Violation | None:
    """While the value model alone learns, the policy stays as it is."""
    alone, rollouts = config.algorithm.num_critic_only_steps, config.data.num_rollout
    if not alone or rollouts is None or alone < rollouts:
        return None
    text = f"--num-critic-only-steps {alone} leaves none of the run's {rollouts} rollouts for the policy to learn from"
    return Violation(text, advice="raise --num-rollout, unless the value model is all that is wanted")


@rule("CFG-INTERVAL", "--update-weights-interval", "--ref-update-interval", "--num-rollout", severity=Severity.WARNING)
def intervals_end_within_the_run(config: Config) -> Violation | None:
    """What happens every so many rollouts should happen once."""
    rollouts = config.data.num_rollout
    intervals = {
        "update_weights_interval": config.weight_sync.update_weights_interval if config.needs_engine and not config.is_sft else None,
        "ref_update_interval": config.train.ref_update_interval if config.needs_reference else None,
    }
    late = {name: every for name, every in intervals.items() if rollouts is not None and every is not None and every > rollouts}
    if not late:
        return None
    shown = {name: f"--{name.replace('_', '-')}" for name in late}
    text = f"{' and '.join(f'{shown[name]} {every}' for name, every in late.items())}: a run of --num-rollout {rollouts} ends before that"
    return Violation(text, tuple(unset_flag(name) for name in late), "or run longer", flags=tuple(shown.values()))


@rule("CFG-COLOCATE-IDLE", "--rollout-num-gpus", "--colocate", severity=Severity.WARNING)
def shared_gpus_all_sample(config: Config) -> Violation | None:
    """A trainer's GPU without an engine idles during the rollout."""
    given, trainer = config.cluster.rollout_num_gpus, config.num_train_gpus
    if not config.cluster.colocate or given is None or not 0 < given < trainer:
        return None
    text = f"--rollout-num-gpus {given} with --colocate: {trainer - given} of the trainer's {trainer} GPUs idle while the engines sample"
    return Violation(text, (unset_flag("rollout_num_gpus"),))


@rule("CFG-DRAFT-WEIGHTS", "--enable-mtp-training", "--update-weight-transport", severity=Severity.WARNING)
def trained_drafts_are_not_broadcast(config: Config) -> Violation | None:
    """SGLang 0.5.15 gives what is broadcast to the served model alone, not to the draft that is made of its prediction layers."""
    transport, cluster = config.weight_sync.update_weight_transport, config.cluster
    chosen = not cluster.colocate and cluster.device != "cpu" and not config.engine.rollout_external_engine_addrs
    if not config.train.enable_mtp_training or not (transport in ("nccl", "gloo") or (transport == "auto" and chosen)):
        return None
    drafting = [group for group in engine_groups(config) if group.arguments.get("speculative_algorithm") is not None]
    if not any(group.arguments.get("speculative_draft_model_path") is None for group in drafting):
        return None
    text = (
        f"--enable-mtp-training with --update-weight-transport {transport}: engines that draft with the trained layers keep the first ones "
        "(a broadcast reaches the served model alone), and accept fewer tokens the longer the run"
    )
    return Violation(text, (set_flag("update_weight_transport", "disk"),))


RULES = (
    truncated_sampling_biases_the_ratio,
    k1_loss_pulls_nowhere,
    sequence_ratios_are_clipped,
    sequence_masks_have_narrow_bounds,
    micro_batch_size_is_not_used,
    groups_of_one_teach_nothing,
    nothing_is_partial,
    warmup_outlasts_the_run,
    intervals_end_within_the_run,
    the_policy_learns_too,
    shared_gpus_all_sample,
    trained_drafts_are_not_broadcast,
)
