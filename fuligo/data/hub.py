"""Data sets of the Hugging Face Hub, through the cache, token and offline rules of `datasets`."""

import functools
import re
from pathlib import Path
from typing import Any

from fuligo.errors import DataError

HUB_DATASET = re.compile(r"(?P<id>[A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*)(:(?P<first>[\w.-]+))?(:(?P<second>[\w.-]+))?")
"""`ORG/NAME`, `ORG/NAME:SPLIT` or `ORG/NAME:CONFIG:SPLIT`."""


def hub_files(text: str) -> list[Path]:
    """Download a split, unless it is in the cache, and return its Arrow files there. A process asks the Hub once, even if that fails.

    Raises:
        DataError: the package is missing, or the Hub does not provide the data; names what to do
    """
    found = _asked(text)
    if isinstance(found, DataError):
        raise found
    return found


@functools.cache
def _asked(text: str) -> list[Path] | DataError:
    try:
        return _load(text)
    except DataError as error:
        return error


def _load(text: str) -> list[Path]:
    match = HUB_DATASET.fullmatch(text)
    assert match is not None
    name, config, split = match["id"], match["first"] if match["second"] else None, match["second"] or match["first"]
    try:
        import datasets
    except ModuleNotFoundError as error:
        raise DataError(
            f"{text} is neither a file here (looked in {Path.cwd()}) nor can it be loaded from the Hub: the package datasets is not "
            "installed; pip install 'fuligo[hub]'"
        ) from error
    try:
        builder = datasets.load_dataset_builder(name, config)
        builder.download_and_prepare()
    except Exception as error:  # of the library, its network client, or a damaged file
        raise DataError(_refused(text, name, error)) from error
    splits = list(builder.info.splits or {})
    if split is None and len(splits) == 1:
        split = splits[0]
    if split not in splits:
        told = "choose one" if split is None else f"{split} is none of them"
        first = ":".join([name, *([] if config is None else [config]), splits[0]])
        raise DataError(f"{text}: the data set has the splits {', '.join(splits)}; {told}, such as {first}")
    loaded: Any = builder.as_dataset(split=split)
    return [Path(file["filename"]) for file in loaded.cache_files]


def _refused(text: str, name: str, error: Exception) -> str:
    reason = " ".join(str(error).split()).rstrip(".") or type(error).__name__
    if "Config name is missing" in reason or "BuilderConfig" in reason:
        return f"{text}: {reason}; write {name}:CONFIG:SPLIT"
    return (
        f"{text} is no file here (looked in {Path.cwd()}), and cannot be loaded from the Hub: {reason}. Check its name; a private data set "
        f"needs `hf auth login` or HF_TOKEN; without a network, download it beforehand, into the same HF_HOME, with load_dataset({name!r})"
    )
