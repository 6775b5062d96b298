"""What must be given."""

from __future__ import annotations

import re
from typing import Literal

from fuligo.algorithms.estimators import ESTIMATORS
from fuligo.config import Config
from fuligo.config.flags import nearest
from fuligo.config.rules.rule import Violation, rule, set_flag

REWARD_NEEDS: dict[str, tuple[Literal["label_key", "metadata_key"], ...]] = {
    "math": ("label_key",),
    "deepscaler": ("label_key",),
    "dapo": ("label_key",),
    "f1": ("label_key",),
    "gpqa": ("label_key", "metadata_key"),
    "ifbench": ("metadata_key",),
    "random": (),
    "remote_rm": (),
}
"""The built-in rewards, and the columns of which each needs one."""
_BOXED = "boxed_"
NUMBERS = frozenset(prefix + name for name in REWARD_NEEDS if name not in ("dapo", "remote_rm") for prefix in ("", _BOXED))
"""The built-in rewards that are a number, never a dict."""
_TOKENS = 8192
"""Of a micro-batch, where nothing limits the length of a sample."""


@rule("CFG-MODEL-MISSING", "--hf-checkpoint")
def model_is_given(config: Config) -> Violation | None:
    """Tokenizer, model shape and the engines' weights come from the checkpoint."""
    if config.model.hf_checkpoint:
        return None
    return Violation("--hf-checkpoint is missing", advice="give the Hugging Face directory of the model to train")


@rule("CFG-DATA-MISSING", "--prompt-data")
def prompts_are_given(config: Config) -> Violation | None:
    """Something must be asked."""
    elsewhere = config.data.data_source_path or config.rollout.rollout_function_path or config.debug.debug_train_only
    if config.data.prompt_data or elsewhere:
        return None
    return Violation("--prompt-data is missing", advice="give the jsonl or parquet file of prompts")


@rule("CFG-RUN-LENGTH", "--num-rollout", "--num-epoch")
def length_is_given_once(config: Config) -> Violation | None:
    """One flag says how long a run is."""
    rollouts, epochs = config.data.num_rollout, config.data.num_epoch
    if rollouts is not None and epochs is not None:
        return Violation(f"--num-rollout {rollouts} and --num-epoch {epochs} both say how long to run", (set_flag("num_epoch", None),))
    if rollouts is None and epochs is None:
        return Violation("neither --num-rollout nor --num-epoch says how long to run", advice="give one of them")
    if epochs is not None and not (config.data.prompt_data or config.data.data_source_path):
        return Violation(f"--num-epoch {epochs} counts passes over --prompt-data, which is not given", advice="give --num-rollout instead")
    return None


@rule("CFG-REWARD-MISSING", "--rm-type", "--custom-rm-path")
def something_judges(config: Config) -> Violation | None:
    """Without rewards nothing is learned."""
    reward, rollout = config.reward, config.rollout
    judged = reward.rm_type or reward.custom_rm_path or config.data.metadata_key
    judged_by_hook = rollout.custom_generate_function_path or rollout.rollout_function_path
    # Data sets of --eval-config may have rewards of their own.
    needs_none = not config.eval.eval_prompt_data if config.algorithm.use_opd else config.is_sft and not config.has_eval
    if judged or judged_by_hook or config.debug.debug_train_only or needs_none:
        return None
    text = "neither --rm-type nor --custom-rm-path judges the responses"
    return Violation(text, advice="give one of them, or --metadata-key with an rm_type in each row")


@rule("CFG-REWARD-UNKNOWN", "--rm-type")
def reward_is_known(config: Config) -> Violation | None:
    """A misspelt reward would fail with the first sample."""
    name = config.reward.rm_type
    if name is None or name.removeprefix(_BOXED) in REWARD_NEEDS:
        return None
    boxed = [_BOXED + known for known in REWARD_NEEDS] if name.startswith(_BOXED) else []
    near = nearest(name, [*REWARD_NEEDS, *boxed])
    hint = "" if near else f"; known: {', '.join(REWARD_NEEDS)}, each also with the prefix {_BOXED}"
    text = f"--rm-type {name} is not a built-in reward{hint}"
    return Violation(text, (set_flag("rm_type", near[0]),) if near else (), advice="your own function goes to --custom-rm-path")


def lacking_column(rm_type: str, *, label_key: str | None, metadata_key: str | None) -> tuple[str, str] | None:
    """What a built-in reward lacks to judge by, and the way out; None where it has it."""
    columns = REWARD_NEEDS.get(rm_type.removeprefix(_BOXED), ())
    given = {"label_key": label_key, "metadata_key": metadata_key}
    if not columns or any(given[column] for column in columns):
        return None
    if columns == ("metadata_key",):
        return f"--rm-type {rm_type} judges by what the metadata say", "give their column by --metadata-key"
    more = " (or a column of metadata with `correct_letter` by --metadata-key)" if "metadata_key" in columns else ""
    return f"--rm-type {rm_type} compares with a label", f"give its column by --label-key{more}"


