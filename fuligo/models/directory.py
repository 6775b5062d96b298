"""What stands in a Hugging Face directory beside the weights: configuration, tokenizer, end tokens."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoTokenizer, PreTrainedTokenizerBase

from fuligo.errors import ConfigError

logger = logging.getLogger(__name__)
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


def load_config(path: str) -> Any:
    """
    Raises:
        ConfigError: the directory holds no checkpoint, or one that transformers does not know.
    """
    if not (Path(path) / "config.json").is_file():
        raise ConfigError(f"--model-path {path}: there is no config.json; give a directory with a Hugging Face checkpoint")
    try:
        return AutoConfig.from_pretrained(path)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).partition("\n\n")[0]  # transformers goes on with how to upgrade it
        raise ConfigError(f"--model-path {path}: config.json is not understood: {reason}") from error


def load_tokenizer(path: str) -> PreTrainedTokenizerBase | None:
    """None where the directory has none: then answers carry no text, and stop strings are refused.

    Raises:
        ConfigError: the tokenizer's files are not understood.
    """
    if not any((Path(path) / name).is_file() for name in TOKENIZER_FILES):
        logger.warning("%s has no tokenizer: answers carry no text", path)
        return None
    try:
        return AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError, KeyError) as error:
        raise ConfigError(f"--model-path {path}: the tokenizer does not load: {error}") from error


def end_ids(generation_config: Any, config: Any, tokenizer: PreTrainedTokenizerBase | None) -> frozenset[int]:
    """End-of-text tokens, from everywhere a checkpoint may name them."""
    found: set[int] = set()
    for source in (generation_config, config, tokenizer):
        ids = getattr(source, "eos_token_id", None)
        found.update([ids] if isinstance(ids, int) else ids or ())
    return frozenset(found)
