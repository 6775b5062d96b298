"""What must be given, and what excludes what."""

from __future__ import annotations

import re

from fuligo.algorithms.estimators import estimator
from fuligo.config import Config
from fuligo.config.flags import did_you_mean, nearest

NEEDS_LABEL = {"math": True, "deepscaler": True, "dapo": True, "f1": True, "random": False, "remote_rm": False}
"""The built-in rewards, and whether each compares with a label."""
_BOXED = "boxed_"


def model_is_given(config: Config) -> str | None:
    return None if config.model.hf_checkpoint else "--hf-checkpoint is missing: give the Hugging Face directory of the model to train"


def prompts_are_given(config: Config) -> str | None:
    elsewhere = config.data.data_source_path or config.rollout.rollout_function_path or config.debug.debug_train_only
    return None if config.data.prompt_data or elsewhere else "--prompt-data is missing: give the jsonl or parquet file of prompts"


def length_is_given_once(config: Config) -> str | None:
    rollouts, epochs = config.data.num_rollout, config.data.num_epoch
    if rollouts is not None and epochs is not None:
        return f"--num-rollout {rollouts} and --num-epoch {epochs} both say how long to run: give one of them"
    if rollouts is None and epochs is None:
        return "nothing says how long to run: give --num-rollout, or --num-epoch"
    if epochs is not None and not (config.data.prompt_data or config.data.data_source_path):
        return f"--num-epoch {epochs} counts passes over --prompt-data, which is not given: give --num-rollout instead"
    return None


def something_judges(config: Config) -> str | None:
    reward, rollout = config.reward, config.rollout
    judged = reward.rm_type or reward.custom_rm_path or config.data.metadata_key
    judged_by_hook = rollout.custom_generate_function_path or rollout.rollout_function_path
    if judged or judged_by_hook or config.debug.debug_train_only or (config.is_sft and not config.has_eval):
        return None
    return "nothing judges the responses: give --rm-type, --custom-rm-path, or --metadata-key with an rm_type in each row"


def reward_is_known(config: Config) -> str | None:
    name = config.reward.rm_type
    if name is None or name.removeprefix(_BOXED) in NEEDS_LABEL:
        return None
    boxed = [_BOXED + known for known in NEEDS_LABEL] if name.startswith(_BOXED) else []
    hint = did_you_mean(nearest(name, [*NEEDS_LABEL, *boxed])) or f"; known: {', '.join(NEEDS_LABEL)}, each also with the prefix {_BOXED}"
    return f"--rm-type {name} is not a built-in reward{hint} (your own function goes to --custom-rm-path)"


def label_is_given(config: Config) -> str | None:
    name = config.reward.rm_type
    if name is None or not NEEDS_LABEL.get(name.removeprefix(_BOXED), False) or config.data.label_key or config.reward.custom_rm_path:
        return None
    if not config.data.prompt_data:
        return None  # a hook draws the samples, with labels of its own
    return f"--rm-type {name} compares with a label: give its column by --label-key"


def remote_reward_has_address(config: Config) -> str | None:
    name = config.reward.rm_type
    if name is None or name.removeprefix(_BOXED) != "remote_rm" or config.reward.rm_url:
        return None
    return f"--rm-type {name} needs the address of the reward model: give --rm-url"


def custom_loss_has_function(config: Config) -> str | None:
    if config.algorithm.loss_type != "custom_loss" or config.algorithm.custom_loss_function_path:
        return None
    return "--loss-type custom_loss needs the function: give --custom-loss-function-path"


def one_kl_term(config: Config) -> str | None:
    shaping, loss = config.algorithm.kl_coef, config.algorithm.kl_loss_coef
    if shaping == 0 or loss == 0:
        return None
    return f"--kl-coef {shaping} and --kl-loss-coef {loss} would count the same KL twice: set one of them to 0"


