"""Models of the Hugging Face Hub: resolution of names such as Qwen/Qwen3-0.6B to directories of the Hub's cache."""

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from fuligo.config import Config
from fuligo.config.flags import flags
from fuligo.config.server_groups import ModelServers
from fuligo.errors import ConfigError
from fuligo.formats.hugging_face import checkpoint_problems

_NAME = re.compile(r"(?P<id>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(@(?P<revision>[\w./-]+))?")
_SNAPSHOT = re.compile(r"(?P<cache>.*)/models--(?P<org>[^/]+?)--(?P<name>[^/]+)/snapshots/(?P<revision>[0-9a-f]{40})/?")
MODEL_FLAGS = ("hf_checkpoint", "ref_load", "critic_load", "opd_teacher_load")
"""Flags that take a directory or the name of a model on the Hub."""
_IGNORED = ("*/*", "consolidated*", "*.bin", "*.pt", "*.pth", "*.gguf", "*.h5", "*.msgpack", "*.onnx")
"""Patterns of files that fuligo does not read: subdirectories, and weights in other formats."""
_SMALL_FILES = ("*.json", "*.jinja", "*.txt", "tokenizer*")


@dataclass(slots=True, frozen=True)
class HubModel:
    """Model on the Hub."""

    name: str
    """`ORG/NAME`."""
    revision: str | None
    """Branch, tag or commit; None: the newest commit of the default branch."""

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """Parse `ORG/NAME`, `ORG/NAME@REVISION`, or a snapshot directory of a Hub cache, which need not exist on this machine.

        Return None for any other text, and if `ORG/NAME` is an existing path.
        """
        if snapshot := _SNAPSHOT.fullmatch(text):
            return cls(f"{snapshot['org']}/{snapshot['name']}", snapshot["revision"])
        match = None if Path(text).exists() else _NAME.fullmatch(text)
        return None if match is None else cls(match["id"], match["revision"])

    def download(self, allowed: list[str] | None = None) -> Path:
        """Download the model's files unless they are in the cache, and return their directory. Raises ConfigError if that fails.

        `allowed`: patterns of the files to download; None: all that fuligo reads.
        """
        from huggingface_hub import snapshot_download

        try:
            files = snapshot_download(self.name, revision=self.revision, allow_patterns=allowed, ignore_patterns=list(_IGNORED))
        except Exception as error:  # raised by the library or its network client
            reason = f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}"
            raise ConfigError(
                f"{self} is not a directory here (looked in {Path.cwd()}), and cannot be loaded from the Hub: {reason.strip(' .:')}. Check "
                "its name; a gated or private model needs `hf auth login` or HF_TOKEN; without a network, download it first, into the same "
                f"HF_HOME: hf download {self.name}{'' if self.revision is None else f' --revision {self.revision}'}"
            ) from error
        return Path(files)

    def __str__(self) -> str:
        return self.name if self.revision is None else f"{self.name}@{self.revision}"


def model_directory(path: Path, *, weights: bool) -> Path:
    """Return the local directory of a model, downloaded if `path` is a Hub name; without `weights` only configuration and tokenizer."""
    model = None if path.exists() else HubModel.parse(str(path))
    return path if model is None else model.download(None if weights else list(_SMALL_FILES))


@dataclass(slots=True, frozen=True)
class _Place:
    """Setting of a config that may name a model on the Hub."""

    flag: str
    number: int | None = None
    """Position in the list of `--sglang-config`; None for the other flags."""

    def value(self, config: Config) -> str | None:
        if self.number is not None:
            return _served(config)[self.number].model_path
        given = config.value_of(self.flag)
        return given if isinstance(given, str) else None

    def replaced(self, config: Config, directory: str) -> Config:
        flag = flags()[self.flag]
        given = getattr(config, flag.group)
        value: object = directory
        if self.number is not None:
            models = _served(config)
            models[self.number] = models[self.number].model_copy(update={"model_path": directory})
            value = models
        return config.model_copy(update={flag.group: given.model_copy(update={self.flag: value})})

    def option(self, config: Config) -> str:
        option = flags()[self.flag].option
        return option if self.number is None else f"{option}, model_path of {_served(config)[self.number].name}"


def located(config: Config) -> Config:
    """Return the config with the names of Hub models replaced by directories; download only their config.json."""
    return _downloaded(config, lambda _, directory: not (directory / "config.json").is_file(), ["config.json"])


def with_weights(config: Config) -> Config:
    """Download the weights of the Hub models that `located` found, unless they are complete; return the config with their directories."""

    def is_incomplete(flag: str, directory: Path) -> bool:
        return any(checkpoint_problems(directory, may_be_value_model=flag == "critic_load"))

    return _downloaded(config, is_incomplete, None)


def _downloaded(config: Config, is_missing: Callable[[str, Path], bool], allowed: list[str] | None) -> Config:
    """Download the Hub models for which `is_missing(flag, directory)` is true, and return the config with their directories.

    `allowed`: patterns of the files to download; None: all that fuligo reads. Raises ConfigError with every download that failed.
    """
    problems: list[str] = []
    for place in (*map(_Place, MODEL_FLAGS), *(_Place("sglang_config", number) for number in range(len(_served(config))))):
        text = place.value(config)
        model = None if text is None else HubModel.parse(text)
        if text is None or model is None or not is_missing(place.flag, Path(text)):
            continue
        try:
            config = place.replaced(config, str(model.download(allowed)))
        except ConfigError as error:
            problems += [f"{place.option(config)}: {text}" for text in error.problems]
    if problems:
        raise ConfigError(*problems)
    return config


def _served(config: Config) -> list[ModelServers]:
    return list(config.engine.sglang_config or [])
