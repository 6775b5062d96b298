"""Files that an entry of --prompt-data names: a file, a pattern, a folder that `datasets` saved, or a dataset on the Hub."""

import functools
import glob
import json
import re
from pathlib import Path
from typing import Any

from fuligo.errors import DataError

_PATTERN = re.compile(r"[*?\[]")
_HUB_DATASET = re.compile(r"(?P<id>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(:(?P<first>[\w.-]+))?(:(?P<second>[\w.-]+))?")
"""`ORG/NAME`, `ORG/NAME:SPLIT` or `ORG/NAME:CONFIG:SPLIT`."""
SUFFIXES = (".jsonl", ".json", ".ndjson", ".parquet", ".pq", ".arrow", ".csv")


def locate(text: str) -> list[Path]:
    """Return the files of an entry without its slice, in the order of their rows. A dataset on the Hub is downloaded first.

    Raises DataError if nothing matches, the folder was not saved by `datasets`, or the dataset cannot be loaded from the Hub.
    """
    path = Path(text)
    if path.is_dir():
        return _saved(path)
    if path.exists() or path.is_symlink():
        return [path]
    if _PATTERN.search(text):
        matches = sorted(glob.glob(text, recursive=True))  # noqa: PTH207  # `text` may be absolute
        if not matches:
            raise DataError(f"no file matches {text} (looked in {Path.cwd()}); correct the pattern")
        return [file for match in matches for file in locate(match)]
    if _HUB_DATASET.fullmatch(text) and not text.endswith(SUFFIXES):
        found = _asked(text)
        if isinstance(found, DataError):
            raise found
        return found
    raise DataError(f"{path} does not exist (looked in {Path.cwd()}); correct the path")


def _saved(directory: Path) -> list[Path]:
    """Return the Arrow files of a folder that `Dataset.save_to_disk` wrote. Raises DataError for other folders, or several splits."""
    try:
        if (splits := directory / "dataset_dict.json").is_file():
            names = json.loads(splits.read_text(encoding="utf-8"))["splits"]
            raise DataError(f"{directory} holds the splits {', '.join(names)}; choose one of them: {directory / names[0]}")
        if not (state := directory / "state.json").is_file():
            raise DataError(
                f"{directory} is a directory, but not one that `datasets` saved; name its files as a pattern, such as '{directory}/*.jsonl'"
            )
        return [directory / entry["filename"] for entry in json.loads(state.read_text(encoding="utf-8"))["_data_files"]]
    except (ValueError, KeyError, TypeError, IndexError) as error:
        raise DataError(
            f"cannot read {directory}: its state.json or dataset_dict.json does not have the form that `datasets` writes ({error!r}); "
            "save the dataset again"
        ) from error


@functools.cache
def _asked(text: str) -> list[Path] | DataError:
    try:
        return _load(text)
    except DataError as error:
        return error


def _load(text: str) -> list[Path]:
    match = _HUB_DATASET.fullmatch(text)
    assert match is not None
    name, config, split = match["id"], match["first"] if match["second"] else None, match["second"] or match["first"]
    try:
        import datasets
    except ModuleNotFoundError as error:
        raise DataError(
            f"{text} is not a file here (looked in {Path.cwd()}), and cannot be loaded from the Hub: the package datasets is not "
            "installed; pip install 'fuligo[hub]'"
        ) from error
    try:
        builder = datasets.load_dataset_builder(name, config)
        builder.download_and_prepare()
    except Exception as error:  # raised by the library or its network client, or because of a damaged file
        raise DataError(_refused(text, name, config, error)) from error
    splits = list(builder.info.splits or {})
    if split is None and len(splits) == 1:
        split = splits[0]
    if split not in splits:
        told = "choose one" if split is None else f"{split} is not one of them"
        first = ":".join([name, *([] if config is None else [config]), splits[0]])
        raise DataError(f"{text}: the dataset has the splits {', '.join(splits)}; {told}, such as {first}")
    loaded: Any = builder.as_dataset(split=split)
    return [Path(file["filename"]) for file in loaded.cache_files]


def _refused(text: str, name: str, config: str | None, error: Exception) -> str:
    reason = " ".join(str(error).split()).rstrip(".") or type(error).__name__
    if "Config name is missing" in reason or "BuilderConfig" in reason:
        return f"{text}: {reason}; write {name}:CONFIG:SPLIT"
    return (
        f"{text} is not a file here (looked in {Path.cwd()}), and cannot be loaded from the Hub: {reason}. Check its name; a private "
        f"dataset needs `hf auth login` or HF_TOKEN; without a network, download it beforehand, into the same HF_HOME, with "
        f"load_dataset({', '.join(map(repr, filter(None, [name, config])))})"
    )
