"""What of a config may be meant, and may be a slip: `fuligo train` warns of it and goes on."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from fuligo.checkpoint.location import resolve
from fuligo.config import Config
from fuligo.data import data_settings
from fuligo.formats.hugging_face import has_chat_template
from fuligo.observability.run_directory import CHECKPOINTS


def slips(config: Config) -> list[str]:
    """One text each; of a config that `preflight` let pass."""
    return [*_begins_anew(config), *_plain_prompts(config)]


def _begins_anew(config: Config) -> Iterator[str]:
    load = config.checkpoint.load
    if load is None or resolve(Path(load)) is not None:
        return
    save = Path(config.checkpoint.save or config.run_directory(datetime.now()) / CHECKPOINTS)
    if save.resolve() != Path(load).resolve():  # else one command starts a run and resumes it
        yield f"--load {load} holds no checkpoint: the run begins anew, and saves to {save}"


def _plain_prompts(config: Config) -> Iterator[str]:
    directory, settings = config.model.hf_checkpoint, data_settings(config)
    if directory is None or config.data.prompt_data is None or config.debug.debug_train_only or settings.apply_chat_template:
        return
    if Path(directory).is_dir() and has_chat_template(Path(directory)):
        yield (
            "without --apply-chat-template prompts go to the model as they stand, though its tokenizer has a chat template: that is "
            "right for a base model, and for prompts that are rendered already"
        )
