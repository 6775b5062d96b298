"""Rules on required flags."""

import re
from collections.abc import Iterator
from typing import Literal

from fuligo.algorithms.estimators import ESTIMATORS
from fuligo.config import Config
from fuligo.config.findings import Change, Rule, simple_rule
from fuligo.config.flags import nearest
from fuligo.config.rules.rule import Violation, rule, set_flag
from fuligo.config.secret import Secret

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
"""Built-in reward -> columns; it needs at least one of them."""
_BOXED = "boxed_"
NUMBERS = frozenset(prefix + name for name in REWARD_NEEDS if name not in ("dapo", "remote_rm") for prefix in ("", _BOXED))
"""Built-in rewards that return a number, never a dict."""
_TOKENS = 8192
"""Suggested tokens of a micro-batch if nothing limits the length of a sample."""


def _is_judged(config: Config) -> object:
    by_hook = config.has_custom_generation or config.rollout.rollout_function_path or config.debug.debug_train_only
    return config.reward.rm_type or config.reward.custom_rm_path or config.data.metadata_key or by_hook


def _needs_no_reward(config: Config) -> bool:
    # Datasets of --eval-config may have their own rewards.
    return not config.eval.eval_prompt_data if config.algorithm.use_opd else config.is_sft and not config.has_eval


# fmt: off
TABLE: tuple[Rule[Config, Change], ...] = (
    simple_rule("CFG-MODEL-MISSING", "--hf-checkpoint", "Require a checkpoint: tokenizer, model shape and engine weights come from it.",
        lambda config: not config.model.hf_checkpoint,
        "--hf-checkpoint is missing", advice="set it to the Hugging Face directory of the model to train"),
    simple_rule("CFG-DATA-MISSING", "--prompt-data", "Require prompts: files, a data source or a hook that provides them.",
        lambda config: not (config.data.prompt_data or config.data.data_source_path or config.rollout.rollout_function_path
        or config.debug.debug_train_only),
        "--prompt-data is missing", advice="set it to prompt files, or to a dataset on the Hub"),
    simple_rule("CFG-REWARD-MISSING", "--rm-type --custom-rm-path", "Require a reward unless a teacher or given responses replace it.",
        lambda config: not (_is_judged(config) or _needs_no_reward(config)),
        "the run has no reward: neither --rm-type nor --custom-rm-path is given",
        advice="use one of them, or --metadata-key with an rm_type in each row"),
    simple_rule("CFG-CUSTOM-LOSS", "--loss-type --custom-loss-function-path", "Require a function for a custom loss.",
        lambda config: config.algorithm.loss_type == "custom_loss" and not config.algorithm.custom_loss_function_path,
        "--loss-type custom_loss needs a function", advice="use --custom-loss-function-path"),
    simple_rule("CFG-WHITENING", "--advantage-estimator --normalize-advantages",
        "Require whitened advantages for the REINFORCE++ estimators, which are defined with them.",
        lambda config: ESTIMATORS[config.algorithm.advantage_estimator].needs_whitening and not config.algorithm.normalize_advantages
        and not (config.is_sft or config.algorithm.custom_advantage_function_path),
        lambda config: f"--advantage-estimator {config.algorithm.advantage_estimator} needs --normalize-advantages",
        set_flag("normalize_advantages", True)),
    simple_rule("CFG-DEBUG-DATA", "--debug-train-only --load-debug-rollout-data", "Require saved rollouts for training without engines.",
        lambda config: config.debug.debug_train_only and not config.debug.load_debug_rollout_data,
        "--debug-train-only needs saved rollouts", advice="use --load-debug-rollout-data"),
    simple_rule("CFG-ASYNC-STALENESS", "--async-mode --max-staleness", "Require a staleness bound for continuous sampling.",
        lambda config: config.rollout.async_mode == "full" and config.rollout.max_staleness is None,
        "--async-mode full samples while weights change and needs a bound on staleness, --max-staleness", set_flag("max_staleness", 1)),
    simple_rule("CFG-MTP-LAYERS", "--enable-mtp-training --mtp-num-layers", "Require that MTP layers are loaded if they are trained.",
        lambda config: config.train.enable_mtp_training and not config.train.mtp_num_layers,
        "--enable-mtp-training needs MTP layers, but --mtp-num-layers loads none", set_flag("mtp_num_layers", 1)),
)
# fmt: on


@rule("CFG-RUN-LENGTH", "--num-rollout", "--num-epoch")
def length_is_given_once(config: Config) -> Iterator[Violation]:
    """Require exactly one flag for the length of the run, and a dataset if the flag counts epochs."""
    rollouts, epochs = config.data.num_rollout, config.data.num_epoch
    if rollouts is not None and epochs is not None:
        yield Violation(f"--num-rollout {rollouts} and --num-epoch {epochs} both set the length of the run", (set_flag("num_epoch", None),))
    elif rollouts is None and epochs is None:
        yield Violation("neither --num-rollout nor --num-epoch sets the length of the run", advice="use one of them")
    elif epochs is not None and not (config.data.prompt_data or config.data.data_source_path):
        yield Violation(f"--num-epoch {epochs} counts passes over --prompt-data, which is not given", advice="use --num-rollout instead")


