"""Cost and effect of --exact-on-policy on a CPU: a rollout of the quickstart's model and a training pass, with and without the flag.

    python benchmarks/exact_on_policy.py                          # 256 answers of 48 tokens, one thread
    python benchmarks/exact_on_policy.py --model DIR --threads 2  # another Llama, Qwen2 or Qwen3

Times are CPU seconds of this process, which other processes disturb least. The last column is the largest difference of a token's
log-probability between engine and trainer.
"""

import argparse
import random
import time
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from fuligo.cli.quickstart import ASSETS
from fuligo.engines.embedded.kv_cache import KVCache
from fuligo.engines.embedded.model import EngineModel
from fuligo.engines.embedded.request import Request
from fuligo.engines.embedded.scheduler import Scheduler
from fuligo.engines.generation import SamplingParams
from fuligo.trainer.batch import pack_tokens
from fuligo.trainer.torch_backend.model import Policy, load_model
from fuligo.types import TrainSample

PROMPT_TOKENS = 40
SAMPLES_PER_PROMPT = 8
TOKENS_PER_ROW = 8192
CPU = torch.device("cpu")


@dataclass(frozen=True, slots=True)
class Cost:
    """Measurement with or without --exact-on-policy."""

    sample_s: float
    train_s: float
    difference: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, default=ASSETS / "model")
    parser.add_argument("--answers", type=int, default=256)
    parser.add_argument("--answer-tokens", type=int, default=48)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    print("| | sampling, s | forward and backward, s | largest difference |\n|---|---|---|---|")
    for is_exact in (False, True):
        cost = measure(options.model, options.answers, options.answer_tokens, is_exact=is_exact)
        name = "exact" if is_exact else "ordinary"
        print(f"| {name} | {cost.sample_s:.2f} | {cost.train_s:.2f} | {cost.difference:.1e} |", flush=True)


def measure(model: Path, num_answers: int, answer_tokens: int, *, is_exact: bool) -> Cost:
    engine = EngineModel(str(model), CPU, torch.float32, is_batch_invariant=is_exact)
    policy = Policy(load_model(model), temperature=1.0, chunk_tokens=4096)
    if is_exact:
        policy.make_batch_invariant("cpu")
    started = time.process_time()
    samples = sample(engine, num_answers, answer_tokens)
    sampled = time.process_time()
    difference = max(train(policy, samples) for _ in range(2))
    return Cost(sampled - started, (time.process_time() - sampled) / 2, difference)


def sample(engine: EngineModel, num_answers: int, answer_tokens: int) -> list[TrainSample]:
    """Sample answers to random prompts, in groups of answers to one prompt."""
    scheduler = Scheduler(engine, KVCache(engine.cache_shape, 1 << 20, engine.dtype, engine.device), num_answers)
    rng = random.Random(0)
    prompts = [[rng.randrange(3, engine.vocab_size) for _ in range(PROMPT_TOKENS)] for _ in range(0, num_answers, SAMPLES_PER_PROMPT)]
    for index in range(num_answers):
        params = SamplingParams(answer_tokens)
        scheduler.enqueue(Request(str(index), prompts[index // SAMPLES_PER_PROMPT], params, frozenset(), seed=index, arrival=index))
    ended: list[Request] = []
    while len(ended) < num_answers:
        ended += scheduler.step()
    return [as_sample(index, request) for index, request in enumerate(ended)]


def as_sample(index: int, request: Request) -> TrainSample:
    length = len(request.output_ids)
    return TrainSample(
        index=index,
        group_index=index // SAMPLES_PER_PROMPT,
        tokens=np.array([*request.input_ids, *request.output_ids], np.int32),
        prompt_length=len(request.input_ids),
        loss_mask=np.ones(length, np.int8),
        reward=0.0,
        engine_logprobs=np.array(request.logprobs, np.float32),
        versions=np.zeros(length, np.int32),
        mask_sum=float(length),
    )


def train(policy: Policy, samples: list[TrainSample]) -> float:
    """Run forward and backward passes on all samples, packed; return the largest difference from the engine's log-probabilities."""
    num_per_row = max(1, TOKENS_PER_ROW // len(samples[0].tokens))
    largest = 0.0
    for start in range(0, len(samples), num_per_row):
        row = samples[start : start + num_per_row]
        logprobs = policy(pack_tokens(row, CPU)).logprobs
        logprobs.sum().backward()
        engine = torch.from_numpy(np.concatenate([each.engine_logprobs for each in row]))
        largest = max(largest, (logprobs.detach() - engine).abs().max().item())
    return largest


if __name__ == "__main__":
    main()
