"""Judge of instruction following: the published checks of IFEval and IFBench, from the package if-verifiable (`fuligo[ifbench]`).

It imports nothing from fuligo, so that a reward worker can run it by path. It runs in a worker because some of the published regular
expressions can take quadratic time, which would block the event loop.
"""

import csv
import difflib
import functools
import inspect
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

_NLTK_DATA = Path(__file__).with_name("nltk_data")
"""Directory with abbreviations for NLTK's sentence splitter, used if NLTK's model (punkt_tab) is not installed."""
_TRIAL = "A first sentence. Is it followed by a second one?"
"""Response on which a check is tried before the run starts."""

_LANGUAGE_CHECKS = frozenset({"language:response_language", "change_case:english_capital", "change_case:english_lowercase"})
"""Checks that ask langdetect for the language of a response."""

_MALFORMED = (IndexError, ValueError, csv.Error)
"""Errors that checks raise on malformed responses, when they index into an empty part or parse a number or CSV."""


class BadMetadataError(ValueError):
    """Raised if metadata name an unknown check, or have arguments that do not fit the check."""


def prepare() -> None:
    """Import the checks."""
    registry()


def judge(response: str, metadata: dict[str, Any]) -> bool:
    """Return whether the response follows every instruction of the metadata (IFEval's strict variant). An empty response follows none."""
    checks = checkers(metadata)
    try:
        return bool(response.strip()) and all(check.check_following(response) for check in checks)
    except _MALFORMED:
        return False


def check_metadata(metadata: dict[str, Any]) -> None:
    """Check that a response to the row can be judged, by judging a short one.

    Raises BadMetadataError if an instruction or argument is invalid, a check raises, or NLTK data that it needs is missing.
    """
    for name, check in zip(metadata.get("instruction_id_list") or (), checkers(metadata)):
        try:
            check.check_following(_TRIAL)
        except _MALFORMED:
            continue
        except Exception as error:
            if type(error) is LookupError:  # NLTK's text begins with "Resource 'stopwords' not found"
                resource = str(error).split("'")[1]
                raise BadMetadataError(
                    f"the check of {name} needs NLTK's {resource}, which is not installed; python -m nltk.downloader {resource}"
                ) from None
            raise BadMetadataError(f"the kwargs of {name} do not fit its check: {type(error).__name__}: {error}") from None


def checkers(metadata: dict[str, Any]) -> list[Any]:
    """Return a check for each of `instruction_id_list`, with its `kwargs`. Raises BadMetadataError if an id or argument is invalid."""
    names, arguments = metadata.get("instruction_id_list"), metadata.get("kwargs")
    if not isinstance(names, list | tuple) or not names:
        raise BadMetadataError(f'metadata["instruction_id_list"] must be a list of instructions, not {names!r:.60}')
    if arguments is None:
        arguments = [{}] * len(names)
    if not isinstance(arguments, list | tuple) or len(arguments) != len(names):
        raise BadMetadataError(f'metadata["kwargs"] must be a list with one object per instruction ({len(names)}), not {arguments!r:.60}')
    return [_checker(name, given) for name, given in zip(names, arguments)]


@functools.cache
def registry() -> dict[str, type[Any]]:
    """Return the class of each check by the id of its instruction. Raises BadMetadataError if the package is not installed."""
    has_langdetect = _seed_langdetect()
    if not has_langdetect:
        sys.modules["langdetect"] = ModuleType("langdetect")  # importing the checks needs it, but only a few use it
    try:
        import nltk

        nltk.data.path.append(str(_NLTK_DATA))
        with mock.patch.object(nltk, "download"):  # importing the checks would download NLTK's data
            from if_verifiable import ifbench, ifeval
    except ImportError as error:
        raise BadMetadataError(
            f"instructions are judged by the package if-verifiable, but {error.name} is not installed; pip install 'fuligo[ifbench]'"
        ) from error
    finally:
        if not has_langdetect:
            del sys.modules["langdetect"]
    return {**ifeval.INSTRUCTION_DICT, **ifbench.INSTRUCTION_DICT}


def _seed_langdetect() -> bool:
    """Make langdetect deterministic; return False if it is not installed."""
    try:
        import langdetect
    except ImportError:
        return False
    langdetect.DetectorFactory.seed = 0
    return True


def _checker(name: Any, given: Any) -> Any:
    if not isinstance(name, str) or name not in registry():
        near = difflib.get_close_matches(str(name), registry(), n=1)
        hint = f"did you mean {near[0]}?" if near else "use an instruction of IFEval or IFBench"
        raise BadMetadataError(f"there is no check for the instruction {name!r:.60}; {hint}")
    if name in _LANGUAGE_CHECKS and "langdetect" not in sys.modules:
        raise BadMetadataError(f"the check of {name} needs langdetect, which is not installed; pip install 'fuligo[ifbench]'")
    if given is not None and not isinstance(given, dict):
        raise BadMetadataError(f"the kwargs of {name} must be an object, not {given!r:.60}")
    # Columnar files store every argument for every instruction, null where it does not apply, and all numbers as floats.
    arguments = {
        key: int(value) if isinstance(value, float) and value.is_integer() else value
        for key, value in (given or {}).items()
        if value is not None
    }
    check = registry()[name](name)
    parameters = inspect.signature(check.build_description).parameters.values()
    # The published checks replace missing arguments with random values.
    missing = [each.name for each in parameters if each.kind is not each.VAR_KEYWORD and each.name not in arguments]
    if missing:
        raise BadMetadataError(f"the kwargs of {name} lack {', '.join(missing)}; add them")
    try:
        check.build_description(**arguments)
    except Exception as error:
        raise BadMetadataError(f"the kwargs of {name}, {arguments!r:.120}, do not fit its check: {error}") from None
    used = check.get_instruction_args() or {}
    replaced = [key for key, value in arguments.items() if isinstance(value, int | float) and used.get(key, value) != value]
    if replaced:
        key = replaced[0]
        raise BadMetadataError(f"the kwargs of {name}: its check replaces {key}={arguments[key]} with a random value; use another value")
    return check
