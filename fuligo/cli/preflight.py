"""Checks of files that a config names, before a model loads: weights, data, hooks, output directories; warnings about likely mistakes."""

import os
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path

from fuligo.checkpoint.location import resolve
from fuligo.cli.data_problems import data_problems
from fuligo.cli.destinations import destination_problems
from fuligo.cli.weight_problems import evaluated_weight_problems, weight_problems
from fuligo.config import Config
from fuligo.config.args_view import custom_entries
from fuligo.config.hooks import hook_problems
from fuligo.config.launcher import chosen_launcher
from fuligo.config.python_path import VARIABLE, with_inherited_path
from fuligo.config.topology import engine_groups
from fuligo.environments.isolation.factory import environment_problems
from fuligo.errors import ConfigError
from fuligo.formats.hugging_face import DamagedFileError, has_chat_template, read_config_json, read_model_config
from fuligo.machine.packages import package_version, package_versions, temporary_problem
from fuligo.models.registry import architecture_of, is_supported, names_of
from fuligo.observability.jsonl import read_json_lines
from fuligo.observability.run_directory import CHECKPOINTS
from fuligo.planner.rules.model import unknown_tokens
from fuligo.quantities import count
from fuligo.rollout.rewards.check import check_reward


def preflight(config: Config) -> None:
    """Check the files that the config names, and what the run needs of this machine.

    Raises:
        ConfigError: all problems found, one text each.
    """
    if problems := preflight_problems(config):
        raise ConfigError(*problems)


def preflight_problems(config: Config) -> list[str]:
    """Return the problems of the files, hooks and packages that a training run needs, one text each."""
    return _problems(config, _secrets, weight_problems, _trainer)


def evaluation_problems(config: Config) -> list[str]:
    """Return the problems of the files, hooks and packages that `fuligo eval` needs, one text each."""
    return _problems(config, _secrets, evaluated_weight_problems)


def _problems(config: Config, *checks: Callable[[Config], Iterator[str]]) -> list[str]:
    """Return the problems that these and the common checks find.

    If the temporary directory cannot be used, return only that, since checks write to it.
    """
    if (problem := temporary_problem()) is not None:
        return [problem]
    common = (_engines, data_problems, destination_problems, _hooks, _rewards, _stop_tokens)
    return [problem for check in (*checks, *common) for problem in check(config)]


def _secrets(config: Config) -> Iterator[str]:
    """Yield a problem for each secret value that refers to an unset environment variable."""
    for option, secret in config.secrets():
        if secret.value is None:
            yield f"{option}: {secret} refers to the environment variable {secret.variable}, which is not set; export it"


def _hooks(config: Config) -> Iterator[str]:
    """Yield the problems of hooks, of the environment, and of the file of `--custom-config-path`."""
    yield from hook_problems(config)
    yield from environment_problems(config)
    try:
        custom_entries(config)
    except ConfigError as error:
        yield from error.problems


def _trainer(config: Config) -> Iterator[str]:
    """Yield the missing packages of the trainer (on Ray only its nodes need them), and why it cannot train the model."""
    name, trainer = config.resolved_train_backend, config.trainer_capabilities
    for package in trainer.packages if config.trains and chosen_launcher(config) == "local" else ():
        if package_version(package) is None:
            yield f"--train-backend {name}: the package {package} is not installed; pip install 'fuligo[{name}]'"
    directory = config.model.hf_checkpoint
    if directory is None or not (file := Path(directory) / "config.json").is_file():
        return
    try:
        config_json = read_config_json(Path(directory))
        if trainer.keeps_published_names:
            names_of(config_json, str(file))
        elif is_supported(config_json):
            architecture_of(config_json, str(file))
    except DamagedFileError:
        return  # the checks of the weights report it
    except ConfigError as error:
        yield from (f"--hf-checkpoint: {text}" for text in error.problems)


