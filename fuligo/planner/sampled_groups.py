"""Number of groups that a rollout starts, and its duration, until enough groups are kept (`rollout.dynamic_sampling`)."""

from dataclasses import dataclass
from statistics import NormalDist

from fuligo.config import Config
from fuligo.planner.subject import Subject

_NEGLIGIBLE = 1e-3
"""Largest probability of a further wave at which it is ignored."""

LIKELY = 0.01
"""Smallest probability of an unfilled rollout to mention."""


@dataclass(frozen=True, slots=True)
class SampledGroups:
    """Expected sampling of one rollout; response lengths are uniform up to the longest, and all requests of a wave run at once."""

    num_waves: float
    """Waves of `wave_size` groups; 1 for continuous sampling."""
    wave_size: float
    """Groups that are sampled at once."""
    started: float
    """Groups whose sampling begins."""
    finished: float
    """Groups that finish and are judged."""
    decoded: float
    """Whole groups with as many tokens as all groups together, unfinished ones included."""
    duration: float
    """Duration relative to the decoding of the longest response."""
    unfilled: float = 0.0
    """Probability that --max-sampling-waves ends the run, since too few groups are kept."""


def sampled_groups(subject: Subject) -> SampledGroups:
    """Return the expected number of groups that a rollout samples, given the assumed share that the filter keeps."""
    config = subject.config
    target, max_waves = config.rollout.rollout_batch_size, config.rollout.max_sampling_waves
    kept = subject.assumed.kept_share if has_filter(config) else 1.0
    finished = target / kept
    if config.rollout.rollout_function_path is not None:  # its waves are unknown
        return SampledGroups(1.0, target, target, target, target, 1.0)
    if config.rollout.async_mode == "full":  # a dropped group makes room for another one, until `max_waves * target` are dropped
        most = target + max_waves * target
        unfilled, finished = float(finished >= most), min(finished, most)
        return SampledGroups(1.0, finished, finished, finished, finished, 1.0, unfilled)
    wave, num_samples = config.resolved_over_sampling_batch_size, config.rollout.n_samples_per_prompt
    num_waves = decoded = duration = 0.0
    in_order = config.rollout.sampling_order == "submission"
    probability, number = 1.0, 1
    while probability > _NEGLIGIBLE and number <= max_waves:
        num_groups, following = number * wave, 0.0
        if kept < 1.0:  # the probability that fewer than `target` are kept (binomial, approximated by a normal distribution)
            following = NormalDist(num_groups * kept, (num_groups * kept * (1 - kept)) ** 0.5).cdf(target - 0.5)
        following = min(following, probability)
        # Another wave starts as soon as more than `number * wave - target` groups are dropped.
        dropped = number * wave - target - (1 - kept) * (number - 1) * wave
        starts_next = _reached(dropped / ((1 - kept) * wave), wave, num_samples) if following else 0.0
        ends = 1.0 if in_order else _reached((target - kept * (number - 1) * wave) / (kept * wave), wave, num_samples)
        last = probability - following
        num_waves += probability
        duration += following * starts_next + last * ends
        # A wave that does not end the rollout is decoded in full; the last one until the rollout ends: E[min(length, end)] / E[length].
        decoded += wave * (following + last * (2 * ends - ends**2))
        probability, number = following, number + 1
    finished = min(finished, num_waves * wave)
    if in_order:  # while the rollout waits for one group, later ones finish
        finished = num_waves * wave
    if config.rollout.partial_rollout:  # what the previous rollout left unfinished is continued
        decoded = finished
    return SampledGroups(num_waves, wave, num_waves * wave, finished, decoded, duration, probability if number > max_waves else 0.0)


def has_filter(config: Config) -> bool:
    """Return whether finished groups pass a filter (dynamic sampling)."""
    return config.rollout.dynamic_sampling_filter_path is not None and config.rollout.rollout_function_path is None


def _reached(share: float, wave: int, num_samples: int) -> float:
    """Return when a share of a wave's groups has finished, relative to the longest response.

    A group ends with its longest response; the longest of `num_samples` uniform lengths is below x with probability x^`num_samples`.
    """
    return min(1.0, max(1 / wave, share)) ** (1 / num_samples)
