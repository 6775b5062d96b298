"""Features that `fuligo plan` estimates and `fuligo train` does not run yet; both refuse them."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from fuligo.config import Config
from fuligo.config.flag import option_name
from fuligo.config.flags import flags
from fuligo.config.schemas import schema
from fuligo.config.topology import engine_groups, policy_model
from fuligo.errors import ConfigError
from fuligo.trainer.megatron_backend.flags import not_taken

_SHOWN = 3
"""Number of backend arguments that a message lists."""


@dataclass(frozen=True, slots=True)
class NotYet:
    """A feature that is not implemented."""

    asked: Callable[[Config], str | None]
    """Function that returns the flags that ask for it, as typed, or None."""
    part: str
    """Name of the feature."""
    instead: str
    """Alternative that works."""


def refuse(config: Config) -> None:
    """Reject a config that needs a feature which is not implemented.

    Raises:
        ConfigError: one text per feature.
    """
    problems = list(not_yet(config))
    if problems:
        raise ConfigError(*problems)


def not_yet(config: Config) -> Iterator[str]:
    """Yield one text per feature that is not implemented."""
    for row in ROWS:
        asked = row.asked(config)
        if asked is not None:
            yield f"{asked}: {row.part} cannot run yet; {row.instead}"


def _switch(name: str, *values: str) -> Callable[[Config], str | None]:
    """Return a test for a flag that differs from its default, or has one of these values."""

    def asked(config: Config) -> str | None:
        flag, value = flags()[name], config.value_of(name)
        if value == flag.default or (values and value not in values):
            return None
        return flag.option if value is True else f"{flag.option} {value}"

    return asked


def _megatron_arguments(config: Config) -> str | None:
    if config.resolved_train_backend != "megatron":
        return None
    names = schema("megatron").options
    given = [f"{names.get(name, option_name(name))} {value}" for name, value, _ in not_taken(config.megatron)]
    return _first(given)


def _shared_gpus(config: Config) -> str | None:
    """Return the flags of ways to share GPUs that need weights at a time when none are synced."""
    if not config.cluster.colocate or not config.engine_capabilities.releases_memory:
        return None
    policy = policy_model(config)
    if config.engine.use_fault_tolerance and any(
        group.model == policy and group.worker_type == "decode" for group in engine_groups(config)
    ):
        return "--colocate with --use-fault-tolerance and engines that prefill or decode"
    if config.weight_sync.update_weights_interval > 1:
        return f"--colocate with --update-weights-interval {config.weight_sync.update_weights_interval}"
    return None


def _first(options: list[str]) -> str | None:
    if not options:
        return None
    more = len(options) - _SHOWN
    return ", ".join(options[:_SHOWN]) + (f" and {more} more" if more > 0 else "")


ROWS = (
    NotYet(_megatron_arguments, "the Megatron trainer with these arguments", "leave them out; the trainer decides what they are about"),
    NotYet(_shared_gpus, "this way of sharing GPUs", "give the engines GPUs of their own (--rollout-num-gpus)"),
    NotYet(_switch("hostfile"), "the launch by fuligo train", "fuligo launch --hostfile F -- <these arguments> starts the nodes"),
)
