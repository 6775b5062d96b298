"""Files that an entry of --prompt-data names: a file, a pattern, a folder that `datasets` saved, or a data set on the Hub."""

import glob
import json
import re
from pathlib import Path

from fuligo.data.hub import HUB_DATASET, hub_files
from fuligo.errors import DataError

_PATTERN = re.compile(r"[*?\[]")
SUFFIXES = (".jsonl", ".json", ".ndjson", ".parquet", ".pq", ".arrow", ".csv")


def locate(text: str) -> list[Path]:
    """Return the files of an entry without its slice, in the order of their rows.

    Raises:
        DataError: there is no such file, no file matches the pattern, `datasets` did not save the folder, or the Hub lacks the data
    """
    path = Path(text)
    if path.is_dir():
        return _saved(path)
    if path.exists() or path.is_symlink():
        return [path]
    if _PATTERN.search(text):
        matches = sorted(glob.glob(text, recursive=True))  # noqa: PTH207  # absolute patterns, too
        if not matches:
            raise DataError(f"no file matches {text} (looked in {Path.cwd()})")
        return [file for match in matches for file in locate(match)]
    if HUB_DATASET.fullmatch(text) and not text.endswith(SUFFIXES):
        return hub_files(text)
    raise DataError(f"{path} does not exist (looked in {Path.cwd()})")


def _saved(directory: Path) -> list[Path]:
    """Return the Arrow files of a folder that `Dataset.save_to_disk` wrote."""
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
            f"{directory} is damaged: its state.json or dataset_dict.json does not have the form that `datasets` writes ({error!r})"
        ) from error
