"""CPU time that an environment adds to a turn, beyond that of the request to the engine.

    python benchmarks/episodes.py [--episodes 2000] [--concurrency 1000] [--turns 8] [--tokens 64] [--family qwen2_5] [--isolation none]

The engine answers at once, and the environment answers every turn with a user's message or a tool's result. Each turn is sampled, parsed,
answered, rendered by the chat template and recorded. Half of the turns call a tool. CPU time and memory are those of all processes
together; memory that processes share counts once. Memory growth is measured from one third of the episodes to the end, without the samples,
which are dropped when they are finished. `--profile` writes the profile of the run.
"""

import argparse
import asyncio
import cProfile
import os
import time
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np
from talking_environment import ADD, QUESTION, made_environments
from transformers import AutoTokenizer

from fuligo.cli.quickstart import ASSETS
from fuligo.data.template import ChatTemplate
from fuligo.engines.generation import Generation, SamplingParams
from fuligo.environments import AssistantTurn, ToolCall
from fuligo.environments.rendering import Renderer
from fuligo.limits import raise_open_files
from fuligo.rollout.episodes import Episodes, Limits
from fuligo.rollout.generate import SingleTurn
from fuligo.sandbox.processes import descendants
from fuligo.types import Sample, SampleStatus

CALL = ToolCall("add", {"a": 695, "b": 830}, "call00001")
ENDS = ("<|im_end|>", "<|eot_id|>", "<|endoftext|>", "<|user|>", "<|observation|>", "<｜end▁of▁sentence｜>")


class Instant:
    """Engine that answers at once, alternately with a text and with a tool call."""

    def __init__(self, answers: list[list[int]]) -> None:
        self.answers = [np.array(ids, np.int32) for ids in answers]
        self.number = 0

    async def generate(self, input_ids, params, **_: object) -> Generation:
        await asyncio.sleep(0)
        self.number += 1
        ids = self.answers[self.number % len(self.answers)]
        return Generation(ids, np.full(len(ids), -0.5, np.float32), "stop", 0, len(input_ids), 0, "", engine=0)


def pids() -> list[int]:
    """Return this process and its descendants."""
    return [os.getpid(), *(process.pid for process in descendants())]


def cpu_s() -> float:
    """Return the CPU time of all processes."""
    return sum(int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) for pid in pids()) / 1e9


def memory_mib() -> float:
    """Return the memory of all processes in MiB; memory that they share counts once."""
    lines = (line for pid in pids() for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines())
    return sum(int(line.split()[1]) for line in lines if line.startswith("Pss:")) / 2**10


async def run(episodes: Episodes, num: int, concurrency: int, max_tokens: int) -> None:
    free = asyncio.Semaphore(concurrency)

    async def one(number: int) -> None:
        async with free:
            sample = Sample(number, number, QUESTION, np.empty(0, np.int32))
            samples = await episodes(sample, SamplingParams(max_new_tokens=max_tokens, sampling_seed=number))
            assert samples[-1].status is SampleStatus.COMPLETED, samples[-1].error

    await asyncio.gather(*(one(number) for number in range(num)))


async def bare(single: SingleTurn, num: int, turns: int, text: list[int], max_tokens: int) -> None:
    """Send the same requests without an environment."""
    for number in range(num):
        sample = Sample(number, number, QUESTION, np.array(text, np.int32))
        for _ in range(turns):
            sample.status = SampleStatus.PENDING
            await single(sample, SamplingParams(max_new_tokens=max_tokens))


def written(tokenizer, template: ChatTemplate, message: dict[str, Any]) -> list[int]:
    """Return the token ids of an answer as the chat template writes it, including its end token."""
    question = [{"role": "user", "content": QUESTION}]
    answered = [*question, message, {"role": "user", "content": QUESTION}]
    rest = template.prompt(answered, [ADD.to_json()]).removeprefix(template.prompt(question, [ADD.to_json()]))
    ids = tokenizer(rest, add_special_tokens=False)["input_ids"]
    ends = set(tokenizer.convert_tokens_to_ids(list(ENDS)))
    return ids[: next(place for place, token in enumerate(ids) if token in ends) + 1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--episodes", type=int, default=2000)
    parser.add_argument("--concurrency", type=int, default=1000)
    parser.add_argument("--turns", type=int, default=8)
    parser.add_argument("--tokens", type=int, default=64, help="tokens of an answer")
    parser.add_argument("--family", default="qwen2_5", help="chat template, by its name in TRL")
    parser.add_argument("--isolation", choices=("process", "none"), default="process", help="--environment-isolation")
    parser.add_argument("--profile", type=Path)
    args = parser.parse_args()
    tokenizer = AutoTokenizer.from_pretrained(ASSETS / "model")
    tokenizer.add_special_tokens({"additional_special_tokens": list(ENDS)})
    source = (files("trl") / "chat_templates" / f"{args.family}.jinja").read_text(encoding="utf-8")
    template = ChatTemplate(tokenizer, {"chat_template": source})
    renderer = Renderer(tokenizer, template, frozenset(tokenizer.convert_tokens_to_ids(list(ENDS))))
    text = tokenizer("695 + 830 = 1525. " * args.tokens, add_special_tokens=False)["input_ids"][: args.tokens - 1]
    said = AssistantTurn(tokenizer.decode(text)).message()
    answers = [written(tokenizer, template, message) for message in (said, AssistantTurn("", tool_calls=(CALL,)).message())]
    single = SingleTurn(Instant(answers), tokenizer, timeout_s=60.0)
    limits = Limits(max_turns=args.turns, turn_timeout_s=600.0, episode_timeout_s=6000.0, max_context_len=None)
    raise_open_files()
    factory = made_environments("Talk", {}, args.isolation)
    episodes = Episodes(single, factory, renderer, tokenizer, limits=limits)
    max_tokens = 100 * args.turns * args.tokens
    asyncio.run(run(episodes, args.concurrency, args.concurrency, max_tokens))
    first = args.episodes // 3
    start_s, profile = cpu_s(), cProfile.Profile()
    if args.profile:
        profile.enable()
    asyncio.run(run(episodes, first, args.concurrency, max_tokens))
    before_mib = memory_mib()
    asyncio.run(run(episodes, args.episodes - first, args.concurrency, max_tokens))
    if args.profile:
        profile.disable()
        profile.dump_stats(args.profile)
    whole_ms = 1000 * (cpu_s() - start_s) / (args.episodes * args.turns)
    growth_mib, own_mib = memory_mib() - before_mib, memory_mib()
    num = len(pids())
    asyncio.run(episodes.close())
    start_s = time.process_time()
    asyncio.run(bare(single, args.episodes, args.turns, text, max_tokens))
    bare_ms = 1000 * (time.process_time() - start_s) / (args.episodes * args.turns)
    print(f"{whole_ms:.3f} CPU ms per turn, {bare_ms:.3f} of them for the requests alone; {whole_ms - bare_ms:.3f} for the environment")
    print(f"memory grew by {growth_mib:.1f} MiB over the last {args.episodes - first} episodes, to {own_mib:,.0f} MiB in {num} processes")


if __name__ == "__main__":
    main()