def _engines(config: Config) -> Iterator[str]:
    """Yield a problem if a model's `config.json` lacks what SGLang needs, or if SGLang is not installed where engines start locally."""
    for path in sorted({group.model_path for group in engine_groups(config) if group.model_path is not None}):
        if (Path(path) / "config.json").is_file() and not _names_its_class(Path(path)):
            yield (
                f"{path}/config.json does not name the class of the model, which SGLang needs; add "
                '"architectures": ["..."], as transformers writes it with save_pretrained (for qwen3: "Qwen3ForCausalLM")'
            )
    if chosen_launcher(config) != "local" or not any(group.num_engines for group in engine_groups(config)):
        return
    python = config.engine.interpreter
    versions = package_versions(config.engine_capabilities.packages, python, config.engine_environment.settings())
    if missing := [package for package, version in versions.items() if version is None]:
        yield (
            f"SGLang engines (--rollout-num-gpus, --sglang-*): {python} has no {' and no '.join(missing)}; install them there "
            "(on a CPU: make install-sglang), or name an interpreter that has them with --engine-python"
        )


def _names_its_class(model: Path) -> bool:
    try:
        return bool(read_config_json(model).get("architectures"))
    except ConfigError:
        return True  # reported by the check of the file


def _rewards(config: Config) -> Iterator[str]:
    try:
        check_reward(config.reward)
    except ConfigError as error:
        yield from error.problems


def _stop_tokens(config: Config) -> Iterator[str]:
    """Yield a problem if `--rollout-stop-token-ids` are outside the model's vocabulary.

    The planner has the same rule, but does not know every model and does not plan evaluations.
    """
    try:
        vocab_size = read_model_config(Path(config.model.hf_checkpoint or "")).get("vocab_size")
    except DamagedFileError:
        return  # other checks report the damaged --hf-checkpoint
    problem = unknown_tokens(config.rollout.rollout_stop_token_ids, vocab_size) if isinstance(vocab_size, int) else None
    if problem is not None:
        yield f"{problem}; use ids of the vocabulary"


def likely_mistakes(config: Config) -> list[str]:
    """Return warnings about valid settings that may be mistakes, for a config that passed `preflight`."""
    return [*_missing_checkpoint(config), *_plain_prompts(config), *_shadowed_megatron(config)]


def _missing_checkpoint(config: Config) -> Iterator[str]:
    load = config.checkpoint.load
    if load is None or resolve(Path(load), config.checkpoint.ckpt_step) is not None:
        return
    run_dir = config.run_directory(datetime.now())
    save = Path(config.checkpoint.save or run_dir / CHECKPOINTS)
    if save.resolve() != Path(load).resolve():  # the same directory starts a run and resumes it
        yield f"--load {load} holds no checkpoint: the run starts from scratch and saves to {save}"
    elif (metrics := run_dir / "metrics.jsonl").is_file() and (num_steps := len(read_json_lines(metrics))):
        discarded = count(num_steps, "recorded step")
        yield f"--load {load} holds no checkpoint: the run starts from scratch and discards the {discarded} of {run_dir}"


def _plain_prompts(config: Config) -> Iterator[str]:
    directory, settings = config.model.hf_checkpoint, config.data
    if directory is None or not config.data.prompt_data or config.debug.debug_train_only or settings.apply_chat_template:
        return
    if Path(directory).is_dir() and has_chat_template(Path(directory)):
        yield (
            "--apply-chat-template is not given, so prompts go to the model unchanged although its tokenizer has a chat template; this is "
            "right for a base model and for prompts that are already rendered"
        )


def _shadowed_megatron(config: Config) -> Iterator[str]:
    """Yield a warning if ranks import another Megatron-Core than the installed one, whose version was checked."""
    imported = with_inherited_path({VARIABLE: config.cluster.env.get(VARIABLE) or ""})[VARIABLE]
    directories = [
        directory for directory in imported.split(os.pathsep) if (Path(directory) / "megatron" / "core" / "__init__.py").is_file()
    ]
    if config.trains and config.resolved_train_backend == "megatron" and directories:
        yield (
            f"{VARIABLE} has {directories[0]}, whose megatron.core replaces the installed Megatron-Core; remove that directory unless its "
            "version is the same"
        )
