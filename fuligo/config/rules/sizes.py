"""Rules on numbers that must agree or stay within bounds: batch and cache sizes, sampling, importance weights, learning rate."""

import math
from collections.abc import Iterator

from fuligo.config import Config
from fuligo.config.findings import Change, Rule, simple_rule
from fuligo.config.flag import option_name
from fuligo.config.rules.rule import Violation, rule, set_flag, unset_flag
from fuligo.quantities import count


def _samples(config: Config) -> str:
    """Return `--rollout-batch-size 32 x --n-samples-per-prompt 8 = 256 samples`."""
    prompts = config.rollout.rollout_batch_size
    if config.is_sft:
        return f"--rollout-batch-size {prompts} = {count(prompts, 'sample')}"
    responses = config.rollout.n_samples_per_prompt
    return f"--rollout-batch-size {prompts} x --n-samples-per-prompt {responses} = {count(config.samples_per_rollout, 'sample')}"


def _largest_divisor(number: int, limit: int) -> int:
    return next(divisor for divisor in range(min(number, limit), 0, -1) if number % divisor == 0)


@rule("CFG-GLOBAL-BATCH", "--global-batch-size", "--rollout-batch-size", "--n-samples-per-prompt")
def global_batch_divides_rollout(config: Config) -> Iterator[Violation]:
    """Require a global batch that divides a rollout, so that every sample is trained once in equal steps."""
    size, samples = config.train.global_batch_size, config.samples_per_rollout
    if size is not None and config.train.num_steps_per_rollout is None and samples % size != 0:
        problem = "exceeds a rollout" if size > samples else "does not divide a rollout"
        text = f"--global-batch-size {size} {problem} ({_samples(config)})"
        yield Violation(text, (set_flag("global_batch_size", _largest_divisor(samples, size)),))


@rule("CFG-NUM-STEPS", "--num-steps-per-rollout", "--rollout-batch-size", "--n-samples-per-prompt")
def steps_divide_rollout(config: Config) -> Iterator[Violation]:
    """Require a number of optimizer steps that divides a rollout."""
    steps, samples = config.train.num_steps_per_rollout, config.samples_per_rollout
    if steps is not None and samples % steps != 0:
        changes = [set_flag("num_steps_per_rollout", _largest_divisor(samples, steps))]
        if config.train.global_batch_size is not None:
            changes.append(unset_flag("global_batch_size"))
        yield Violation(f"--num-steps-per-rollout {steps} does not divide a rollout ({_samples(config)}) into equal steps", tuple(changes))


