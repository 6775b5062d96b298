"""Rules on flags that exclude each other, and on the form of single values."""

import re
from collections.abc import Iterator

from fuligo.config import Config
from fuligo.config.findings import Change, Rule, Severity, simple_rule
from fuligo.config.flag import option_name
from fuligo.config.groups.sampling import EVAL_NAME
from fuligo.config.hook_specs import ALIASES, NONZERO_STD_FILTER
from fuligo.config.rules.rule import Violation, rule, set_flag, unset_flag


@rule("CFG-PARAM-PATTERN", "--only-train-params-name-list", "--freeze-params-name-list")
def parameter_patterns_compile(config: Config) -> Iterator[Violation]:
    """Require valid regular expressions for parameter names."""
    for option, patterns in (
        ("--only-train-params-name-list", config.train.only_train_params_name_list),
        ("--freeze-params-name-list", config.train.freeze_params_name_list),
    ):
        for pattern in patterns:
            try:
                re.compile(pattern)
            except re.error as error:
                text = f"{option}: {pattern!r} is not a regular expression ({error})"
                yield Violation(text, advice="correct the pattern", flags=(option,))
                return


@rule("CFG-DATA-WEIGHTS", "--prompt-data", "--prompt-data-weights")
def weights_match_entries(config: Config) -> Iterator[Violation]:
    """Require one positive weight per entry of --prompt-data."""
    entries, weights = config.data.prompt_data, config.data.prompt_data_weights
    if weights:
        shown = " ".join(f"{weight:g}" for weight in weights)
        if len(weights) != len(entries):
            text = f"--prompt-data-weights {shown} does not fit --prompt-data: weights {len(weights)}, entries {len(entries)}"
            yield Violation(text, advice="use one weight per entry; a pattern is one entry")
        elif min(weights) <= 0:
            text = f"--prompt-data-weights {shown}: a weight must be above 0"
            yield Violation(text, advice="remove the entry that you do not want to draw")


@rule("CFG-EVAL-DATA", "--eval-prompt-data")
def eval_data_are_named(config: Config) -> Iterator[Violation]:
    """Require a unique, valid name per evaluation dataset, because names of metrics contain it."""
    given = config.eval.eval_prompt_data
    names = given[::2] if len(given) > 1 else []
    if len(given) > 1 and len(given) % 2:
        text = f"--eval-prompt-data takes NAME PATH pairs or a single PATH, got {len(given)} values: {' '.join(given)}"
        yield Violation(text, advice="put a name before every path")
    elif odd := [name for name in names if not re.fullmatch(EVAL_NAME, name)]:
        text = f"--eval-prompt-data: {odd[0]!r} is not a valid name of a dataset; metrics are named eval/<name>/..."
        yield Violation(text, advice="give NAME PATH pairs, with names without slashes and spaces")
    elif twice := sorted({name for name in names if names.count(name) > 1}):
        yield Violation(f"--eval-prompt-data names {', '.join(twice)} more than once", advice="give every dataset a unique name")


@rule("CFG-ENVIRONMENT", "--environment", "--custom-generate-function-path", "--rollout-function-path", "--eval-function-path")
def one_way_to_generate(config: Config) -> Iterator[Violation]:
    """Reject an environment together with a hook that samples in its place."""
    if config.rollout.environment is not None:
        names = ("custom_generate_function_path", "agent", "rollout_function_path", "eval_function_path")
        if given := [name for name in names if config.value_of(name) is not None]:
            option = option_name(given[0])
            yield Violation(f"--environment and {option} both define how samples are generated", (unset_flag(given[0]),))


@rule("CFG-STOP-STRING", "--rollout-stop")
def stop_strings_are_written(config: Config) -> Iterator[Violation]:
    """Reject an empty stop string, which matches everywhere."""
    given = config.rollout.rollout_stop
    if "" in given:
        yield Violation("--rollout-stop '' would end every response before it begins", (set_flag("rollout_stop", [s for s in given if s]),))


@rule("CFG-STOP-ESCAPE", "--rollout-stop", severity=Severity.WARNING)
def stop_strings_are_as_meant(config: Config) -> Iterator[Violation]:
    """Warn about an escape sequence that the shell did not translate."""
    if escaped := [stop for stop in config.rollout.rollout_stop if re.fullmatch(r"(?:\\[nrt])+", stop)]:
        text = f"--rollout-stop '{escaped[0]}' is read as backslashes and letters, not as line breaks or tabs"
        yield Violation(text, advice=f"write $'{escaped[0]}' in a shell, or \"{escaped[0]}\" in a config file")


