r"""Tasks of reasoning-gym: rows for the prompt file, and its verifiers as a reward.

    python -m fuligo.environments.adapters.reasoning_gym leg_counting --size 1000 --seed 1 > train.jsonl
    fuligo train --prompt-data train.jsonl --input-key prompt --metadata-key metadata --apply-chat-template \
        --custom-rm-path fuligo.environments.adapters.reasoning_gym.reward ...

A row's metadata holds its task (dataset, configuration, index); the reward generates the task again, because the verifier needs types that
JSON does not preserve.
"""

import argparse
import functools
import importlib
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import orjson
from pydantic import BaseModel, ConfigDict, ValidationError

from fuligo.errors import ConfigError, RewardError
from fuligo.types import Sample

_KEY = "reasoning_gym"
SEED_STRIDE = 10_000_000
"""Distance between the package's seeds for consecutive values of --seed. The package draws task i with the dataset's seed plus i, so
datasets with neighboring seeds would share most of their tasks."""


class Task(BaseModel):
    """Task of a row, as stored in its metadata."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    dataset: str
    config: str
    """JSON of the dataset's configuration, seed and size included."""
    index: int


def rows(dataset: str, config: Mapping[str, Any], *, style: str = "default") -> Iterator[dict[str, Any]]:
    """Yield the rows of a dataset: `prompt`, `label` and `metadata`.

    Args:
        dataset: name, such as `leg_counting`
        config: arguments of the dataset, such as `size` and `seed`
        style: key of `reasoning_gym.utils.SYSTEM_PROMPTS`; each of these system prompts asks for <answer> tags

    Raises:
        ConfigError: reasoning-gym is not installed, or the dataset, its arguments or the style are invalid
    """
    text = orjson.dumps(dict(config), option=orjson.OPT_SORT_KEYS).decode()
    generated = _dataset(dataset, text)
    prompts = importlib.import_module("reasoning_gym.utils").SYSTEM_PROMPTS
    if style not in prompts:
        raise ConfigError(f"cannot write prompts: there is no style {style!r}; choose {', '.join(prompts)}")
    for index in range(len(generated)):
        entry = generated[index]
        task = Task(dataset=dataset, config=text, index=index)
        messages = [{"role": "system", "content": prompts[style].strip()}, {"role": "user", "content": entry["question"]}]
        yield {"prompt": messages, "label": str(entry["answer"]), "metadata": {_KEY: task.model_dump()}}


def score(answer: str, task: Task) -> float:
    """Return the verifier's score of a response, between 0 and 1; 0 without <answer> tags."""
    dataset = _dataset(task.dataset, task.config)
    extract_answer = importlib.import_module("reasoning_gym.utils").extract_answer
    return float(dataset.score_answer(extract_answer(answer), dataset[task.index]))


def reward(args: Any, sample: Sample) -> float:
    """Return the score of a sample; for --custom-rm-path. Raises RewardError if its row was not written by `rows`."""
    try:
        task = Task.model_validate((sample.metadata or {})[_KEY])
    except (KeyError, ValidationError):
        raise RewardError(
            f"cannot score sample {sample.index}: its metadata holds no reasoning-gym task; write the prompt file with"
            " `python -m fuligo.environments.adapters.reasoning_gym` and set --metadata-key metadata"
        ) from None
    return score(sample.response, task)


@functools.lru_cache(maxsize=64)
def _dataset(name: str, config: str) -> Any:
    try:
        reasoning_gym = importlib.import_module("reasoning_gym")
    except ImportError:
        raise ConfigError("cannot use reasoning-gym: it is not installed; pip install 'fuligo[reasoning-gym]'") from None
    try:
        return reasoning_gym.create_dataset(name, **orjson.loads(config))
    except (ValueError, TypeError, AssertionError) as error:
        raise ConfigError(
            f"cannot create the reasoning-gym dataset {name!r} with {config}: {error}; correct its name or its arguments"
        ) from None


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the rows of a dataset as JSON lines."""
    parser = argparse.ArgumentParser(prog="python -m fuligo.environments.adapters.reasoning_gym", description=main.__doc__)
    parser.add_argument("dataset", help="name of the dataset, such as leg_counting")
    parser.add_argument("--size", type=int, default=1000, help="number of tasks (default: 1000)")
    parser.add_argument("--seed", type=int, default=1, help="seed of the tasks; use another one for evaluation (default: 1)")
    parser.add_argument(
        "--config", type=orjson.loads, default={}, metavar="JSON", help="further arguments of the dataset, as a JSON object"
    )
    parser.add_argument("--style", default="default", help="system prompt, such as default, simple or direct (default: default)")
    chosen = parser.parse_args(arguments)
    try:
        seed = chosen.seed * SEED_STRIDE
        for row in rows(chosen.dataset, {**chosen.config, "size": chosen.size, "seed": seed}, style=chosen.style):
            sys.stdout.write(orjson.dumps(row).decode() + "\n")
    except ConfigError as error:
        sys.exit(str(error))


if __name__ == "__main__":
    main()
