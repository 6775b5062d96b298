"""Config files as configs."""

from pathlib import Path

from fuligo.config import Config
from fuligo.config.assignments import build_config
from fuligo.config.files import read_yaml


def load_yaml(path: Path) -> Config:
    """Load the config of a file; flags that it does not name keep their defaults. Raises a ConfigError that names all problems."""
    given = read_yaml(path)
    return build_config(given.assignments, given.problems)
