r"""Agent for environments of the verifiers library: the harness talks to the policy through the gateway, and the taskset gives the reward.

    python -m fuligo.environments.adapters.verifiers my-taskset --env '{"agent": {"harness": {"id": "null"}, ...}}' > train.jsonl
    fuligo train --agent fuligo.environments.adapters.verifiers.play --prompt-data train.jsonl \
        --input-key prompt --metadata-key metadata ...

A row's metadata holds the configuration of verifiers' environment and the number of the task in its taskset.
"""

import argparse
import functools
import importlib
import itertools
import os
import secrets
import sys
from collections.abc import Iterator, Sequence
from typing import Any

import orjson
from pydantic import BaseModel, ConfigDict, ValidationError

from fuligo.environments.environment import Row
from fuligo.errors import ConfigError

_KEY = "verifiers"


class Task(BaseModel):
    """Task of a row, as stored in its metadata."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    config: str
    """Configuration of verifiers' environment, as JSON."""
    index: int
    """Number of the task in its taskset, from 0."""


async def play(session: Any, row: Row) -> float:
    """Run the task of a row with verifiers and return the sum of its traces' rewards; for --agent.

    `session` has the URL and the API key of the gateway: `base_url` and `api_key`.

    Raises ConfigError if the row or the installation does not fit, and RuntimeError if the harness, the tools or the scoring failed.
    """
    try:
        task = Task.model_validate(row.metadata[_KEY])
    except (KeyError, ValidationError):
        raise ConfigError(
            f"cannot play sample {row.index}: its metadata holds no task of verifiers; write the prompt file with"
            " `python -m fuligo.environments.adapters.verifiers` and set --metadata-key metadata"
        ) from None
    verifiers, environment = _library("verifiers.v1"), _environment(task.config)
    # verifiers reads keys only from environment variables, and hides those with API_KEY in their name from the programs that it runs.
    variable = f"FULIGO_API_KEY_{secrets.token_hex(8)}"
    os.environ[variable] = session.api_key
    try:
        client = verifiers.EvalClientConfig(base_url=session.base_url, api_key_var=variable)
        # Each episode starts its own servers: shared servers would keep a client for every past session.
        async with environment.serving():
            context = verifiers.ModelContext(model="policy", client=client)
            episode = await environment.run_episode(_tasks(task.config)[task.index], context)
    finally:
        del os.environ[variable]
    errors = [*episode.errors, *(error for trace in episode.traces for error in trace.errors)]
    if not episode.ok:
        raise RuntimeError(
            "; ".join(f"{error.type}: {error.message}" for error in errors) or "the verifiers episode failed without an error"
        )
    return float(sum(trace.reward for trace in episode.traces))


def rows(config: dict[str, Any], first: int = 0, count: int | None = None) -> Iterator[dict[str, Any]]:
    """Yield prompt rows for at most `count` tasks of a taskset (None: all), starting at task number `first`, counted from 0.

    `config`: verifiers' settings of an environment; `taskset.id` names the taskset. Raises ConfigError if verifiers is not installed,
    the settings are invalid, or the taskset does not exist or is infinite.
    """
    text = orjson.dumps(config, option=orjson.OPT_SORT_KEYS).decode()
    for index in itertools.islice(range(len(_tasks(text))), first, None if count is None else first + count):
        data = _tasks(text)[index].data
        shown = data.prompt if isinstance(data.prompt, str) else f"task {index}"
        yield {"prompt": shown, "label": "", "metadata": {_KEY: {"config": text, "index": index}}}


def _environment(config: str) -> Any:
    """Create an environment of verifiers from its JSON configuration. Raises ConfigError if it is invalid, or verifiers is missing."""
    loaders, generic = _library("verifiers.v1.utils.loaders"), _library("verifiers.v1.utils.generic")
    verifiers, given = _library("verifiers.v1"), orjson.loads(config)
    try:
        kind = loaders.environment_class(given["taskset"]["id"], given.get("id", ""))
        settings = generic.concrete_type(kind, verifiers.EnvConfig, origin=verifiers.Env) or verifiers.EnvConfig
        return kind(settings.model_validate(given))
    except (ImportError, AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"cannot create the verifiers environment {config}: {type(error).__name__}: {error}; correct it, or install its package"
        ) from None


@functools.lru_cache(maxsize=16)
def _tasks(config: str) -> list[Any]:
    taskset = _environment(config).taskset
    if not taskset.bounded:
        raise ConfigError(f"cannot list the tasks of {orjson.loads(config)['taskset']['id']}: the taskset is infinite; choose a finite one")
    return list(taskset)


def _library(module: str) -> Any:
    try:
        return importlib.import_module(module)
    except ImportError as error:
        raise ConfigError(f"cannot use verifiers: {error}; pip install verifiers==0.4.0 uv") from None


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the tasks of a taskset of verifiers as JSON lines."""
    parser = argparse.ArgumentParser(prog="python -m fuligo.environments.adapters.verifiers", description=main.__doc__)
    parser.add_argument("taskset", help="id of an installed taskset")
    parser.add_argument(
        "--env", type=orjson.loads, default={}, metavar="JSON", help="configuration of the environment (harness, runtime, ...), as JSON"
    )
    parser.add_argument("--first", type=int, default=0, help="number of the first task, from 0 (default: 0)")
    parser.add_argument("--count", type=int, help="largest number of tasks (default: all from --first on)")
    chosen = parser.parse_args(arguments)
    try:
        config = {**chosen.env, "taskset": {**chosen.env.get("taskset", {}), "id": chosen.taskset}}
        for row in rows(config, chosen.first, chosen.count):
            sys.stdout.write(orjson.dumps(row).decode() + "\n")
    except ConfigError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