@rule("CFG-STOP-TOKEN", "--rollout-stop-token-ids")
def stop_tokens_are_tokens(config: Config) -> Iterator[Violation]:
    """Reject negative stop token ids, which no token has."""
    given = config.rollout.rollout_stop_token_ids
    if negative := [token for token in given if token < 0]:
        shown = " ".join(map(str, negative))
        kept = [token for token in given if token >= 0]
        change = set_flag("rollout_stop_token_ids", kept) if kept else unset_flag("rollout_stop_token_ids")
        yield Violation(f"--rollout-stop-token-ids {shown}: token ids start at 0", (change,))


@rule("CFG-PUSH-EXPORT", "--push-to-hub", "--save-hf")
def uploads_are_exports(config: Config) -> Iterator[Violation]:
    """Require exports to upload, and a name that the Hub accepts."""
    name = config.checkpoint.push_to_hub
    if name is not None:
        if not re.fullmatch(r"[\w.-]+/[\w.-]+", name):
            text = f"--push-to-hub {name} is not ORG/NAME"
            yield Violation(text, advice="use the name of a repository on the Hub", flags=("--push-to-hub",))
        elif config.checkpoint.save_hf is None:
            text = f"--push-to-hub {name} uploads the exports of --save-hf, which is not given"
            yield Violation(text, advice="use --save-hf 'DIR/{rollout_id}'")


@rule("CFG-ROLLOUT-ID-PATH", "--save-debug-rollout-data", "--load-debug-rollout-data", "--save-hf")
def every_rollout_has_its_file(config: Config) -> Iterator[Violation]:
    """Require {rollout_id} in a path that is written or read once per rollout."""
    if config.data.num_rollout == 1:
        return
    for name, path in (
        ("save_debug_rollout_data", config.debug.save_debug_rollout_data),
        ("load_debug_rollout_data", config.debug.load_debug_rollout_data),
        ("save_hf", config.checkpoint.save_hf),
    ):
        if path is not None and "{rollout_id}" not in path:
            change = set_flag(name, f"{path.rstrip('/')}/{{rollout_id}}")
            option = option_name(name)
            yield Violation(f"{option} {path} is one path for all rollouts; it must contain {{rollout_id}}", (change,), flags=(option,))
            return


@rule("CFG-ENGINE-ADDRESS", "--rollout-external-engine-addrs")
def engine_addresses_are_complete(config: Config) -> Iterator[Violation]:
    """Require host and port in engine addresses."""
    for address in config.engine.rollout_external_engine_addrs:
        host, _, port = address.removeprefix("http://").rpartition(":")
        bare = host.removeprefix("[").removesuffix("]")
        without_brackets = ":" in bare and host != f"[{bare}]"  # an IPv6 address whose last part would pass for the port
        if not bare or not port.isdecimal() or "@" in host or without_brackets:
            shown = address.rpartition("@")[2]  # without a password
            text = f"--rollout-external-engine-addrs: {shown!r} must be a host and a port number, such as 127.0.0.1:30000 or [::1]:30000"
            yield Violation(text, advice="remove user and password" if "@" in host else "complete the address")
            return


@rule("CFG-TRUNCATED-SAMPLING", "--rollout-top-p", "--rollout-top-k", "--rollout-min-p")
def truncated_sampling(config: Config) -> Iterator[Violation]:
    """Reject training on truncated sampling: log-probabilities cover the full vocabulary, and no engine reports which tokens it kept."""
    rollout = config.rollout
    given = {}
    if rollout.rollout_top_p < 1:
        given["rollout_top_p"] = f"--rollout-top-p {rollout.rollout_top_p}"
    if rollout.rollout_top_k > 0:
        given["rollout_top_k"] = f"--rollout-top-k {rollout.rollout_top_k}"
    if rollout.rollout_min_p > 0:
        given["rollout_min_p"] = f"--rollout-min-p {rollout.rollout_min_p}"
    if not config.is_sft and config.trains and given:
        text = (
            f"{' and '.join(given.values())}: engine and trainer compute log-probabilities over the full vocabulary, so training on "
            "samples from a part of it has biased importance ratios"
        )
        options = tuple(text.split()[0] for text in given.values())
        yield Violation(
            text, tuple(unset_flag(name) for name in given), "to truncate only in evaluations, use --eval-top-p and --eval-top-k", options
        )


