"""Configuration, tokenizer and end-of-text tokens of a Hugging Face directory."""

from pathlib import Path
from typing import Any

from transformers.generation.configuration_utils import GenerationConfig
from transformers.models.auto.tokenization_auto import AutoTokenizer
from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from fuligo.errors import ConfigError
from fuligo.formats.disk import unreadable_files
from fuligo.formats.hugging_face import TOKENIZER_FILES, brings_code, read_config_json
from fuligo.models.transformers_types import LOADED_AS, read_config


def load_config(path: str) -> Any:
    """Load a directory's config.json as a transformers config. Raises ConfigError if it is missing, unreadable, or of an unknown model."""
    if not (Path(path) / "config.json").is_file():
        raise ConfigError(f"cannot load {path}: it has no config.json; use the directory of a Hugging Face checkpoint")
    _require_plain_files(Path(path))
    try:
        return read_config(path)
    except (OSError, ValueError, KeyError) as error:
        reason = str(error).partition("\n\n")[0]  # the rest is advice to upgrade transformers
        raise ConfigError(f"cannot load {path}/config.json: {reason}; use a model that transformers supports") from error


def load_tokenizer(path: str | Path, *, runs_its_code: bool) -> PreTrainedTokenizerBase:
    """Load the tokenizer of a Hugging Face directory; `runs_its_code`: run Python code of the directory if the tokenizer needs it.

    Raises ConfigError if the tokenizer's files are invalid, or it needs code that may not run.
    """
    _require_plain_files(Path(path))
    if not runs_its_code and _is_code_alone(Path(path)):
        raise _needs_code(path)
    try:
        return AutoTokenizer.from_pretrained(path, trust_remote_code=runs_its_code)  # pyrefly: ignore[bad-return]
    except Exception as error:  # the tokenizers library raises plain Exception, and the directory's code may raise anything
        if not runs_its_code and "trust_remote_code" in str(error):
            raise _needs_code(path) from None
        reason = next(iter(str(error).splitlines()), "")
        if runs_its_code and isinstance(error, ImportError):
            raise ConfigError(
                f"cannot load the tokenizer of {path}: its code imports a package that is not installed: {reason}; install it, or "
                "save the tokenizer as tokenizer.json with the version of transformers for which the code was written"
            ) from error
        raise ConfigError(f"cannot load the tokenizer of {path}: {type(error).__name__}: {reason}; copy or download it again") from error


def _require_plain_files(directory: Path) -> None:
    """Raise ConfigError if transformers would block on a file of a directory, or exhaust memory."""
    if directory.is_dir() and (problems := list(unreadable_files(directory))):
        raise ConfigError(*problems)


def _is_code_alone(directory: Path) -> bool:
    """Return whether only the directory's code defines the tokenizer; without it, transformers would load another family's tokenizer."""
    if (directory / "tokenizer.json").is_file() or not brings_code(directory / "tokenizer_config.json"):
        return False
    return (directory / "config.json").is_file() and read_config_json(directory).get("model_type") in LOADED_AS


def _needs_code(path: str | Path) -> ConfigError:
    return ConfigError(
        f"cannot load the tokenizer of {path}: it needs the Python code in that directory; read the code, then use --trust-remote-code"
    )


def has_tokenizer(path: str | Path) -> bool:
    return any((Path(path) / name).is_file() for name in TOKENIZER_FILES)


def end_ids(generation_config: Any, config: Any, tokenizer: PreTrainedTokenizerBase | None) -> frozenset[int]:
    """Return all `eos_token_id`s of the generation config, the model config and the tokenizer; each may be None or lack them."""
    found: set[int] = set()
    for source in (generation_config, config, tokenizer):
        ids = getattr(source, "eos_token_id", None)
        found.update([ids] if isinstance(ids, int) else ids or ())
    return frozenset(found)


def end_ids_of(directory: str | Path, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    """Return the ids of the end-of-text tokens in a directory's generation_config.json and its tokenizer."""
    generation = GenerationConfig.from_pretrained(str(directory)) if (Path(directory) / "generation_config.json").is_file() else None
    return end_ids(generation, None, tokenizer)
