"""What every group of flags is: a frozen pydantic model whose field names, with dashes, are the flags."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict, Field


class FlagGroup(BaseModel):
    """Base of the groups. Unknown keys, NaN and infinity are refused; instances cannot change."""

    model_config = ConfigDict(frozen=True, extra="forbid", validate_default=True, allow_inf_nan=False)


def flag(default: Any, doc: str, *, unit: str | None = None, source: str | None = None, path: bool = False, **constraints: Any) -> Any:
    """A documented flag.

    Args:
        default: value when the flag is not given.
        doc: one line for `--help`.
        unit: `tokens`, `s`, `bytes`, `samples`, ...
        source: where the flag's name and meaning come from, when not ours: `slime`, `megatron`, `sglang`.
        path: the value is a path (or a list of them): in a YAML file one that begins with `./` or `../` is relative to the file.
        constraints: pydantic's `gt`, `ge`, `lt`, `le`, `min_length`, ...
    """
    return Field(default, description=doc, json_schema_extra={"unit": unit, "source": source, "path": path}, **constraints)
