"""Configuration of a run: typed, strict, checked before anything starts."""

from __future__ import annotations

from fuligo.config.config import Config

__all__ = ["Config"]
