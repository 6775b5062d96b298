"""World of episodes without a model: an engine that writes scripted texts by a real template, and environments that misbehave."""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from fuligo.engines.generation import Generation, RoutingQuery, SamplingParams
from fuligo.environments import Environment
from fuligo.environments.load import EnvironmentFactory
from fuligo.rollout.episodes import Episodes, Limits
from fuligo.rollout.generate import SingleTurn
from fuligo.types import IntArray, PromptImage, Sample
from tests.unit.environments.conversations import ids, renderer, tokenizer
from tests.unit.rollout.episode_environments import Adding, Anew, Counting

__all__ = ["PARAMS", "Adding", "Anew", "Counting", "Writer", "episodes", "fresh", "run"]

PARAMS = SamplingParams(max_new_tokens=400, temperature=1.0, sampling_seed=5)


@dataclass
class Writer:
    """Engine that writes the next text of a script, remembers what it saw, and aborts the requests whose numbers are given."""

    texts: list[str]
    abort_at: dict[int, int] = field(default_factory=dict)
    """Number of a request -> tokens after which it is aborted."""
    version: int = 0
    seen: list[list[int]] = field(default_factory=list)
    """Ids of every request."""
    _rest: list[int] = field(default_factory=list)

    async def generate(
        self,
        input_ids: IntArray,
        params: SamplingParams,
        *,
        rid: str,
        priority: int = 0,
        timeout_s: float | None = None,
        routing: RoutingQuery | None = None,
        images: Sequence[PromptImage] = (),
    ) -> Generation:
        await asyncio.sleep(0)
        number = len(self.seen)
        self.seen.append(input_ids.tolist())
        tokens = self._rest or ids(self.texts.pop(0))
        self._rest = []
        allowed = min(params.max_new_tokens, self.abort_at.get(number, len(tokens)))
        reason = "stop" if allowed >= len(tokens) else "abort" if number in self.abort_at else "length"
        if reason == "abort":
            self._rest = tokens[allowed:]
        out = np.array(tokens[:allowed], np.int32)
        return Generation(out, -(out % 7 + 1) / 8, reason, self.version, len(input_ids), 0, "")


def episodes(
    engine: Writer,
    kind: type[Environment] = Counting,
    template: str = "CHATML",
    factory: EnvironmentFactory | None = None,
    **limits: Any,
) -> Episodes:
    """Make the `GenerateFn`; without a factory, environments of `kind` live in this process."""
    given: dict[str, Any] = {"max_turns": 8, "turn_timeout_s": 5.0, "episode_timeout_s": 20.0, "max_context_len": None} | limits
    generate = SingleTurn(engine, tokenizer(), timeout_s=9)
    maker = factory or EnvironmentFactory(kind, kind.Settings())
    return Episodes(generate, maker, renderer(template), tokenizer(), limits=Limits(**given))


def fresh(prompt: str = "q", label: str = "") -> Sample:
    return Sample(4, 2, prompt, np.array(ids("row"), np.int32), label, {"key": 1})


def run(engine: Writer, kind: type[Environment] = Counting, template: str = "CHATML", **limits: Any) -> list[Sample]:
    """Run one episode to its end and return its samples."""
    return asyncio.run(episodes(engine, kind, template, **limits)(fresh(), PARAMS))
