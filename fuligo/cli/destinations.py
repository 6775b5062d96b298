"""Checks of the directories that a run writes to."""

import glob
import re
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

from fuligo.config import Config
from fuligo.config.flags import flags
from fuligo.config.topology import engine_groups
from fuligo.convert.export import export_problem, push_problem
from fuligo.data.locate import locate
from fuligo.data.row_file import PromptPath
from fuligo.errors import ConfigError, DataError
from fuligo.rollout.eval_sets import eval_set_specs

_MODEL_OPTIONS = ("--hf-checkpoint", "--load", "--ref-load", "--critic-load", "--opd-teacher-load", "--sglang-config")
"""Options that name model directories; the run may read every file in them."""


def destination_problems(config: Config) -> Iterator[str]:
    """Yield a problem for each path of a flag that the run cannot write to, or must not overwrite.

    Also yield one if the Hub, to which this sends a request, does not accept the user's token for --push-to-hub.
    """
    observability = config.observability
    run_directory = Path(observability.run_dir) if observability.run_dir is not None else Path("runs") / (observability.name or "")
    # {rollout_id} is in the last parts of these paths: the directory before it must be writable.
    given = {"--run-dir": str(run_directory), "--save": config.checkpoint.save, "--save-hf": config.checkpoint.save_hf}
    for option, path in given.items():
        if path is None:
            continue
        if (cause := _why_unwritable(Path(path.split("{rollout_id}")[0]))) is not None:
            yield f"cannot write {option} {path}: {cause}; choose another directory"
    if config.checkpoint.save_hf is not None:
        yield from _export(config, Path(config.checkpoint.save_hf))
    if config.checkpoint.push_to_hub is not None and config.trains and (problem := push_problem(config.checkpoint.push_to_hub)):
        yield f"--push-to-hub: {problem}"


def _export(config: Config, target: Path) -> Iterator[str]:
    """Yield a problem if an export to --save-hf would replace a file of another flag, or cannot be written; links are followed."""
    for option, path in _named_paths(config):
        if _would_replace(target, path, whole=option in _MODEL_OPTIONS):
            yield f"--save-hf {target} would replace {path} of {option}; use another directory"
            return
    if (problem := export_problem(target)) is not None:
        yield f"--save-hf: {problem}"


def _named_paths(config: Config) -> Iterator[tuple[str, Path]]:
    """Yield the option and the path of every file and directory that the flags name, except --save-hf."""
    for name, flag in flags().items():
        value = config.value_of(name) if flag.is_path and name != "save_hf" else None
        for path in value if isinstance(value, list) else [value]:
            if isinstance(path, str):
                yield from ((flag.option, file) for file in (_local_files(path) if name.endswith("prompt_data") else [Path(path)]))
    yield from (("--sglang-config", Path(group.model_path)) for group in engine_groups(config) if group.model_path is not None)
    with suppress(ConfigError):  # reported by the check of the data
        yield from (("--eval-config", file) for spec in eval_set_specs(config) for path in spec.path for file in _local_files(path))


def _local_files(entry: str) -> list[Path]:
    """Return the files of an entry of --prompt-data; the entry itself if it names none."""
    path = PromptPath.parse(entry).path
    try:
        return locate(path)
    except DataError:  # reported by the check of the data; or the name of an evaluation set
        return [Path(path)]


def _would_replace(target: Path, path: Path, *, whole: bool) -> bool:
    """Return whether an export to `target`, which may hold {rollout_id}, replaces `path` or a directory above it.

    Args:
        whole: also return True if the export replaces something inside the directory `path`.
    """
    named = re.compile(re.escape(str(target.resolve())).replace(re.escape("{rollout_id}"), r"\d+"))
    pattern = glob.escape(str(target.absolute())).replace("{rollout_id}", "[0-9]*")
    existing = {found.resolve() for found in Path("/").glob(pattern.lstrip("/"))}
    path = path.resolve()
    if any(above in existing or named.fullmatch(str(above)) for above in (path, *path.parents)):
        return True
    return whole and any(path in found.parents for found in existing)


def _why_unwritable(directory: Path) -> str | None:
    """Return why `directory` cannot be created or written to; None if it can.

    A file is written to the nearest directory that exists: permissions alone say nothing for root, read-only or full file systems.
    """
    existing = next(parent for parent in [directory, *directory.absolute().parents] if parent.exists())
    if not existing.is_dir():
        return f"{existing} is a file"
    try:
        with tempfile.TemporaryFile(dir=existing):
            return None
    except OSError as error:
        return f"{existing}: {error.strerror}"
