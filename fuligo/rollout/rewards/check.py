"""Checks before anything is sampled: of the reward flags and the packages that they require, and of the rows that rewards judge."""

import importlib.util
from collections.abc import Sequence
from contextlib import suppress
from itertools import islice
from typing import Any

from fuligo.config.groups import DataFlags, RewardFlags
from fuligo.data.dataset import Rows
from fuligo.errors import ConfigError, DataError, RewardError
from fuligo.rollout.rewards.rules import BOXED_PREFIX, find_rule

_ROWS_READ = 1000
"""Number of rows checked, which takes milliseconds; later rows that cannot be judged fail their samples during the run."""


def check_reward(flags: RewardFlags) -> None:
    """Check a built-in reward. Raises ConfigError if the reward type is unknown, or lacks a flag or a package."""
    if flags.rm_type is None or flags.custom_rm_path is not None:
        return
    rule = find_rule(flags.rm_type)
    if flags.rm_type.removeprefix(BOXED_PREFIX) == "remote_rm" and flags.rm_url is None:
        raise ConfigError(f"--rm-type {flags.rm_type} needs --rm-url, the URL of the reward model")
    if flags.rm_type.removeprefix(BOXED_PREFIX) == "ifbench" and importlib.util.find_spec("if_verifiable") is None:
        raise ConfigError(
            f"--rm-type {flags.rm_type} needs the package if-verifiable, which is not installed; pip install 'fuligo[ifbench]'"
        )
    if rule.keys and flags.reward_key not in rule.keys and flags.custom_reward_post_process_path is None:
        given = "is not set" if flags.reward_key is None else f"({flags.reward_key}) is not one of them"
        raise ConfigError(
            f"--rm-type {flags.rm_type} returns a dict of {', '.join(rule.keys)}, but --reward-key {given}; "
            "choose --reward-key score (1 or -1) or --reward-key acc (1 or 0)"
        )


def unjudged(paths: Sequence[str], settings: DataFlags, rm_type: str | None) -> str | None:
    """Describe the first row that cannot be judged, and count such rows among the first `_ROWS_READ`.

    Return None if all can be judged, or if --skip-bad-rows is set and at least one can. `rm_type` is for rows whose metadata set none.
    """
    if settings.metadata_key is None and (rm_type is None or find_rule(rm_type).check_row is None):
        return None
    rows = Rows.open(paths, settings)
    num_read = min(len(rows), _ROWS_READ)
    problems: dict[int, str] = {}
    for row in range(num_read):
        with suppress(DataError):  # reported when the dataset is read
            fields = rows[row]
            if problem := row_problem(fields.label, fields.metadata, rm_type):
                problems[row] = problem
    if not problems or (settings.skip_bad_rows and len(problems) < num_read):
        return None
    row, problem = next(islice(problems.items(), 1))
    more = f" ({len(problems)} of the first {num_read} rows cannot be judged)" if len(problems) > 1 else ""
    return f"{rows.place(row)}: {problem}{more}; fix or remove such rows, or let their samples fail with --skip-bad-rows"


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
    except RewardError as failure:
        return f"{source} {name}: {failure}"
    return None
