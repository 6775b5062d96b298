"""Lengths of samples: longest, assumed average, and tokens per micro-batch."""

import math

from fuligo.config import Config
from fuligo.layout.flops import MIN_SAVED_TOKENS
from fuligo.layout.megatron import Layout
from fuligo.planner.subject import Subject

DEFAULT_PACKED_TOKENS = 8192
"""Tokens of a micro-batch per GPU without --use-dynamic-batch-size and --micro-batch-size (`job/trainer_settings.py`)."""
ASSUMED_PROMPT_TOKENS = 256
"""Prompt length if the flags set no bound: a mathematics question with its chat template."""
AVERAGE_OF_LONGEST = 0.5
"""Assumed mean response / longest response."""


def longest_prompt(config: Config) -> int:
    """Return the tokens of the longest prompt that the flags allow, or the assumed length without a bound."""
    bound = config.data.rollout_max_prompt_len
    context = config.rollout.rollout_max_context_len
    if bound is None and context is not None:
        bound = max(1, context - config.rollout.rollout_max_response_len)
    return ASSUMED_PROMPT_TOKENS if bound is None else bound


def longest_sample(config: Config) -> int:
    """Return the tokens of the longest prompt and response together."""
    return config.max_sample_tokens or longest_prompt(config) + config.rollout.rollout_max_response_len


def average_prompt(config: Config) -> int:
    return min(longest_prompt(config), ASSUMED_PROMPT_TOKENS)


def average_response(config: Config) -> int:
    return max(1, round(config.rollout.rollout_max_response_len * AVERAGE_OF_LONGEST))


def micro_batch_tokens(config: Config, shape: Layout) -> int:
    """Return the tokens of the largest micro-batch per context-parallel rank.

    That is a full pack, or the longest sample if longer; with `--micro-batch-size`, that many of the longest samples.
    """
    train = config.train
    longest = math.ceil(longest_sample(config) / shape.cp)
    if train.use_dynamic_batch_size:
        return max(train.max_tokens_per_gpu or DEFAULT_PACKED_TOKENS, longest)
    if train.micro_batch_size is not None:
        return train.micro_batch_size * longest
    return max(DEFAULT_PACKED_TOKENS, longest)


def samples_per_tree(config: Config, shape: Layout) -> int:
    """Return the number of responses per row that share their prompt; 1 if prompts are not shared.

    A micro-batch and a replica's part of an optimizer step limit it. Other prefixes, such as the turns of an episode, depend on the
    samples and are not counted.
    """
    if not config.shares_prefixes or config.is_sft:
        return 1
    train, prompt = config.train, average_prompt(config)
    num_samples = min(config.rollout.n_samples_per_prompt, math.ceil(config.resolved_global_batch_size / shape.dp))
    if not train.use_dynamic_batch_size and train.micro_batch_size is not None:
        num_samples = min(num_samples, train.micro_batch_size)
    else:
        room = micro_batch_tokens(config, shape) * shape.cp - prompt
        num_samples = max(1, min(num_samples, room // average_response(config)))
    return num_samples if prompt * (num_samples - 1) >= MIN_SAVED_TOKENS else 1


def computed_tokens(config: Config, shape: Layout) -> float:
    """Return the tokens that the trainer computes for an average sample: its response, and its part of a shared prompt."""
    return average_prompt(config) / samples_per_tree(config, shape) + average_response(config)


def copied_keys_per_token(config: Config, shape: Layout) -> float:
    """Return the number of copied keys per token of a row: the keys of a shared prompt are copied for each response that reads them."""
    return (average_prompt(config) + average_response(config)) / computed_tokens(config, shape) - 1


def num_micro_batches(subject: Subject, shape: Layout) -> int:
    """Return the micro-batches of one data-parallel rank in an optimizer step, for samples of average length."""
    config = subject.config
    samples = math.ceil(config.resolved_global_batch_size / shape.dp)
    if not config.train.use_dynamic_batch_size and config.train.micro_batch_size is not None:
        return max(1, math.ceil(samples / config.train.micro_batch_size))
    tokens = samples * computed_tokens(config, shape)
    count = max(1, math.ceil(tokens / (micro_batch_tokens(config, shape) * shape.cp)))
    return math.ceil(count / shape.pp) * shape.pp if shape.vpp > 1 else count
