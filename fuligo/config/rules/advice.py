"""What is allowed and probably not meant: warnings."""

from __future__ import annotations

from fuligo.algorithms.estimators import estimator
from fuligo.config import Config


def truncated_sampling_biases_the_ratio(config: Config) -> str | None:
    rollout = config.rollout
    given = []
    if rollout.rollout_top_p < 1:
        given.append(f"--rollout-top-p {rollout.rollout_top_p}")
    if rollout.rollout_top_k > 0:
        given.append(f"--rollout-top-k {rollout.rollout_top_k}")
    if rollout.rollout_min_p > 0:
        given.append(f"--rollout-min-p {rollout.rollout_min_p}")
    if config.is_sft or not given:
        return None
    return (
        f"{' and '.join(given)}: log-probabilities are of the full vocabulary, so the importance ratio is biased "
        "when tokens are drawn from a part of it"
    )


def k1_loss_pulls_nowhere(config: Config) -> str | None:
    algorithm = config.algorithm
    if not algorithm.use_kl_loss or algorithm.kl_loss_coef == 0 or algorithm.kl_loss_type != "k1" or algorithm.use_unbiased_kl:
        return None
    return "--kl-loss-type k1 as a loss has an on-policy gradient of zero on average: choose k2, k3 or low_var_kl, or add --use-unbiased-kl"


def micro_batch_size_is_not_used(config: Config) -> str | None:
    size = config.train.micro_batch_size
    if size is None or not config.train.use_dynamic_batch_size:
        return None
    return f"--micro-batch-size {size} is not used: --use-dynamic-batch-size packs by tokens"


def groups_of_one_teach_nothing(config: Config) -> str | None:
    algorithm = config.algorithm
    raw = config.is_sft or algorithm.disable_rewards_normalization or algorithm.custom_advantage_function_path
    if config.rollout.n_samples_per_prompt > 1 or raw or estimator(algorithm.advantage_estimator).baseline == "none":
        return None
    return (
        f"--n-samples-per-prompt 1 with --advantage-estimator {algorithm.advantage_estimator}: a sample without others of its group "
        "to compare with has no advantage"
    )


def nothing_is_partial(config: Config) -> str | None:
    rollout = config.rollout
    stops_early = config.resolved_over_sampling_batch_size > rollout.rollout_batch_size or rollout.dynamic_sampling_filter_path
    if not rollout.partial_rollout or stops_early or rollout.rollout_function_path:
        return None
    return (
        "--partial-rollout continues what a rollout aborts, and without --over-sampling-batch-size above --rollout-batch-size "
        "or a --dynamic-sampling-filter-path it aborts nothing"
    )


def warmup_outlasts_the_run(config: Config) -> str | None:
    warmup, rollouts = config.optimizer.lr_warmup_iters, config.data.num_rollout
    if rollouts is None or warmup <= rollouts * config.resolved_num_steps_per_rollout:
        return None
    steps = rollouts * config.resolved_num_steps_per_rollout
    return f"--lr-warmup-iters {warmup} is more than the run's {steps} optimizer steps: the learning rate never reaches --lr"


RULES = (
    truncated_sampling_biases_the_ratio,
    k1_loss_pulls_nowhere,
    micro_batch_size_is_not_used,
    groups_of_one_teach_nothing,
    nothing_is_partial,
    warmup_outlasts_the_run,
)
