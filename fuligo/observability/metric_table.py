"""Table of all metrics with unit, meaning and denominator. `python -m fuligo.observability.metric_table` writes docs/metrics.md."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from fuligo.observability.metrics import is_timing


@dataclass(slots=True, frozen=True)
class Metric:
    """One key of `metrics.jsonl`. `<...>` in the key stands for any text."""

    key: str
    unit: str
    meaning: str
    mean_over: str = ""
    """Set that it is a mean over or divided by; empty for counts and values of the whole step."""


_USABLE = "usable samples of kept groups"
_TOKENS = "trained tokens, weighted as in the loss; then optimizer steps"
_TRAINED = "trained tokens of the rollout, equally weighted"
_STEPS = "optimizer steps"
_POLLS = "polls (one a second) that found a request in an engine"

METRICS = (
    Metric("step", "", "rollout id, from 0"),
    Metric("policy_version", "", "version of the weights after the step; incremented by every weight sync"),
    Metric("time", "s", "seconds since the epoch at the end of the step"),
    Metric("rollout/reward_mean", "", "reward (of `--reward-key`)", _USABLE),
    Metric("rollout/reward_std", "", "standard deviation of the reward", f"all {_USABLE}, biased"),
    Metric(
        "rollout/zero_std_ratio",
        "share",
        "groups whose rewards are all equal, which have no policy gradient",
        "groups judged by the filter, kept and dropped",
    ),
    Metric("rollout/response_len_mean", "tokens", "length of responses", _USABLE),
    Metric("rollout/response_len_max", "tokens", "length of the longest response"),
    Metric("rollout/prompt_len_mean", "tokens", "length of prompts", _USABLE),
    Metric("rollout/truncated_ratio", "share", "responses truncated at the maximum length", _USABLE),
    Metric(
        "rollout/staleness",
        "versions",
        "versions of the weights between a token and the training that uses it",
        f"tokens of a sample, then {_USABLE}",
    ),
    Metric("rollout/staleness_max", "versions", f"the same for the oldest token among all {_USABLE}"),
    Metric(
        "rollout/aborted_len_mean",
        "tokens",
        "length of the responses aborted when the rollout was full; compared with "
        "`response_len_mean` it shows how far the rollout favours short responses",
        "unfinished samples of aborted groups",
    ),
    Metric("rollout/num_waves", "", "waves of prompts submitted"),
    Metric("rollout/num_groups_kept", "groups", "used for training"),
    Metric("rollout/num_groups_dropped", "groups", "finished and rejected by the filter or for lack of usable samples"),
    Metric("rollout/num_groups_surplus", "groups", "finished and accepted after the rollout was full; discarded"),
    Metric("rollout/num_groups_aborted", "groups", "unfinished when the rollout was full"),
    Metric("rollout/num_groups_stale", "groups", "too old to continue or to train on (`--max-staleness`); their prompts are sampled again"),
    Metric("rollout/num_resumed", "samples", "continued from the buffer (`--async-mode full`: sampled by several versions of the weights)"),
    Metric("rollout/num_queued", "groups", "`--async-mode full`: accepted and queued for a later rollout"),
    Metric("rollout/num_in_flight", "groups", "`--async-mode full`: being sampled or judged when the rollout was returned"),
    Metric("rollout/num_failed", "samples", "failed in generation or reward; the reasons are in samples/"),
    Metric("rollout/num_tokens", "tokens", "sampled in this rollout, whether used or not"),
    Metric("rollout/dropped/<reason>", "groups", "dropped for this reason"),
    Metric("rollout/epoch", "", "pass over the data"),
    Metric(
        "rollout/tokens_per_s",
        "tokens/s",
        "response tokens sampled",
        "seconds of the rollout, rewards included (`--async-mode full`: since the last rollout was returned)",
    ),
    Metric("engine/num_running_mean", "requests", "being decoded, summed over engines", _POLLS),
    Metric("engine/num_running_max", "requests", "maximum of the same"),
    Metric("engine/num_waiting_mean", "requests", "queued in the engines for a free slot or for memory", _POLLS),
    Metric("engine/num_waiting_max", "requests", "maximum of the same"),
    Metric("engine/kv_usage_mean", "share", "share of the KV cache in use (embedded engine: reserved)", f"{_POLLS}, and engines"),
    Metric("engine/kv_usage_max", "share", "maximum of the same over engines and polls"),
    Metric(
        "engine/tokens_per_s",
        "tokens/s",
        "new tokens, as measured by the engines over their last decoding steps; only with `--sglang-enable-metrics`",
        f"{_POLLS}; summed over engines",
    ),
    Metric("engine/<n>/num_running_mean", "requests", "the same for one engine, numbered from 0; only with several engines", _POLLS),
    Metric("engine/<n>/num_waiting_mean", "requests", "the same for one engine", _POLLS),
    Metric("engine/<n>/kv_usage_mean", "share", "the same for one engine", _POLLS),
    Metric("engine/<n>/tokens_per_s", "tokens/s", "the same for one engine", _POLLS),
    Metric(
        "engine/cache_hit_rate",
        "share",
        "prompt tokens whose keys and values were in the engine's cache, over all requests including evaluations",
        "prompt tokens; for a continued response also its tokens so far",
    ),
    Metric(
        "engine/spec_accept_length",
        "tokens",
        "new tokens per forward pass, including the model's own; only with speculative decoding",
        "forward passes that verified drafts",
    ),
    Metric("engine/num_missed_polls", "polls", "not answered within 5 s because an engine was loading weights, or dead"),
    Metric(
        "train/loss",
        "",
        "minimised loss: `pg_loss - entropy_coef * entropy_loss + kl_loss_coef * kl_loss`",
        f"as in the loss (algorithms.md); then {_STEPS}",
    ),
    Metric("train/pg_loss", "", "policy-gradient term of the loss", f"as in the loss; then {_STEPS}"),
    Metric("train/entropy_loss", "nats", "entropy term of the loss, before its coefficient", f"as in the loss; then {_STEPS}"),
    Metric("train/kl_loss", "nats", "KL term of the loss, before its coefficient", f"as in the loss; then {_STEPS}"),
    Metric(
        "train/mtp_loss",
        "nats",
        "MTP loss, before its factor; not part of `train/loss`",
        f"as in the loss; then {_STEPS}",
    ),
    Metric(
        "train/moe_balance_loss",
        "",
        "auxiliary losses that balance the experts, times `--moe-aux-loss-coeff`, summed over layers; not part of `train/loss`",
        f"tokens of the step; then {_STEPS}",
    ),
    Metric(
        "train/routing_replay_changed",
        "share",
        "routing replay: expert choices that the routers would have made differently",
        f"replayed choices of the step; then {_STEPS}",
    ),
    Metric("train/opd_reverse_kl", "nats", "reverse KL to the teacher (`--use-opd`): old policy - teacher at sampled tokens", _TOKENS),
    Metric("train/kl", "nats", "KL to the reference, by the estimator of `--kl-loss-type` (k1 if it is not part of the loss)", _TOKENS),
    Metric("train/entropy", "nats", "entropy of the policy at the sampling temperature", _TOKENS),
    Metric("train/ratio_mean", "", "probability under the current policy divided by that under the old policy", _TOKENS),
    Metric("train/clip_fraction", "share", "tokens without gradient because their ratio is clipped", _TOKENS),
    Metric(
        "train/logprob_abs_diff",
        "nats",
        "absolute difference between the trainer's and the engine's log-probabilities; it rises if versions, precision or sampling differ",
        _TOKENS,
    ),
    Metric("train/tis_mean", "", "importance weight between engine and trainer", _TOKENS),
    Metric("train/tis_cut_fraction", "share", "importance weights that were clamped or set to 0", _TOKENS),
    Metric(
        "train/opsm_masked_fraction",
        "share",
        "tokens of responses with negative advantage that are masked because the policy has moved too far from the one that sampled them",
        _TOKENS,
    ),
    Metric("train/value_loss", "", "clipped squared error of the values against their returns, halved", f"as in the loss; then {_STEPS}"),
    Metric("train/value_clip_fraction", "share", "tokens without gradient because their value is clipped", _TOKENS),
    Metric("train/value_mean", "", "values before the value model trains on the rollout", _TRAINED),
    Metric("train/return_mean", "", "targets of the values", _TRAINED),
    Metric(
        "train/explained_variance",
        "share",
        "1 - Var(returns - values) / Var(returns): 1 is a perfect value model, 0 a constant one, below 0 worse than a constant",
        _TRAINED,
    ),
    Metric("train/critic_grad_norm", "", "global gradient norm of the value model before clipping", _STEPS),
    Metric("train/critic_lr", "", "learning rate of the value model", _STEPS),
    Metric("train/grad_norm", "", "global gradient norm before clipping", _STEPS),
    Metric("train/lr", "", "learning rate", _STEPS),
    Metric("train/num_micro_batches", "", "forward and backward passes of an optimizer step", _STEPS),
    Metric("train/tokens_per_s", "tokens/s", "tokens through forward and backward, prompts included", "seconds of training"),
    Metric("perf/step_s", "s", "from the end of the previous step to the end of this one"),
    Metric(
        "perf/<phase>_s",
        "s",
        "time in a phase of the step: rollout, score, train, sync, eval, save, ...; phases of several steps may overlap. "
        "With `--async-mode full`, rollout is the time that the trainer waited for one",
    ),
    Metric(
        "perf/engine_idle_fraction",
        "share",
        "share of the time without a request in flight for training or evaluation; requests paused by a weight sync are in flight",
        "seconds between the ends of two rollouts",
    ),
    Metric("perf/idle_fraction", "share", "share of the step in which the trainer neither scored nor trained", "`perf/step_s`"),
    Metric("eval/<dataset>/mean@<n>", "", "reward", "usable samples of a prompt, then prompts of the data set"),
    Metric(
        "eval/<dataset>/pass@<k>",
        "share",
        "probability that at least one of k samples has a reward of at least 1, unbiased (Chen et al. 2021)",
        "prompts of the data set",
    ),
    Metric("eval/<dataset>/response_len_mean", "tokens", "length of responses", "usable samples of the data set"),
    Metric("eval/<dataset>/truncated_ratio", "share", "responses truncated at the maximum length", "usable samples of the data set"),
    Metric("eval/<dataset>/num_failed", "samples", "failed in generation or reward"),
)

_INTRODUCTION = """# Metrics

