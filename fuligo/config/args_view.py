"""Read-only view of all flags under their flat names: the `args` of hooks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from fuligo.config import Config
from fuligo.config.flag import PREFIXES
from fuligo.config.flags import Flag, did_you_mean, flags, nearest, passthrough_flags
from fuligo.config.schemas import BACKENDS


class ArgsView:
    """All flags as attributes: `args.rollout_batch_size` is `config.rollout.rollout_batch_size`.

    Pass-through arguments have their prefix and, if not given, the default of their schema: `args.sglang_dp_size` is
    `config.sglang.value("dp_size")`. `args.sglang_model_urls["judge"]` is the base URL of the router that serves the model `judge` of
    `--sglang-config`, and `args.sglang_model_keys["judge"]` the key that it asks for. Instances can be pickled.
    """

    __slots__ = ("_config",)

    def __init__(self, config: Config) -> None:
        object.__setattr__(self, "_config", config)

    @property
    def sglang_model_urls(self) -> Mapping[str, str]:
        return {name: model.url for name, model in self._config.served_models.items()}

    @property
    def sglang_model_keys(self) -> Mapping[str, str]:
        return {name: model.key for name, model in self._config.served_models.items()}

    def __getattr__(self, name: str) -> Any:
        flag = flags().get(name)
        if flag is not None:
            return getattr(getattr(self._config, flag.group), name)
        argument = _argument(name)
        if argument is not None:
            return getattr(self._config, argument.group).value(argument.name)
        raise AttributeError(f"args has no {name}{did_you_mean(nearest(name, flags()))}")

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"args is read-only: {name} cannot be set to {value!r}")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"args is read-only: {name} cannot be deleted")

    def __dir__(self) -> list[str]:
        given = [passthrough_flags(group)[name].flat_name for group in BACKENDS for name in getattr(self._config, group)]
        return [*flags(), *given]

    def __reduce__(self) -> tuple[type[ArgsView], tuple[Config]]:
        return ArgsView, (self._config,)

    def __repr__(self) -> str:
        return f"ArgsView({self._config!r})"


def _argument(flat_name: str) -> Flag | None:
    for group in BACKENDS:
        name = flat_name.removeprefix(PREFIXES.get(group, ""))
        flag = passthrough_flags(group).get(name)
        if flag is not None and flag.flat_name == flat_name:
            return flag
    return None
