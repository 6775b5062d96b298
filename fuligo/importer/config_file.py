"""Config file of an imported launch: the values that the script gives, under their groups."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from fuligo.config import Config
from fuligo.config.assignments import Assignment, build_config
from fuligo.config.command_line import CONFIG_OPTION, read_command_line
from fuligo.config.flags import flags
from fuligo.config.rules import effects
from fuligo.config.topology_file import topology_from_text
from fuligo.errors import ConfigError
from fuligo.importer.run import ImportedScript
from fuligo.importer.slime import translate, without_megatron

_TOPOLOGY_OPTION = "--sglang-config"
_WIDTH = 120
_OPTION = re.compile(r"(?<![\w-])--[a-z][\w-]*")
_SKIPS = (
    "fuligo leaves samples whose advantages are all 0 out of training, and skips optimizer steps that have no others; in these steps, "
    "momentum and weight decay move slime's weights; set skip_zero_advantages: false (group algorithm) to train on them as slime does"
)


@dataclass(frozen=True, slots=True)
class ImportedConfig:
    """Config of a launch, and which of its values the script gives."""

    config: Config
    given: tuple[tuple[str, str], ...]
    """(group, name) of each value that is written."""
    warnings: tuple[str, ...]

    def yaml(self) -> str:
        """Return the given values as YAML, in the order of the groups; `--config` reads it as an equal config."""
        plain = self.config.model_dump(mode="json")
        chosen = {group: {name: value for name, value in values.items() if (group, name) in self.given} for group, values in plain.items()}
        filled = {group: _without_none(values) for group, values in chosen.items() if values}
        return yaml.safe_dump(filled, sort_keys=False, allow_unicode=True, width=_WIDTH)


def _without_none(value: Any) -> Any:
    """Return a value without the keys of a topology that were not given, which are None."""
    if isinstance(value, dict):
        return {key: _without_none(entry) for key, entry in value.items() if entry is not None}
    return [_without_none(entry) for entry in value] if isinstance(value, list) else value


def imported_config(script: ImportedScript, *, slime_defaults: bool = True) -> ImportedConfig:
    """Build the config of the launch: flags, environment block, topology.

    Raises a ConfigError with all unknown flags and invalid values, each with its line in the script.

    Args:
        slime_defaults: translate a command line of slime; if False, `train.py` takes fuligo's flags.
    """
    try:
        return _imported(script, slime_defaults=slime_defaults)
    except ConfigError as error:
        placed = []
        for problem in error.problems:
            option = None if problem.startswith(script.launch.place) else _OPTION.search(problem)
            placed.append(problem if option is None else f"{script.place_of(option[0])}: {problem}")
        raise ConfigError(*placed) from None


def _imported(script: ImportedScript, *, slime_defaults: bool) -> ImportedConfig:
    training, notes = script.launch, []
    arguments = training.arguments
    if slime_defaults and training.is_slime and CONFIG_OPTION not in arguments:
        arguments, notes = translate(training)
    elif training.is_async:
        arguments = (*arguments, "--async-mode", "one-step")
    arguments, topologies = _without_topology(arguments)
    line = read_command_line(arguments)
    if line.config_file is not None:
        problem = f"nothing to import, because the script's config is a file already: {line.config_file}"
        raise ConfigError(f"{script.launch.place}: {problem}; pass that file to fuligo train and fuligo plan with {CONFIG_OPTION}")
    for file in topologies:
        # Replace a topology file by its list of models: files that the script writes exist only in the sandbox.
        topology = topology_from_text(script.file_text(file), Path(file))
        line.problems += topology.problems
        line.warnings += topology.warnings
        line.assignments.append(Assignment(flags()["sglang_config"], topology.models, _TOPOLOGY_OPTION))
    environment = dict(script.launch.environment)
    if slime_defaults and training.is_slime:
        environment, left_out_paths = without_megatron(environment)
        notes = [*notes, *left_out_paths]
    if environment:
        line.assignments.append(Assignment(flags()["env"], environment, "the environment of the job"))
    config = build_config(line.assignments, line.problems)
    if slime_defaults and training.is_slime and config.needs_engine and config.engine_capabilities.beside_trainer:
        line.assignments.append(Assignment(flags()["rollout_backend"], "sglang", "slime's engine"))
        notes = [*notes, "--rollout-backend sglang is filled in: slime samples with SGLang, but fuligo would choose the embedded engine"]
        config = build_config(line.assignments)
    if slime_defaults and training.is_slime and config.resolved_skip_zero_advantages:
        notes = [*notes, _SKIPS]
    given = dict.fromkeys((assignment.flag.group, assignment.flag.name) for assignment in line.assignments)
    # Launch scripts have many flags that have no effect in this run, and a run refuses them.
    config, dropped = effects.without_idle(config, lambda violation: True)
    idle = [f"left out: {violation.text}" for violation in dropped]
    left_out = {tuple(map(str, change.path)) for violation in dropped for change in violation.fix}
    names = sorted({secret.variable for _, secret in config.secrets()})
    hidden = [f"the values of {', '.join(names)} are not written, because they may be secrets; set these variables where the run starts"]
    kept = tuple(each for each in given if each not in left_out)
    return ImportedConfig(config, kept, (*notes, *line.warnings, *idle, *(hidden if names else [])))


def _without_topology(arguments: tuple[str, ...]) -> tuple[list[str], list[str]]:
    """Return the arguments without `--sglang-config`, and the values of its occurrences."""
    rest, files, pending = [], [], iter(arguments)
    for argument in pending:
        option, equals, value = argument.partition("=")
        if option.replace("_", "-") == _TOPOLOGY_OPTION:
            files.append(value if equals else next(pending, ""))
        else:
            rest.append(argument)
    return rest, files
