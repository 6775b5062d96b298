"""Test world of the gateway: an engine that writes random turns in a family's format, and agents that talk to it."""

import asyncio
import random
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np

from fuligo.engines.generation import Generation, RoutingQuery, SamplingParams
from fuligo.gateway.session import Policy, Session
from fuligo.types import IntArray, Sample
from tests.unit.environments.conversations import ALONE, CALLS, ENDS, TEMPLATES, ids, renderer, tokenizer

PARAMS = SamplingParams(max_new_tokens=160, sampling_seed=7)
WORDS = ("what is", "7", "é", "漢字", "🙂", "\n", " ", "sum", "<think>", "</think>\n", '{"', "how many </tool_call>")


@dataclass
class RandomEngine:
    """Engine that writes random words, calls and thinking, ends turns or does not, and aborts some of its requests."""

    random: random.Random
    template: str = "CHATML"
    end: str = ENDS[0]
    abort_share: float = 0.0
    delay_s: float = 0.0
    version: int = 0
    requests: list[tuple[IntArray, Generation]] = field(default_factory=list)
    """Ids that came, and the answer."""
    num_running: int = 0

    async def generate(
        self,
        input_ids: IntArray,
        params: SamplingParams,
        *,
        rid: str,
        priority: int = 0,
        timeout_s: float | None = None,
        routing: RoutingQuery | None = None,
    ) -> Generation:
        self.num_running += 1
        try:
            await asyncio.sleep(self.delay_s * self.random.random())
        finally:
            self.num_running -= 1
        draw = self.random
        text = self._text()
        new = [*ids(text), *(ids(self.end) if draw.random() < 0.8 else [])]
        reason = "stop" if new[-1:] == ids(self.end) else "length"
        new = new[: params.max_new_tokens] or ids("7")
        if draw.random() < self.abort_share:
            new, reason = new[: draw.randrange(len(new))], "abort"
        logprobs = -np.array([draw.random() for _ in new], np.float32)
        generation = Generation(np.array(new, np.int32), logprobs, reason, self.version, len(input_ids), 0, "", engine=0)
        self.version += draw.random() < 0.2
        self.requests.append((np.array(input_ids), generation))
        return generation

    def _text(self) -> str:
        """Draw words, closed thinking where the prompt may have opened it, and a call as the template's format writes it."""
        draw, format = self.random, renderer(self.template).format.name
        words = "".join(draw.choice(WORDS) for _ in range(draw.randrange(6)))
        if draw.random() >= 0.3:
            return words
        closed = "</think>" if "<think>" in TEMPLATES[self.template] and draw.random() < 0.8 else ""
        return CALLS[format] if format in ALONE and draw.random() < 0.8 else words + closed + CALLS[format]


def policy(engine: object, template: str = "CHATML", **changes: object) -> Policy:
    return Policy(engine, renderer(template), tokenizer(), **{"name": "tiny", "timeout_s": 60.0, **changes})


def session(engine: object, template: str = "CHATML", params: SamplingParams = PARAMS, **changes: object) -> Session:
    return Session(policy(engine, template, **changes), params, name="s", base_url="http://none/s/v1", api_key="k", label="0")


def check_exact(samples: list[Sample], engine: RandomEngine) -> None:
    """Check that every token that the engine sampled is trained exactly once, after the ids that the engine saw before it.

    Answers that were aborted come from several requests; the last of them saw the tokens of the others.
    """
    sampled: Counter[tuple] = Counter()
    for seen, generation in engine.requests:
        whole = np.concatenate([seen, generation.output_ids]).astype(np.int32)
        sampled.update(_tokens(whole, range(len(seen), len(whole)), generation.logprobs, [generation.weight_version] * len(whole)))
    trained: Counter[tuple] = Counter()
    for sample in samples:
        at = np.flatnonzero(sample.loss_mask)
        places = (len(sample.prompt_ids) + at).tolist()
        trained.update(_tokens(sample.tokens.astype(np.int32), places, sample.engine_logprobs[at], sample.versions[at]))
    assert trained == sampled


def _tokens(ids: IntArray, places: Iterable[int], logprobs: Iterable[float], versions: Iterable[int]) -> Iterator[tuple]:
    """Yield tokens with what came before them, their log-probability and their version."""
    for at, logprob, version in zip(places, logprobs, versions):
        yield hash(ids[:at].tobytes()), int(ids[at]), float(logprob), int(version)
