"""Configuration of a run: typed, strict, checked before anything starts."""

from fuligo.config.config import Config

__all__ = ["Config"]