def advantages_are_whitened(config: Config) -> str | None:
    name = config.algorithm.advantage_estimator
    by_hook = config.algorithm.custom_advantage_function_path
    if config.is_sft or by_hook or config.algorithm.normalize_advantages or not estimator(name).needs_whitening:
        return None
    return f"--advantage-estimator {name} needs --normalize-advantages: add it"


def one_old_policy(config: Config) -> str | None:
    if not (config.algorithm.use_tis and config.algorithm.use_rollout_logprobs):
        return None
    return (
        "--use-tis corrects for the difference between engine and trainer, --use-rollout-logprobs takes the engine's side: give one of them"
    )


def trained_parameters_are_named_once(config: Config) -> str | None:
    if not (config.train.only_train_params_name_list and config.train.freeze_params_name_list):
        return None
    return "--only-train-params-name-list and --freeze-params-name-list exclude each other: give one of them"


def parameter_patterns_compile(config: Config) -> str | None:
    for option, patterns in (
        ("--only-train-params-name-list", config.train.only_train_params_name_list),
        ("--freeze-params-name-list", config.train.freeze_params_name_list),
    ):
        for pattern in patterns:
            try:
                re.compile(pattern)
            except re.error as error:
                return f"{option}: {pattern!r} is not a regular expression ({error})"
    return None


def micro_batches_have_a_limit(config: Config) -> str | None:
    if not config.train.use_dynamic_batch_size or config.train.max_tokens_per_gpu:
        return None
    return "--use-dynamic-batch-size needs a limit: give --max-tokens-per-gpu"


def eval_data_are_named(config: Config) -> str | None:
    given = config.eval.eval_prompt_data
    if len(given) > 1 and len(given) % 2:
        return f"--eval-prompt-data takes NAME PATH pairs or a single PATH, got {len(given)} values: {' '.join(given)}"
    names = given[::2] if len(given) > 1 else []
    twice = sorted({name for name in names if names.count(name) > 1})
    return f"--eval-prompt-data names {', '.join(twice)} more than once: give every data set a name of its own" if twice else None


def one_side_is_debugged(config: Config) -> str | None:
    if not (config.debug.debug_rollout_only and config.debug.debug_train_only):
        return None
    return "--debug-rollout-only and --debug-train-only exclude each other: give one of them"


def debug_training_has_data(config: Config) -> str | None:
    if not config.debug.debug_train_only or config.debug.load_debug_rollout_data:
        return None
    return "--debug-train-only trains on saved rollouts: give them by --load-debug-rollout-data"


def every_rollout_has_its_file(config: Config) -> str | None:
    if config.data.num_rollout == 1:
        return None
    for option, path in (
        ("--save-debug-rollout-data", config.debug.save_debug_rollout_data),
        ("--load-debug-rollout-data", config.debug.load_debug_rollout_data),
        ("--save-hf", config.checkpoint.save_hf),
    ):
        if path is not None and "{rollout_id}" not in path:
            return f"{option} {path} is one path for all rollouts: put {{rollout_id}} into it"
    return None


def engine_addresses_are_complete(config: Config) -> str | None:
    for address in config.engine.rollout_external_engine_addrs:
        host, _, port = address.removeprefix("http://").rpartition(":")
        if not host or not port.isdecimal():
            return f"--rollout-external-engine-addrs: {address!r} must be host:port, such as 127.0.0.1:30000"
    return None


RULES = (
    model_is_given,
    prompts_are_given,
    length_is_given_once,
    something_judges,
    reward_is_known,
    label_is_given,
    remote_reward_has_address,
    custom_loss_has_function,
    one_kl_term,
    advantages_are_whitened,
    one_old_policy,
    trained_parameters_are_named_once,
    parameter_patterns_compile,
    micro_batches_have_a_limit,
    eval_data_are_named,
    one_side_is_debugged,
    debug_training_has_data,
    every_rollout_has_its_file,
    engine_addresses_are_complete,
)
