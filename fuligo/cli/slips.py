"""Warnings of `fuligo train` about valid settings that may be a mistake."""

import os
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from fuligo.checkpoint.location import resolve
from fuligo.config import Config
from fuligo.config.python_path import VARIABLE, with_inherited_path
from fuligo.formats.hugging_face import has_chat_template
from fuligo.observability.jsonl import read_json_lines
from fuligo.observability.run_directory import CHECKPOINTS
from fuligo.quantities import count


def slips(config: Config) -> list[str]:
    """Return the warnings for a config that passed `preflight`."""
    return [*_begins_anew(config), *_plain_prompts(config), *_shadowed_megatron(config)]


def _begins_anew(config: Config) -> Iterator[str]:
    load = config.checkpoint.load
    if load is None or resolve(Path(load), config.checkpoint.ckpt_step) is not None:
        return
    run_dir = config.run_directory(datetime.now())
    save = Path(config.checkpoint.save or run_dir / CHECKPOINTS)
    if save.resolve() != Path(load).resolve():  # the same directory starts a run and resumes it
        yield f"--load {load} holds no checkpoint: the run starts from scratch and saves to {save}"
    elif (metrics := run_dir / "metrics.jsonl").is_file() and (num_steps := len(read_json_lines(metrics))):
        discarded = count(num_steps, "recorded step")
        yield f"--load {load} holds no checkpoint: the run starts from scratch and discards the {discarded} of {run_dir}"


def _plain_prompts(config: Config) -> Iterator[str]:
    directory, settings = config.model.hf_checkpoint, config.data
    if directory is None or not config.data.prompt_data or config.debug.debug_train_only or settings.apply_chat_template:
        return
    if Path(directory).is_dir() and has_chat_template(Path(directory)):
        yield (
            "--apply-chat-template is not given, so prompts go to the model unchanged although its tokenizer has a chat template; this is "
            "right for a base model and for prompts that are already rendered"
        )


def _shadowed_megatron(config: Config) -> Iterator[str]:
    """Yield a warning if ranks import another Megatron-Core than the installed one, whose version was checked."""
    imported = with_inherited_path({VARIABLE: config.cluster.env.get(VARIABLE) or ""})[VARIABLE]
    directories = [
        directory for directory in imported.split(os.pathsep) if (Path(directory) / "megatron" / "core" / "__init__.py").is_file()
    ]
    if config.trains and config.resolved_train_backend == "megatron" and directories:
        yield (
            f"{VARIABLE} has {directories[0]}, whose megatron.core replaces the installed Megatron-Core; remove that directory unless its "
            "version is the same"
        )
