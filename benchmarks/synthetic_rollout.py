"""Rollouts of a fixed size for benchmarks: the real runner, sampler and client with prompts in memory and a reward that costs nothing."""

from collections.abc import Sequence
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from fuligo.config.groups import RolloutFlags
from fuligo.engines.generation import SamplingParams
from fuligo.engines.group import EngineGroup
from fuligo.rollout.generate import SingleTurn
from fuligo.rollout.protocol import GenerateFn, Rollout
from fuligo.rollout.runner import RolloutRunner, RunnerParts
from fuligo.rollout.sampler import Sampler, Turns
from fuligo.rollout.source import GroupSource
from fuligo.types import IntArray, Prompt, SampleGroup

ASSETS = Path(__file__).parents[1] / "fuligo" / "quickstart" / "assets"
TIMEOUT_S = 600.0


class Prompts:
    """Prompt stream (`rollout.protocol.PromptStream`) with the same prompts for every rollout."""

    def __init__(self, prompt_ids: Sequence[IntArray]) -> None:
        self._prompt_ids = prompt_ids

    def take(self, num_prompts: int, /) -> list[Prompt]:
        assert num_prompts <= len(self._prompt_ids)
        return [Prompt(row, "", ids) for row, ids in enumerate(self._prompt_ids[:num_prompts])]

    def give_back(self, prompts: list[Prompt], /) -> None:
        pass

    def state(self) -> dict[str, int | list[int]]:
        return {}

    def restore(self, state: dict[str, int | list[int]], /) -> None:
        pass


async def reward(group: SampleGroup) -> None:
    for sample in group.samples:
        sample.reward = float(sample.index % 2)


def build_runner(
    engines: EngineGroup,
    tokenizer: PreTrainedTokenizerBase,
    prompt_ids: Sequence[IntArray],
    *,
    samples_per_prompt: int,
    num_tokens: int,
    concurrency: int | None = None,
    ignore_eos: bool = True,
    generate: GenerateFn | None = None,
) -> RolloutRunner:
    """Build a runner that samples `samples_per_prompt` responses of `num_tokens` tokens per prompt, by default all at once, in one turn."""
    num_requests = concurrency or len(prompt_ids) * samples_per_prompt
    flags = RolloutFlags(
        rollout_batch_size=len(prompt_ids),
        n_samples_per_prompt=samples_per_prompt,
        rollout_max_response_len=num_tokens,
    )
    sampler = Sampler(
        generate or SingleTurn(engines, tokenizer, timeout_s=TIMEOUT_S),
        seed=0,
        stream="train",
        turns=Turns(num_requests),
        timeout_s=TIMEOUT_S,
    )
    parts = RunnerParts(
        source=GroupSource(Prompts(prompt_ids), samples_per_prompt),
        sampler=sampler,
        reward=reward,
        engines=engines,
        params=SamplingParams(num_tokens, ignore_eos=ignore_eos),
        flags=flags,
        concurrency=num_requests,
    )
    return RolloutRunner(parts)


def check_complete(rollout: Rollout, *, num_requests: int, num_tokens: int) -> None:
    """Check the samples of a rollout.

    Raises:
        RuntimeError: a request failed, or returned another number of tokens.
    """
    samples = [sample for group in rollout.groups for sample in group.samples]
    wrong = [sample for sample in samples if sample.error is not None or sample.response_length != num_tokens]
    if wrong or len(samples) != num_requests:
        raise RuntimeError(f"{len(samples)} of {num_requests} samples, {len(wrong)} of them wrong: {wrong[0].error if wrong else ''}")
