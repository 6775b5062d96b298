"""Checks of prompt files and evaluation data, shared by `fuligo plan`, `train` and `eval`; loads neither torch nor transformers."""

from collections.abc import Iterator, Sequence
from pathlib import Path

from fuligo.config import Config
from fuligo.config.groups import DataFlags
from fuligo.config.hooks import hook_problem
from fuligo.data.check import check_file
from fuligo.data.row_file import PromptPath
from fuligo.data.template import no_chat_template
from fuligo.errors import ConfigError, DataError
from fuligo.formats.hugging_face import has_chat_template, read_config_json
from fuligo.models.registry import VISION_TYPES
from fuligo.models.vision.placing import no_tower
from fuligo.models.vision.processor import read_settings
from fuligo.rollout.eval_sets import eval_set_specs
from fuligo.rollout.rewards.check import unjudged


def data_problems(config: Config, *, missing_is_fine: bool = False) -> Iterator[str]:
    """Yield the problems of prompts and evaluation data. `missing_is_fine`: skip files that are not on this machine."""
    is_here = _on_this_machine if missing_is_fine else lambda paths: True
    if config.data.prompt_data and not config.debug.debug_train_only and is_here(config.data.prompt_data):
        yield from _file("--prompt-data", config.data.prompt_data, config.data, config.num_drawn)
        by_hook = config.has_custom_generation or config.data.data_source_path or config.rollout.rollout_function_path
        if not (config.reward.custom_rm_path or by_hook or config.is_sft):
            yield from _judged("--prompt-data", config.data.prompt_data, config.data, config.reward.rm_type)
    yield from _chat_template(config)
    yield from _images(config)
    try:
        specs = eval_set_specs(config)
    except ConfigError as error:
        yield from error.problems
        return
    for spec in specs:
        given, settings, here = f"evaluation dataset {spec.name}", spec.data_flags(config), is_here(spec.path)
        if here:
            yield from _file(given, spec.path, settings)
        by_hook = config.has_custom_generation or config.eval.eval_function_path
        if here and spec.custom_reward_path(config) is None and not by_hook:
            yield from _judged(given, spec.path, settings, spec.rm_type or config.reward.rm_type)
        if config.rollout.environment and (spec.rm_type or spec.custom_rm_path):
            yield f"evaluation dataset {spec.name}: --environment gives its reward; remove rm_type and custom_rm_path"
        if config.is_unjudged and not (spec.rm_type or spec.custom_rm_path or spec.metadata_key):
            yield f"evaluation dataset {spec.name}: its responses have no reward; set its rm_type, or --rm-type for the whole run"
        if spec.custom_rm_path is not None:
            yield from hook_problem("custom_rm_path", spec.custom_rm_path)


def _on_this_machine(paths: Sequence[str]) -> bool:
    return all(Path(PromptPath.parse(path).path).is_file() for path in paths)


def _chat_template(config: Config) -> Iterator[str]:
    directory, settings = config.model.hf_checkpoint, config.data
    if (
        directory is None
        or not (settings.apply_chat_template or config.rollout.environment)
        or "chat_template" in settings.apply_chat_template_kwargs
    ):
        return
    if Path(directory).is_dir() and not has_chat_template(Path(directory)):
        yield no_chat_template(directory)


def _images(config: Config) -> Iterator[str]:
    """Yield a problem if prompts have images, but the model does not support them or its image processor cannot be loaded."""
    directory = Path(config.model.hf_checkpoint or "")
    if not config.data.multimodal_keys or not (directory / "config.json").is_file():
        return
    try:
        config_json = read_config_json(directory)
        if config_json.get("model_type") in VISION_TYPES:
            read_settings(directory)
        else:
            yield no_tower(directory, config_json.get("model_type"))
    except ConfigError as error:
        yield from (f"--multimodal-keys: {text}" for text in error.problems)


def _file(given: str, paths: Sequence[str], settings: DataFlags, num_drawn: int | None = None) -> Iterator[str]:
    try:
        check_file(paths, settings, num_drawn)
    except DataError as error:
        yield f"{given}: {error}"


def _judged(given: str, paths: Sequence[str], settings: DataFlags, rm_type: str | None) -> Iterator[str]:
    try:
        problem = unjudged(paths, settings, rm_type)
    except (ConfigError, DataError):
        return  # reported by the checks of the reward and of the file
    if problem is not None:
        yield f"{given}: {problem}"
