"""Numbers that must agree."""

from __future__ import annotations

from fuligo.config import Config


def _samples(config: Config) -> str:
    """`--rollout-batch-size 32 x --n-samples-per-prompt 8 = 256 samples`."""
    prompts = config.rollout.rollout_batch_size
    if config.is_sft:
        return f"--rollout-batch-size {prompts} = {prompts} samples"
    responses = config.rollout.n_samples_per_prompt
    return f"--rollout-batch-size {prompts} x --n-samples-per-prompt {responses} = {config.samples_per_rollout} samples"


def global_batch_divides_rollout(config: Config) -> str | None:
    size, samples = config.train.global_batch_size, config.samples_per_rollout
    if size is None or config.train.num_steps_per_rollout is not None or samples % size == 0:
        return None
    if size > samples:
        return f"--global-batch-size {size} is more than a rollout has ({_samples(config)}): use at most {samples}"
    near = max(divisor for divisor in range(1, size) if samples % divisor == 0)
    return f"--global-batch-size {size} does not divide a rollout ({_samples(config)}): use {near}, or change the rollout's size"


def steps_divide_rollout(config: Config) -> str | None:
    steps, samples = config.train.num_steps_per_rollout, config.samples_per_rollout
    if steps is None or samples % steps == 0:
        return None
    return f"--num-steps-per-rollout {steps} does not divide a rollout ({_samples(config)}) into equal steps"


def global_batch_agrees_with_steps(config: Config) -> str | None:
    size, steps, samples = config.train.global_batch_size, config.train.num_steps_per_rollout, config.samples_per_rollout
    if size is None or steps is None or size * steps == samples:
        return None
    return (
        f"--global-batch-size {size} x --num-steps-per-rollout {steps} = {size * steps}, but {_samples(config)}: "
        "leave one of the two flags out, it follows from the other"
    )


def every_rank_has_a_sample(config: Config) -> str | None:
    ranks, size = config.num_train_gpus, config.resolved_global_batch_size
    if size >= ranks or size == 0:
        return None
    return (
        f"an optimizer step has {size} samples for {ranks} trainer processes, each needs at least one: raise --global-batch-size to {ranks}"
    )


def wave_fills_rollout(config: Config) -> str | None:
    wave, prompts = config.rollout.over_sampling_batch_size, config.rollout.rollout_batch_size
    if wave is None or wave >= prompts:
        return None
    return f"--over-sampling-batch-size {wave} is below --rollout-batch-size {prompts}: a wave must fill a rollout, use at least {prompts}"


def context_has_room(config: Config) -> str | None:
    context, prompt = config.rollout.rollout_max_context_len, config.data.rollout_max_prompt_len
    if context is None or prompt is None or prompt < context:
        return None
    return (
        f"--rollout-max-prompt-len {prompt} leaves no room to respond in --rollout-max-context-len {context}: lower it, or raise the other"
    )


def cache_holds_a_response(config: Config) -> str | None:
    cache, response = config.engine.embedded_max_total_tokens, config.rollout.rollout_max_response_len
    if cache is None or cache > response:
        return None
    return (
        f"--embedded-max-total-tokens {cache} cannot hold one prompt and a response of --rollout-max-response-len {response}: "
        "raise it, or leave it out"
    )


def top_k_keeps_a_token(config: Config) -> str | None:
    given = {"--rollout-top-k": config.rollout.rollout_top_k, "--eval-top-k": config.eval.eval_top_k}
    zero = [option for option, value in given.items() if value == 0]
    return f"{' and '.join(zero)} 0 keeps no token: use -1 for all, or at least 1" if zero else None


def tis_bounds_are_ordered(config: Config) -> str | None:
    low, high = config.algorithm.tis_clip_low, config.algorithm.tis_clip
    return f"--tis-clip-low {low} is above --tis-clip {high}: the lower bound must not exceed the upper" if low > high else None


def learning_rate_falls(config: Config) -> str | None:
    low, peak = config.optimizer.min_lr, config.optimizer.lr
    return f"--min-lr {low} is above --lr {peak}: it is the end of the decay, use at most {peak}" if low > peak else None


def decay_follows_warmup(config: Config) -> str | None:
    decay, warmup = config.optimizer.lr_decay_iters, config.optimizer.lr_warmup_iters
    if decay is None or decay > warmup:
        return None
    return f"--lr-decay-iters {decay} ends before --lr-warmup-iters {warmup}: it counts from the first step, use more than {warmup}"


RULES = (
    global_batch_divides_rollout,
    steps_divide_rollout,
    global_batch_agrees_with_steps,
    every_rank_has_a_sample,
    wave_fills_rollout,
    context_has_room,
    cache_holds_a_response,
    top_k_keeps_a_token,
    tis_bounds_are_ordered,
    learning_rate_falls,
    decay_follows_warmup,
)
