"""Configuration, tokenizer and end-of-text tokens of a Hugging Face directory."""

import logging
from pathlib import Path
from typing import Any

from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedTokenizerBase

from fuligo.errors import ConfigError

logger = logging.getLogger(__name__)
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json")


def load_config(path: str) -> Any:
    """Load config.json.

    Raises:
        ConfigError: the directory has no config.json, or one that transformers does not know.
    """
    if not (Path(path) / "config.json").is_file():
        raise ConfigError(f"--model-path {path} has no config.json; use the directory of a Hugging Face checkpoint")
    try:
        return AutoConfig.from_pretrained(path, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).partition("\n\n")[0]  # the rest is advice to upgrade transformers
        raise ConfigError(f"cannot load config.json of --model-path {path}: {reason}") from error


def load_tokenizer(path: str | Path, *, runs_its_code: bool) -> PreTrainedTokenizerBase:
    """Load the tokenizer.

    Args:
        runs_its_code: run Python code of the directory if the tokenizer needs it; never decided by a question on standard input.

    Raises:
        ConfigError: the tokenizer's files are invalid, or it needs code that may not run.
    """
    try:
        return AutoTokenizer.from_pretrained(path, trust_remote_code=runs_its_code)
    except Exception as error:  # the tokenizers library raises plain exceptions, code of the directory any
        if not runs_its_code and "trust_remote_code" in str(error):
            raise ConfigError(
                f"cannot load the tokenizer of {path}: it needs Python code of that directory; read the code, then use --trust-remote-code"
            ) from None
        reason = next(iter(str(error).splitlines()), "")
        raise ConfigError(f"cannot load the tokenizer of {path}: {type(error).__name__}: {reason}; copy or download it again") from error


def has_tokenizer(path: str | Path) -> bool:
    """Return whether the directory has files of a tokenizer."""
    return any((Path(path) / name).is_file() for name in TOKENIZER_FILES)


def end_ids(generation_config: Any, config: Any, tokenizer: PreTrainedTokenizerBase | None) -> frozenset[int]:
    """Return the end-of-text tokens of generation config, model config and tokenizer together."""
    found: set[int] = set()
    for source in (generation_config, config, tokenizer):
        ids = getattr(source, "eos_token_id", None)
        found.update([ids] if isinstance(ids, int) else ids or ())
    return frozenset(found)


def end_ids_of(directory: str | Path, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Return the tokens at which the model of a directory stops, by its generation_config.json and its tokenizer."""
    generation = GenerationConfig.from_pretrained(str(directory)) if (Path(directory) / "generation_config.json").is_file() else None
    return end_ids(generation, None, tokenizer)
