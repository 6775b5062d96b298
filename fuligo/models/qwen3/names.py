"""Names of the weights."""

from __future__ import annotations

from fuligo.models.architecture import Architecture
from fuligo.models.config_json import ConfigJson
from fuligo.models.name_parts import dense_table, grouped_attention
from fuligo.models.names import NameTable


def names(config: ConfigJson, architecture: Architecture) -> NameTable:
    """Queries and keys have norms."""
    return dense_table(architecture, grouped_attention(architecture, qk_norm=True))
