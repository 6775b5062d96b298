"""Arguments of Megatron-Core that fuligo passes on."""

from __future__ import annotations

from fuligo.config.flags import name_problem
from fuligo.config.passthrough import PassThrough


class MegatronArguments(PassThrough):
    """Arguments of Megatron that no typed flag of fuligo covers: `--swiglu` is `{"swiglu": True}`."""

    __slots__ = ()
    group = "megatron"

    @classmethod
    def name_problem(cls, name: str) -> str | None:
        """Return why an argument of this name cannot be given, or None. Typed flags win over Megatron's arguments of the same name."""
        return name_problem(cls.schema(), name)
