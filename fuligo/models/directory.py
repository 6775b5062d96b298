"""Configuration, tokenizer and end-of-text tokens of a Hugging Face directory."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase

from fuligo.errors import ConfigError

logger = logging.getLogger(__name__)
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


def load_config(path: str) -> Any:
    """Load config.json.

    Raises:
        ConfigError: the directory has no config.json, or one that transformers does not know.
    """
    if not (Path(path) / "config.json").is_file():
        raise ConfigError(f"--model-path {path} has no config.json; give the directory of a Hugging Face checkpoint")
    try:
        return AutoConfig.from_pretrained(path)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).partition("\n\n")[0]  # the rest is advice to upgrade transformers
        raise ConfigError(f"cannot load config.json of --model-path {path}: {reason}") from error


def load_tokenizer(path: str) -> PreTrainedTokenizerBase | None:
    """Load the tokenizer; None if the directory has none, in which case answers have no text and stop strings are rejected.

    Raises:
        ConfigError: the tokenizer's files are invalid.
    """
    if not any((Path(path) / name).is_file() for name in TOKENIZER_FILES):
        logger.warning("%s has no tokenizer; answers will have no text", path)
        return None
    try:
        return AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"cannot load the tokenizer of --model-path {path}: {error}") from error


def end_ids(generation_config: Any, config: Any, tokenizer: PreTrainedTokenizerBase | None) -> frozenset[int]:
    """Return the end-of-text tokens of generation config, model config and tokenizer together."""
    found: set[int] = set()
    for source in (generation_config, config, tokenizer):
        ids = getattr(source, "eos_token_id", None)
        found.update([ids] if isinstance(ids, int) else ids or ())
    return frozenset(found)
