"""Checks of the files that a config names, before any model loads: weights, data, hooks, output directories."""

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from fuligo.cli.data_problems import data_problems
from fuligo.cli.destinations import destination_problems
from fuligo.cli.weight_problems import evaluated_weight_problems, weight_problems
from fuligo.config import Config
from fuligo.config.args_view import custom_entries
from fuligo.config.hooks import hook_problems
from fuligo.config.launcher import chosen_launcher
from fuligo.config.topology import engine_groups
from fuligo.environments.isolation.factory import environment_problems
from fuligo.errors import ConfigError
from fuligo.formats.hugging_face import DamagedFileError, read_config_json, read_model_config
from fuligo.machine.packages import package_version, package_versions, temporary_problem
from fuligo.models.registry import architecture_of, is_supported, names_of
from fuligo.planner.rules.model import unknown_tokens
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
    checks = (_secrets, weight_problems, _trainer, _engines, data_problems, destination_problems, _hooks, _rewards, _stop_tokens)
    return _problems(config, checks)


def evaluation_problems(config: Config) -> list[str]:
    """Return the problems of the files, hooks and packages that `fuligo eval` needs, one text each."""
    checks = (_secrets, evaluated_weight_problems, _engines, data_problems, destination_problems, _hooks, _rewards, _stop_tokens)
    return _problems(config, checks)


def _problems(config: Config, checks: Sequence[Callable[[Config], Iterator[str]]]) -> list[str]:
    """Return the problems that the checks find; only that of the temporary directory if it cannot be used, since checks write to it."""
    if (problem := temporary_problem()) is not None:
        return [problem]
    return [problem for check in checks for problem in check(config)]


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
    versions = package_versions(("sglang", "sglang-router"), python, config.engine_environment.settings())
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
