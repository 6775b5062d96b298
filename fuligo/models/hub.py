"""Models of the Hugging Face Hub: directories of its cache in place of names such as Qwen/Qwen3-0.6B."""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Self

from fuligo.config import Config
from fuligo.config.flags import flags
from fuligo.errors import ConfigError
from fuligo.formats.hugging_face import checkpoint_problems

_NAME = re.compile(r"(?P<id>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(@(?P<revision>[\w./-]+))?")
_SNAPSHOT = re.compile(r"(?P<cache>.*)/models--(?P<org>[^/]+?)--(?P<name>[^/]+)/snapshots/(?P<revision>[0-9a-f]{40})/?")
MODEL_FLAGS = ("hf_checkpoint", "ref_load", "critic_load", "opd_teacher_load")
"""Flags that take a directory or the name of a model on the Hub."""
_IGNORED = ("*/*", "consolidated*", "*.bin", "*.pt", "*.pth", "*.gguf", "*.h5", "*.msgpack", "*.onnx")
"""Files that fuligo does not read: folders, and weights in other formats."""


@dataclass(slots=True, frozen=True)
class HubModel:
    """Model on the Hub."""

    name: str
    """`ORG/NAME`."""
    revision: str | None
    """Branch, tag or commit; None for the newest commit."""

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """Parse `ORG/NAME`, `ORG/NAME@REVISION`, or a directory of the Hub's cache, which a config of another machine may name.

        None for everything else. A directory of this name wins over the Hub.
        """
        if snapshot := _SNAPSHOT.fullmatch(text):
            return cls(f"{snapshot['org']}/{snapshot['name']}", snapshot["revision"])
        match = None if Path(text).exists() else _NAME.fullmatch(text)
        return None if match is None else cls(match["id"], match["revision"])

    def download(self, allowed: list[str] | None = None) -> Path:
        """Download the model's files unless they are in the cache, and return their directory.

        Args:
            allowed: names of the only files needed.

        Raises:
            ConfigError: the Hub does not provide the model; names what to do.
        """
        from huggingface_hub import snapshot_download

        try:
            files = snapshot_download(self.name, revision=self.revision, allow_patterns=allowed, ignore_patterns=list(_IGNORED))
        except Exception as error:  # of the library or its network client
            reason = f"{type(error).__name__}: {next(iter(str(error).strip().splitlines()), '')}"
            raise ConfigError(
                f"{self} is not a directory here (looked in {Path.cwd()}), and cannot be loaded from the Hub: {reason.strip(' .:')}. Check "
                "its name; a gated or private model needs `hf auth login` or HF_TOKEN; without a network, download it first, into the same "
                f"HF_HOME: hf download {self.name}"
            ) from error
        return Path(files)

    def __str__(self) -> str:
        return self.name if self.revision is None else f"{self.name}@{self.revision}"


def located(config: Config) -> Config:
    """Return the config with directories in place of names on the Hub. Downloads their config.json alone.

    Raises:
        ConfigError: the Hub does not provide a model; names all of them.
    """
    return _replaced(config, {name: model for name, model in _named(config).items() if not _is_here(config, name)}, ["config.json"])


def with_weights(config: Config) -> Config:
    """Download the weights of the models that `located` found, unless they are complete.

    Raises:
        ConfigError: the Hub does not provide a model; names all of them.
    """
    critic = "critic_load"
    incomplete = {
        name: model
        for name, model in _named(config).items()
        if any(checkpoint_problems(Path(str(config.value_of(name))), may_be_value_model=name == critic))
    }
    return _replaced(config, incomplete, None)


def _named(config: Config) -> dict[str, HubModel]:
    """Return the models of the Hub by the flags that name them."""
    given = {name: config.value_of(name) for name in MODEL_FLAGS}
    return {name: model for name, text in given.items() if isinstance(text, str) and (model := HubModel.parse(text)) is not None}


def _is_here(config: Config, name: str) -> bool:
    return (Path(str(config.value_of(name))) / "config.json").is_file()


def _replaced(config: Config, models: dict[str, HubModel], allowed: list[str] | None) -> Config:
    problems: list[str] = []
    for name, model in models.items():
        flag = flags()[name]
        try:
            directory = str(model.download(allowed))
        except ConfigError as error:
            problems += [f"{flag.option}: {text}" for text in error.problems]
            continue
        group = getattr(config, flag.group).model_copy(update={name: directory})
        config = config.model_copy(update={flag.group: group})
    if problems:
        raise ConfigError(*problems)
    return config