`metrics.jsonl` in the run directory has one object per step; TensorBoard and W&B get the same, and the evaluations (`eval/*`) at the step
that the evaluated weights sample next. Keys that do not apply to a run are left out, and values that are not finite are `null`. Metrics
returned by a loss hook appear as `train/<name>`. Keys marked with ⏱ depend on the clock; all others are equal bit for bit in two
synchronous runs with the same seed on the same machine.

This page is generated by `python -m fuligo.observability.metric_table`.
"""


def undocumented(keys: Iterable[str]) -> list[str]:
    """Return the keys that the table lacks."""
    return [key for key in keys if not any(pattern.fullmatch(key) for pattern in _PATTERNS)]


def _pattern(key: str) -> re.Pattern[str]:
    return re.compile("".join(".+" if part.startswith("<") else re.escape(part) for part in re.split(r"(<\w+>)", key)))


_PATTERNS = [_pattern(metric.key) for metric in METRICS]


def metrics_page() -> str:
    """Return the text of docs/metrics.md."""
    lines = [_INTRODUCTION]
    section = None
    for metric in METRICS:
        prefix = metric.key.partition("/")[0] if "/" in metric.key else "record"
        if prefix != section:
            section = prefix
            lines += [f"\n## {section}\n", "| key | unit | meaning | mean over |", "|---|---|---|---|"]
        clock = " ⏱" if is_timing(metric.key) else ""
        lines.append(f"| `{metric.key}`{clock} | {metric.unit} | {metric.meaning} | {metric.mean_over} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    (Path(__file__).parents[2] / "docs" / "metrics.md").write_text(metrics_page(), encoding="utf-8")