@rule("CFG-REWARD-WEIGHTS", "--extra-rm-path", "--extra-rm-weights")
def every_further_reward_has_a_weight(config: Config) -> Iterator[Violation]:
    """Require one weight per additional reward if weights are given, and that fuligo computes the rewards to which they are added."""
    paths, weights = config.reward.extra_rm_path, config.reward.extra_rm_weights
    if weights and paths and len(weights) != len(paths):
        text = f"--extra-rm-weights does not fit --extra-rm-path: weights {len(weights)}, functions {len(paths)}"
        yield Violation(text, advice="give one weight per function")
    elif paths and config.rollout.rollout_function_path:
        text = "--extra-rm-path is added to rewards that fuligo computes; --rollout-function-path computes them itself"
        yield Violation(text, (set_flag("extra_rm_path", None),))


@rule("CFG-REWARD-UNKNOWN", "--rm-type")
def reward_is_known(config: Config) -> Iterator[Violation]:
    """Reject unknown built-in rewards, which would fail at the first sample."""
    name = config.reward.rm_type
    if name is None or name.removeprefix(_BOXED) in REWARD_NEEDS:
        return
    boxed = [_BOXED + known for known in REWARD_NEEDS] if name.startswith(_BOXED) else []
    near = nearest(name, [*REWARD_NEEDS, *boxed])
    hint = "" if near else f"; known: {', '.join(REWARD_NEEDS)}, each also with the prefix {_BOXED}"
    text = f"--rm-type {name} is not a built-in reward{hint}"
    own = "pass your own function with --custom-rm-path"
    yield Violation(text, (set_flag("rm_type", near[0]),), f"or {own}") if near else Violation(text, advice=own)


def lacking_column(rm_type: str, *, label_key: str | None, metadata_key: str | None) -> tuple[str, str] | None:
    """Return the column that a built-in reward lacks, and the remedy; None if it has what it needs."""
    columns = REWARD_NEEDS.get(rm_type.removeprefix(_BOXED), ())
    given = {"label_key": label_key, "metadata_key": metadata_key}
    if not columns or any(given[column] for column in columns):
        return None
    if columns == ("metadata_key",):
        return (
            f"--rm-type {rm_type} reads the metadata of a prompt, but no column is given",
            "name the column of the metadata with --metadata-key",
        )
    more = " (or a metadata column with `correct_letter` with --metadata-key)" if "metadata_key" in columns else ""
    return (
        f"--rm-type {rm_type} compares responses with a label, but no column is given",
        f"name the column of the label with --label-key{more}",
    )


@rule("CFG-REWARD-LABEL", "--rm-type", "--label-key", "--metadata-key")
def label_is_given(config: Config) -> Iterator[Violation]:
    """Require the column that a built-in reward compares with."""
    name, data = config.reward.rm_type, config.data
    if name is None or config.reward.custom_rm_path or not data.prompt_data:
        return  # without a file, a hook provides the samples and their labels
    if lacking := lacking_column(name, label_key=data.label_key, metadata_key=data.metadata_key):
        yield Violation(lacking[0], advice=lacking[1])


@rule("CFG-REWARD-URL", "--rm-type", "--rm-url")
def remote_reward_has_address(config: Config) -> Iterator[Violation]:
    """Require a valid URL for a remote reward model."""
    name, url = config.reward.rm_type, config.reward.rm_url
    if name is None or name.removeprefix(_BOXED) != "remote_rm":
        return
    known = url.value if isinstance(url, Secret) else url
    if not url:
        yield Violation(f"--rm-type {name} needs the address of the reward model", advice="set --rm-url")
    elif known is not None and not re.match(r"https?://[^/\s]", known):
        yield Violation(f"--rm-url {str(url)!r} is not a valid URL", advice="use http://host:port/path")


@rule("CFG-MAX-TOKENS", "--use-dynamic-batch-size", "--max-tokens-per-gpu")
def micro_batches_have_a_limit(config: Config) -> Iterator[Violation]:
    """Require a token limit for packing by tokens."""
    if config.train.use_dynamic_batch_size and not config.train.max_tokens_per_gpu:
        tokens = -(-(config.max_sample_tokens or _TOKENS) // config.parallel.context_parallel_size)
        text = "--use-dynamic-batch-size needs --max-tokens-per-gpu, the limit of tokens per rank, on CPUs too"
        yield Violation(text, (set_flag("max_tokens_per_gpu", tokens),))
