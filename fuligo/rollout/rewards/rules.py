"""Built-in rewards by name. Each extracts the answer from a response and judges it."""

import difflib
import random
import re
import string
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any

from fuligo.answers.statement import last_boxed, stated_answer
from fuligo.errors import ConfigError, RewardError
from fuligo.rollout.rewards.dapo import dapo_reward
from fuligo.rollout.rewards.extraction import answer_line, deepscaler_answer, gold_answers
from fuligo.rollout.rewards.gpqa import Question, gpqa_reward
from fuligo.rollout.rewards.instructions import BadMetadataError, check_metadata
from fuligo.rollout.rewards.remote import RemoteReward
from fuligo.rollout.rewards.symbolic import SymbolicComparison
from fuligo.rollout.rewards.worker_pool import WorkerPool
from fuligo.types import Sample

_ARTICLES = re.compile(r"\b(a|an|the)\b")
_WITHOUT_PUNCTUATION = str.maketrans("", "", string.punctuation)


def squad_tokens(text: str) -> list[str]:
    """Split a text at white space, in lower case and without ASCII punctuation and articles."""
    return _ARTICLES.sub(" ", text.lower().translate(_WITHOUT_PUNCTUATION)).split()


def f1_score(answer: str, gold: str) -> float:
    """Return the harmonic mean of precision and recall over the multisets of tokens; 1 if both are empty."""
    answer_tokens, gold_tokens = squad_tokens(answer), squad_tokens(gold)
    if not answer_tokens or not gold_tokens:
        return float(answer_tokens == gold_tokens)
    common = (Counter(answer_tokens) & Counter(gold_tokens)).total()
    return 2 * common / (len(answer_tokens) + len(gold_tokens))


BOXED_PREFIX = "boxed_"


@dataclass(slots=True, frozen=True)
class Services:
    """Services that rewards use in addition to the sample."""

    symbolic: SymbolicComparison
    instructions: WorkerPool
    remote: RemoteReward


@dataclass(slots=True, frozen=True)
class Rule:
    """Built-in reward, which extracts an answer from the response and judges it."""

    judge: Callable[[str | None, Sample, Services], Awaitable[Any]]
    """(answer, sample, services) -> reward; the answer is None if the response has none."""
    extract: Callable[[str], str | None] = lambda response: response
    keys: tuple[str, ...] = ()
    """Keys of the dict that it returns; empty if it returns a number."""
    check_row: Callable[[Any, dict[str, Any]], object] | None = None
    """Check of a row's (label, metadata); raises RewardError if no response to the row can be judged. None: rows are not checked."""


async def _answer_equals(answer: str | None, sample: Sample, services: Services) -> float:
    golds = gold_answers(sample.label)
    return float(answer is not None and await services.symbolic.answer_equals(answer, golds))


async def _dapo(answer: str | None, sample: Sample, services: Services) -> dict[str, float | str]:
    return dapo_reward(answer, gold_answers(sample.label))


async def _f1(answer: str | None, sample: Sample, services: Services) -> float:
    golds = gold_answers(sample.label)
    return 0.0 if answer is None else max(f1_score(answer, gold) for gold in golds)


async def _gpqa(answer: str | None, sample: Sample, services: Services) -> float:
    return gpqa_reward(answer, sample.label, sample.metadata)


async def _ifbench(answer: str | None, sample: Sample, services: Services) -> float:
    solution = (answer or "").rpartition("</think>")[2]
    named = {key: sample.metadata.get(key) for key in ("instruction_id_list", "kwargs")}
    return float(await services.instructions.ask(response=solution, metadata=named))


def _check_instructions(label: Any, metadata: dict[str, Any]) -> None:
    try:
        check_metadata(metadata)
    except BadMetadataError as error:
        raise RewardError(str(error)) from error


async def _random(answer: str | None, sample: Sample, services: Services) -> float:
    return float(random.Random(sample.index).getrandbits(1))


async def _remote(answer: str | None, sample: Sample, services: Services) -> Any:
    return await services.remote.judge(sample, answer or "")


NAMED = {
    "math": Rule(_answer_equals, stated_answer, check_row=lambda label, metadata: gold_answers(label)),
    "deepscaler": Rule(_answer_equals, deepscaler_answer, check_row=lambda label, metadata: gold_answers(label)),
    "dapo": Rule(_dapo, answer_line, keys=("score", "acc", "pred"), check_row=lambda label, metadata: gold_answers(label)),
    "f1": Rule(_f1, check_row=lambda label, metadata: gold_answers(label)),
    "gpqa": Rule(_gpqa, check_row=Question.of),
    "ifbench": Rule(_ifbench, check_row=_check_instructions),
    "random": Rule(_random),
    "remote_rm": Rule(_remote),
}
RULES = {**NAMED, **{BOXED_PREFIX + name: replace(rule, extract=last_boxed) for name, rule in NAMED.items()}}
"""Valid names for --rm-type and metadata["rm_type"]. With the prefix `boxed_` the answer is the content of the last box."""


def find_rule(name: object, source: str = "--rm-type") -> Rule:
    """Return the built-in reward with this name. Raises ConfigError if no reward has this name; the error states its `source`."""
    if isinstance(name, str) and name in RULES:
        return RULES[name]
    near = difflib.get_close_matches(str(name), RULES, n=2)
    hint = f"; did you mean {' or '.join(near)}?" if near else "."
    raise ConfigError(
        f"{source} {name} is not a built-in reward{hint} Known: {', '.join(NAMED)}, each also as {BOXED_PREFIX}<name>; "
        "use --custom-rm-path for your own"
    )
