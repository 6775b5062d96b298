"""Refusal of Megatron's arguments that the Megatron trainer does not read."""

from collections.abc import Iterator

from fuligo.config import Config
from fuligo.config.flag import option_name
from fuligo.config.schemas import schema
from fuligo.errors import ConfigError
from fuligo.models.from_flags import GATES, gates_problem
from fuligo.trainer.megatron_backend.flags import not_taken


def unread_arguments(config: Config) -> Iterator[str]:
    """Yield a problem that names the given Megatron arguments without effect, and one for flags of gates, which Megatron cannot train."""
    if (problem := gates_problem(config.megatron)) is not None:
        yield problem
    options = schema("megatron").options
    given = [
        f"{options.get(name, option_name(name))}{'' if value is True else f' {value}'}"
        for name, value, _ in not_taken(config.megatron)
        if name not in GATES
    ]
    if given:
        yield f"{', '.join(given)}: not supported by the Megatron trainer; remove {'it' if len(given) == 1 else 'them'}"


def require_read_arguments(config: Config) -> None:
    """Check that no given Megatron argument is without effect. Raises ConfigError, which names those that are."""
    if problems := list(unread_arguments(config)):
        raise ConfigError(*problems)
