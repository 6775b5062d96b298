"""Check that the built-in rewards can judge the rows of a prompt file, before anything is sampled."""

from collections.abc import Sequence
from itertools import islice
from typing import Any

from fuligo.config.groups import DataFlags
from fuligo.data.dataset import Rows
from fuligo.errors import ConfigError, DataError
from fuligo.rollout.rewards.failure import RewardFailure
from fuligo.rollout.rewards.rules import find_rule

_ROWS_READ = 1000
"""Number of rows checked, which takes milliseconds; later rows that cannot be judged fail their samples during the run."""


def unjudged(paths: Sequence[str], settings: DataFlags, rm_type: str | None) -> str | None:
    """Describe the first row that cannot be judged, and count such rows among the first `_ROWS_READ`.

    Return None if all can be judged, or if --skip-bad-rows is set and at least one can.

    Args:
        paths: entries of --prompt-data that passed `check_file`.
        rm_type: reward type of rows whose metadata set none.
    """
    if settings.metadata_key is None and (rm_type is None or find_rule(rm_type).check_row is None):
        return None
    rows = Rows.open(paths, settings)
    num_read = min(len(rows), _ROWS_READ)
    problems = {row: problem for row in range(num_read) if (problem := _problem(rows, row, rm_type))}
    if not problems or (settings.skip_bad_rows and len(problems) < num_read):
        return None
    row, problem = next(islice(problems.items(), 1))
    more = f" ({len(problems)} of the first {num_read} rows cannot be judged)" if len(problems) > 1 else ""
    return f"{rows.place(row)}: {problem}{more}; fix or remove such rows, or let their samples fail with --skip-bad-rows"


def _problem(rows: Rows, row: int, rm_type: str | None) -> str | None:
    try:
        fields = rows[row]
    except DataError:
        return None  # reported when the dataset is read
    return row_problem(fields.label, fields.metadata, rm_type)


def row_problem(label: Any, metadata: dict[str, Any], rm_type: str | None) -> str | None:
    """Return the reason why no response to a row can be judged; None if there is none."""
    own = metadata.get("rm_type")
    name = own or rm_type
    if name is None:
        return None
    source = 'metadata["rm_type"]' if own else "--rm-type"
    try:
        check = find_rule(name, source).check_row
        if check is not None:
            check(label, metadata)
    except ConfigError as error:
        return str(error)
    except RewardFailure as failure:
        return f"{source} {name}: {failure}"
    return None
