"""Arguments of other programs, as their command lines take them."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def command_line(arguments: Mapping[str, Any]) -> list[str]:
    """`{"dp_size": 8, "enable_dp_attention": True}` -> `["--dp-size", "8", "--enable-dp-attention"]`.

    True is a bare flag, False and None leave the flag out, a list is several values, a mapping is JSON.
    """
    parts: list[str] = []
    for name, value in arguments.items():
        if value is None or value is False:
            continue
        parts.append("--" + name.replace("_", "-"))
        if value is True:
            continue
        if isinstance(value, Mapping):
            parts.append(json.dumps(dict(value)))
        else:
            parts += [str(entry) for entry in (value if isinstance(value, list | tuple) else [value])]
    return parts