@rule("CFG-REWARD-LABEL", "--rm-type", "--label-key", "--metadata-key")
def label_is_given(config: Config) -> Violation | None:
    """A reward that compares needs something to compare with."""
    name, data = config.reward.rm_type, config.data
    if name is None or config.reward.custom_rm_path or not data.prompt_data:
        return None  # without a file a hook draws the samples, with labels of its own
    lacking = lacking_column(name, label_key=data.label_key, metadata_key=data.metadata_key)
    return None if lacking is None else Violation(lacking[0], advice=lacking[1])


@rule("CFG-REWARD-URL", "--rm-type", "--rm-url")
def remote_reward_has_address(config: Config) -> Violation | None:
    """A remote reward model has an address."""
    name = config.reward.rm_type
    if name is None or name.removeprefix(_BOXED) != "remote_rm":
        return None
    url = config.reward.rm_url
    if not url:
        return Violation(f"--rm-type {name} needs the address of the reward model", advice="give --rm-url")
    if not re.match(r"https?://[^/\s]", url):
        return Violation(f"--rm-url {url!r} is no address", advice="give http://host:port/path")
    return None


@rule("CFG-CUSTOM-LOSS", "--loss-type", "--custom-loss-function-path")
def custom_loss_has_function(config: Config) -> Violation | None:
    """A custom loss is a function of the user's."""
    if config.algorithm.loss_type != "custom_loss" or config.algorithm.custom_loss_function_path:
        return None
    return Violation("--loss-type custom_loss needs the function", advice="give --custom-loss-function-path")


@rule("CFG-WHITENING", "--advantage-estimator", "--normalize-advantages")
def advantages_are_whitened(config: Config) -> Violation | None:
    """The REINFORCE++ estimators are only defined with advantages whitened over the batch."""
    name = config.algorithm.advantage_estimator
    by_hook = config.algorithm.custom_advantage_function_path
    if config.is_sft or by_hook or config.algorithm.normalize_advantages or not ESTIMATORS[name].needs_whitening:
        return None
    return Violation(f"--advantage-estimator {name} needs --normalize-advantages", (set_flag("normalize_advantages", True),))


@rule("CFG-MAX-TOKENS", "--use-dynamic-batch-size", "--max-tokens-per-gpu")
def micro_batches_have_a_limit(config: Config) -> Violation | None:
    """Packing by tokens needs the number of tokens."""
    if not config.train.use_dynamic_batch_size or config.train.max_tokens_per_gpu:
        return None
    tokens = -(-(config.max_sample_tokens or _TOKENS) // config.parallel.context_parallel_size)
    return Violation("--use-dynamic-batch-size needs a limit, --max-tokens-per-gpu", (set_flag("max_tokens_per_gpu", tokens),))


@rule("CFG-DEBUG-DATA", "--debug-train-only", "--load-debug-rollout-data")
def debug_training_has_data(config: Config) -> Violation | None:
    """Training without engines takes rollouts that were saved."""
    if not config.debug.debug_train_only or config.debug.load_debug_rollout_data:
        return None
    return Violation("--debug-train-only trains on saved rollouts", advice="give them by --load-debug-rollout-data")


@rule("CFG-ASYNC-STALENESS", "--async-mode", "--max-staleness")
def continuous_rollout_has_a_bound(config: Config) -> Violation | None:
    """Sampling that never waits for the trainer falls behind without a bound."""
    if config.rollout.async_mode != "full" or config.rollout.max_staleness is not None:
        return None
    return Violation("--async-mode full samples while weights change: --max-staleness must bound how old", (set_flag("max_staleness", 1),))


@rule("CFG-MTP-LAYERS", "--enable-mtp-training", "--mtp-num-layers")
def mtp_training_has_layers(config: Config) -> Violation | None:
    """Layers that are not loaded cannot be trained."""
    if not config.train.enable_mtp_training or config.train.mtp_num_layers:
        return None
    return Violation("--enable-mtp-training trains the MTP layers, of which --mtp-num-layers loads none", (set_flag("mtp_num_layers", 1),))


RULES = (
    model_is_given,
    prompts_are_given,
    length_is_given_once,
    something_judges,
    reward_is_known,
    label_is_given,
    remote_reward_has_address,
    custom_loss_has_function,
    advantages_are_whitened,
    micro_batches_have_a_limit,
    debug_training_has_data,
    continuous_rollout_has_a_bound,
    mtp_training_has_layers,
)
