"""Read-only view of all flags under their flat names: the `args` of hooks."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NoReturn

import yaml

from fuligo.config import Config
from fuligo.config.flag import PREFIXES
from fuligo.config.flags import Flag, did_you_mean, flags, nearest, passthrough_flags
from fuligo.config.schemas import BACKENDS
from fuligo.config.yaml_text import yaml_problem
from fuligo.errors import ConfigError


class ArgsView:
    """All flags as attributes: `args.rollout_batch_size` is `config.rollout.rollout_batch_size`.

    Pass-through arguments have their prefix and, if not given, the default of their schema: `args.sglang_dp_size` is
    `config.sglang.value("dp_size")`. `args.sglang_model_urls["judge"]` is the base URL of the router that serves the model `judge` of
    `--sglang-config`, and `args.sglang_model_keys["judge"]` the API key that it requires. Entries of `--custom-config-path` are attributes,
    too. Instances can be pickled.
    """

    __slots__ = ("_config", "_own")

    def __init__(self, config: Config, own: Mapping[str, Any] | None = None) -> None:
        """Create the view of a config, with the user's own entries; None reads them from `--custom-config-path` (`custom_entries`)."""
        object.__setattr__(self, "_config", config)
        object.__setattr__(self, "_own", custom_entries(config) if own is None else own)

    @property
    def sglang_model_urls(self) -> Mapping[str, str]:
        return {name: model.url for name, model in self._config.served_models.items()}

    @property
    def sglang_model_keys(self) -> Mapping[str, str]:
        return {name: model.key for name, model in self._config.served_models.items()}

    def __getattr__(self, name: str) -> Any:
        if name in self._own:
            return self._own[name]
        flag = flags().get(name)
        if name == "prompt_data" and len(self._config.data.prompt_data) < 2:  # slime's hooks expect a string
            return next(iter(self._config.data.prompt_data), None)
        if flag is not None:
            return getattr(getattr(self._config, flag.group), name)
        if (argument := _argument(name)) is not None:
            return getattr(self._config, argument.group).value(argument.name)
        raise AttributeError(f"args has no {name}{did_you_mean(nearest(name, [*self._own, *flags()]))}")

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"args is read-only: {name} cannot be set to {value!r}")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"args is read-only: {name} cannot be deleted")

    def __dir__(self) -> list[str]:
        given = [passthrough_flags(group)[name].flat_name for group in BACKENDS for name in getattr(self._config, group)]
        return [*self._own, *flags(), *given]

    def __reduce__(self) -> tuple[type[ArgsView], tuple[Config, Mapping[str, Any]]]:
        return ArgsView, (self._config, self._own)

    def __repr__(self) -> str:
        return f"ArgsView({self._config!r})"


def custom_entries(config: Config) -> dict[str, Any]:
    """Return the entries of `--custom-config-path`; empty without it.

    Raises ConfigError if the file is not a readable YAML mapping, or a name is not an identifier, begins with `_` or is a flag's.
    """
    given = config.observability.custom_config_path
    if given is None:
        return {}
    option = f"--custom-config-path {given}"
    try:
        entries = yaml.safe_load(Path(given).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"cannot read {option}: {error.strerror}") from error
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{option} is not valid YAML: {yaml_problem(error)}") from error
    if not isinstance(entries, dict) or not all(isinstance(name, str) and name.isidentifier() for name in entries):
        raise ConfigError(f"{option} must hold a mapping of names to values, such as `penalty: 0.1`")
    if private := [name for name in entries if name.startswith("_")]:
        raise ConfigError(f"{option}: {', '.join(private)} cannot be set: names must not begin with an underscore; rename them")
    if taken := [name for name in entries if name in flags() or _argument(name) is not None]:
        raise ConfigError(f"{option}: {', '.join(taken)} cannot be set there: a flag of fuligo has this name; use --config")
    return entries


def _argument(flat_name: str) -> Flag | None:
    for group in BACKENDS:
        name = flat_name.removeprefix(PREFIXES.get(group, ""))
        flag = passthrough_flags(group).get(name)
        if flag is not None and flag.flat_name == flat_name:
            return flag
    return None
