"""Warnings of `fuligo train` about valid settings that may be a mistake."""

from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from fuligo.checkpoint.location import resolve
from fuligo.config import Config
from fuligo.formats.hugging_face import has_chat_template
from fuligo.observability.run_directory import CHECKPOINTS


def slips(config: Config) -> list[str]:
    """Return the warnings for a config that passed `preflight`."""
    return [*_begins_anew(config), *_plain_prompts(config)]


def _begins_anew(config: Config) -> Iterator[str]:
    load = config.checkpoint.load
    if load is None or resolve(Path(load), config.checkpoint.ckpt_step) is not None:
        return
    save = Path(config.checkpoint.save or config.run_directory(datetime.now()) / CHECKPOINTS)
    if save.resolve() != Path(load).resolve():  # the same directory starts a run and resumes it
        yield f"--load {load} holds no checkpoint: the run starts from scratch and saves to {save}"


def _plain_prompts(config: Config) -> Iterator[str]:
    directory, settings = config.model.hf_checkpoint, config.data
    if directory is None or not config.data.prompt_data or config.debug.debug_train_only or settings.apply_chat_template:
        return
    if Path(directory).is_dir() and has_chat_template(Path(directory)):
        yield (
            "--apply-chat-template is not given, so prompts go to the model unchanged although its tokenizer has a chat template; this is "
            "right for a base model and for prompts that are already rendered"
        )