@rule("CFG-EMPTY-RANK", "--global-batch-size", "--rollout-batch-size", "--n-samples-per-prompt")
def every_rank_has_a_sample(config: Config) -> Iterator[Violation]:
    """Require a sample per data-parallel rank and step; a rank without one would block the others."""
    ranks, size = config.resolved_data_parallel_size, config.resolved_global_batch_size
    if size >= ranks or size == 0:
        return
    samples, prompts, wave = config.samples_per_rollout, config.rollout.rollout_batch_size, config.rollout.over_sampling_batch_size
    text = f"an optimizer step needs a sample for each of {ranks} data-parallel ranks, but has only {size} ({_samples(config)})"
    one_step = () if config.train.num_steps_per_rollout is None else (unset_flag("num_steps_per_rollout"),)
    enough = next((number for number in range(ranks, samples + 1) if samples % number == 0), None)
    if enough is not None:
        yield Violation(text, (*one_step, set_flag("global_batch_size", enough)))
        return
    more = -(-ranks * prompts // samples)
    whole = () if config.train.global_batch_size is None else (unset_flag("global_batch_size"),)
    larger_wave = () if wave is None or wave >= more else (set_flag("over_sampling_batch_size", more),)
    yield Violation(text, (*one_step, *whole, set_flag("rollout_batch_size", more), *larger_wave), "or train on fewer GPUs")


@rule("CFG-OVER-SAMPLING", "--over-sampling-batch-size", "--rollout-batch-size")
def wave_fills_rollout(config: Config) -> Iterator[Violation]:
    """Require a sampling wave that can fill a rollout."""
    wave, prompts = config.rollout.over_sampling_batch_size, config.rollout.rollout_batch_size
    if wave is not None and wave < prompts:
        text = f"--over-sampling-batch-size {wave} is smaller than --rollout-batch-size {prompts}, which a wave must fill"
        yield Violation(text, (set_flag("over_sampling_batch_size", prompts),))


@rule("CFG-CONTEXT", "--rollout-max-context-len", "--rollout-max-prompt-len")
def context_has_room(config: Config) -> Iterator[Violation]:
    """Require room for a response in the context."""
    context, prompt = config.rollout.rollout_max_context_len, config.data.rollout_max_prompt_len
    if context is not None and prompt is not None and prompt >= context:
        text = f"--rollout-max-prompt-len {prompt} leaves no room for a response in --rollout-max-context-len {context}"
        yield Violation(text, (set_flag("rollout_max_context_len", prompt + config.rollout.rollout_max_response_len),))


@rule("CFG-TOP-K", "--rollout-top-k", "--eval-top-k")
def top_k_keeps_a_token(config: Config) -> Iterator[Violation]:
    """Reject top-k 0, which keeps no token."""
    zero = [name for name, value in (("rollout_top_k", config.rollout.rollout_top_k), ("eval_top_k", config.eval.eval_top_k)) if value == 0]
    if zero:
        options = tuple(option_name(name) for name in zero)
        text = f"{' and '.join(options)} 0 keeps no token; -1 keeps all"
        yield Violation(text, tuple(set_flag(name, -1) for name in zero), flags=options)


@rule("CFG-MIN-LR", "--min-lr", "--lr", "--critic-lr")
def learning_rate_falls(config: Config) -> Iterator[Violation]:
    """Require that the learning rate does not rise: --min-lr is at most --lr and --critic-lr."""
    low, peaks = config.optimizer.min_lr, {"lr": config.optimizer.lr, "critic_lr": config.optimizer.critic_lr}
    for name, peak in peaks.items():
        if peak is not None and low > peak:
            option = option_name(name)
            text = f"--min-lr {low}, the end of the decay, is above {option} {peak}"
            yield Violation(text, (unset_flag("min_lr"),), flags=("--min-lr", option))
            return


@rule("CFG-LR-DECAY", "--lr-decay-iters", "--lr-warmup-iters", "--critic-lr-warmup-iters")
def decay_follows_warmup(config: Config) -> Iterator[Violation]:
    """Require a decay that ends after the warm-up."""
    flags = config.optimizer
    decay = flags.lr_decay_iters
    for name, warmup in (("lr_warmup_iters", flags.lr_warmup_iters), ("critic_lr_warmup_iters", flags.critic_lr_warmup_iters)):
        if decay is not None and decay <= warmup:
            option = option_name(name)
            text = f"--lr-decay-iters {decay}, counted from the first step, does not end after {option} {warmup}"
            yield Violation(text, (unset_flag("lr_decay_iters"),), flags=("--lr-decay-iters", option))
            return


@rule("CFG-STEP-SIZES", "--global-batch-size", "--num-steps-per-rollout")
def global_batch_agrees_with_steps(config: Config) -> Iterator[Violation]:
    """Require that the global batch size and the number of steps agree."""
    size, steps, samples = config.train.global_batch_size, config.train.num_steps_per_rollout, config.samples_per_rollout
    if size is not None and steps is not None and size * steps != samples and not samples % steps:
        text = f"--global-batch-size {size} x --num-steps-per-rollout {steps} = {size * steps}, but {_samples(config)}"
        yield Violation(text, (unset_flag("global_batch_size"),))


# fmt: off
TABLE: tuple[Rule[Config, Change], ...] = (
    simple_rule("CFG-KV-CACHE", "--embedded-max-total-tokens --rollout-max-response-len", "Require a KV cache that holds one request.",
        lambda config: (config.engine.embedded_max_total_tokens or math.inf) <= config.rollout.rollout_max_response_len,
        lambda config: f"--embedded-max-total-tokens {config.engine.embedded_max_total_tokens} cannot hold one prompt and a response of "
        f"--rollout-max-response-len {config.rollout.rollout_max_response_len}",
        unset_flag("embedded_max_total_tokens")),
    simple_rule("CFG-TIS-BOUNDS", "--tis-clip-low --tis-clip",
        "Require a lower bound of importance weights that does not exceed the upper bound.",
        lambda config: config.algorithm.tis_clip_low > config.algorithm.tis_clip,
        lambda config: f"--tis-clip-low {config.algorithm.tis_clip_low} is above --tis-clip {config.algorithm.tis_clip}",
        unset_flag("tis_clip_low")),
)
# fmt: on