@rule("CFG-ASYNC-COLOCATE", "--async-mode", "--colocate")
def sampling_ahead_has_its_own_gpus(config: Config) -> Iterator[Violation]:
    """Reject asynchronous sampling on shared GPUs, where trainer and engines take turns."""
    mode = config.rollout.async_mode
    if mode != "sync" and config.cluster.colocate:
        text = f"--async-mode {mode} samples while the trainer works, but with --colocate only one of them works at a time"
        yield Violation(
            text,
            (unset_flag("async_mode"), *([unset_flag("max_staleness")] if mode == "full" and not config.rollout.partial_rollout else [])),
        )


@rule("CFG-ASYNC-WHOLE-ROLLOUTS", "--async-mode", "--rollout-function-path", "--loss-type")
def continuous_sampling_is_ours(config: Config) -> Iterator[Violation]:
    """Reject --async-mode full, which schedules single groups, with SFT and with hooks that return whole rollouts."""
    rollout = config.rollout
    if rollout.async_mode == "full" and (rollout.rollout_function_path or config.is_sft):
        other = "--loss-type sft_loss samples nothing" if config.is_sft else "--rollout-function-path returns whole rollouts"
        fix = (set_flag("async_mode", "one-step"), *([] if rollout.partial_rollout else [unset_flag("max_staleness")]))
        yield Violation(f"--async-mode full keeps groups in flight all the time, but {other}", fix)


@rule("CFG-ENVIRONMENT-NAME", "--env", "--engine-env")
def environment_names_are_names(config: Config) -> Iterator[Violation]:
    """Require letters, digits and underscores in names of environment variables."""
    if odd := [name for name in config.engine_environment if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name)]:
        problem = "is not a valid name of an environment variable" if len(odd) == 1 else "are not valid names of environment variables"
        text = f"--env or --engine-env: {', '.join(map(repr, odd))} {problem}"
        yield Violation(text, advice="use letters, digits and underscores")


@rule("CFG-TURN-REWARDS", "--turn-rewards")
def turn_rewards_are_all_rewards(config: Config) -> Iterator[Violation]:
    """Reject hooks that reward whole episodes together with rewards by turn."""
    others = ("extra_rm_path", "custom_reward_post_process_path")
    found = next((name for name in others if getattr(config.reward, name)), None)
    if config.algorithm.turn_rewards and found is not None:
        option = option_name(found)
        text = f"--turn-rewards takes the rewards that the environment gives to turns; {option} rewards whole episodes"
        yield Violation(text, (unset_flag(found),), flags=("--turn-rewards", option))


@rule("CFG-AGENT", "--agent")
def agent_is_the_only_generator(config: Config) -> Iterator[Violation]:
    """Reject flags that conflict with an agent, which sends its own requests."""
    rollout = config.rollout
    if rollout.agent is not None:
        others = {
            "custom_generate_function_path": (rollout.custom_generate_function_path, "generates samples too"),
            "rollout_function_path": (rollout.rollout_function_path, "returns whole rollouts"),
            "use_rollout_routing_replay": (
                config.algorithm.use_rollout_routing_replay,
                "needs the engine's expert choices for every token",
            ),
            "mask_offpolicy_in_partial_rollout": (rollout.mask_offpolicy_in_partial_rollout, "cannot tell the turns of an agent apart"),
        }
        if (found := next(((name, why) for name, (value, why) in others.items() if value), None)) is not None:
            option = option_name(found[0])
            text = f"--agent {rollout.agent} and {option} cannot be combined: {option} {found[1]}"
            yield Violation(text, (unset_flag(found[0]),), flags=(option,))


def _filters_by_deviation(config: Config) -> bool:
    """Return whether the filter of groups is the one that keeps groups whose rewards differ."""
    given = config.rollout.dynamic_sampling_filter_path
    return given is not None and ALIASES.get(given, given) == NONZERO_STD_FILTER


