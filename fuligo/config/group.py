"""Base of the flag groups: a frozen pydantic model whose field names, with dashes, are the flags."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class FlagGroup(BaseModel):
    """Base of the groups: immutable; rejects unknown keys, NaN and infinity."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)


def flag(default: Any, doc: str, *, unit: str | None = None, source: str | None = None, path: bool = False, **constraints: Any) -> Any:
    """Declare a flag.

    Args:
        default: value if the flag is not given.
        doc: one line for `--help`.
        unit: `tokens`, `s`, `bytes`, `samples`, ...
        source: project whose name and meaning the flag keeps, if not fuligo's own: `slime`, `megatron`, `sglang`.
        path: True for a path (or a list of paths); in a YAML file, `./` and `../` are relative to the file.
        constraints: pydantic's `gt`, `ge`, `lt`, `le`, `min_length`, ...
    """
    return Field(default, description=doc, json_schema_extra={"unit": unit, "source": source, "path": path}, **constraints)