# fmt: off
TABLE: tuple[Rule[Config, Change], ...] = (
    simple_rule("CFG-KL-TWICE", "--kl-coef --kl-loss-coef", "Reject KL in both rewards and loss, which would count it twice.",
        lambda config: config.algorithm.kl_coef != 0 and config.algorithm.kl_loss_coef != 0,
        lambda config: f"--kl-coef {config.algorithm.kl_coef} and --kl-loss-coef {config.algorithm.kl_loss_coef} would count the same KL "
        "twice",
        unset_flag("kl_coef")),
    simple_rule("CFG-OLD-POLICY", "--use-tis --use-rollout-logprobs",
        "Reject importance sampling when the engine's log-probabilities are the old policy: there is nothing to correct.",
        lambda config: config.algorithm.use_tis and config.algorithm.use_rollout_logprobs,
        "--use-tis corrects the difference between engine and trainer, but --use-rollout-logprobs uses only the engine's log-probabilities",
        unset_flag("use_rollout_logprobs")),
    simple_rule("CFG-TRAINED-PARAMS", "--only-train-params-name-list --freeze-params-name-list",
        "Reject a list of trained parameters together with a list of frozen ones.",
        lambda config: config.train.only_train_params_name_list and config.train.freeze_params_name_list,
        "--only-train-params-name-list and --freeze-params-name-list cannot be combined: both choose the trained parameters",
        unset_flag("freeze_params_name_list")),
    simple_rule("CFG-FILTER-OF-ONE", "--dynamic-sampling-filter-path --n-samples-per-prompt",
        "Reject the nonzero-deviation filter for single samples: it would drop every group.",
        lambda config: _filters_by_deviation(config) and config.rollout.n_samples_per_prompt <= 1 and not config.is_sft,
        lambda config: f"--dynamic-sampling-filter-path {config.rollout.dynamic_sampling_filter_path} keeps groups whose rewards differ; "
        "with --n-samples-per-prompt 1 it keeps none",
        unset_flag("dynamic_sampling_filter_path"), advice="or raise --n-samples-per-prompt"),
    simple_rule("CFG-DEBUG-SIDES", "--debug-rollout-only --debug-train-only",
        "Reject both debug modes at once: together they leave nothing to run.",
        lambda config: config.debug.debug_rollout_only and config.debug.debug_train_only,
        "--debug-rollout-only and --debug-train-only cannot be combined", unset_flag("debug_rollout_only")),
    simple_rule("CFG-TURN-REWARDS-FILTER", "--turn-rewards --dynamic-sampling-filter-path",
        "Warn about rewards by turn with a filter on the rewards of episodes, which drops groups of equal sums.",
        lambda config: config.algorithm.turn_rewards and _filters_by_deviation(config),
        lambda config: f"--dynamic-sampling-filter-path {config.rollout.dynamic_sampling_filter_path} drops groups whose episodes have "
        "equal sums, even if their turns have different rewards",
        unset_flag("dynamic_sampling_filter_path"), severity=Severity.WARNING),
    simple_rule("CFG-OPD-NO-REWARD", "--dynamic-sampling-filter-path",
        "Reject a reward filter without rewards: all samples of a group would have the same reward.",
        lambda config: config.is_unjudged and _filters_by_deviation(config),
        lambda config: f"--dynamic-sampling-filter-path {config.rollout.dynamic_sampling_filter_path} keeps groups whose rewards differ, "
        "but --use-opd without a reward has none",
        unset_flag("dynamic_sampling_filter_path"), advice="or add a reward (--rm-type)"),
    simple_rule("CFG-PREFIX-PROVIDER", "--share-prefixes --custom-model-provider-path",
        "Reject shared prefixes with custom stages: their attention could read a tree as one sequence without an error.",
        lambda config: config.shares_prefixes and config.model.custom_model_provider_path is not None,
        lambda config: "--share-prefixes on needs the attention of fuligo's own layers, but --custom-model-provider-path "
        f"{config.model.custom_model_provider_path} may build others",
        unset_flag("share_prefixes")),
    simple_rule("CFG-PREFIX-KERNEL", "--share-prefixes --attention-backend",
        "Reject TransformerEngine's kernels with shared prefixes: they compute sequences, not token trees.",
        lambda config: config.shares_prefixes and config.resolved_train_backend == "megatron"
        and config.parallel.attention_backend not in ("auto", "local"),
        lambda config: f"--attention-backend {config.parallel.attention_backend} with --share-prefixes on: TransformerEngine's kernels "
        "compute sequences, not trees",
        unset_flag("share_prefixes"), advice="or use --attention-backend local"),
    simple_rule("CFG-PREFIX-ROWS", "--share-prefixes --micro-batch-size",
        "Reject shared prefixes with one sample per micro-batch: samples share prefixes only within a micro-batch.",
        lambda config: config.train.share_prefixes == "on" and config.train.micro_batch_size == 1
        and not config.train.use_dynamic_batch_size,
        "--share-prefixes on has no effect with --micro-batch-size 1: samples share prefixes only within a micro-batch",
        unset_flag("share_prefixes"), advice="or raise --micro-batch-size"),
)
# fmt: on
