"""Speed and exactness of shared prefixes: the same optimizer step with samples laid end to end ("plain") and as trees ("shared").

    python benchmarks/shared_prefixes.py                          # all cases: Qwen3-4B's shape on CUDA, a tiny model on a CPU
    python benchmarks/shared_prefixes.py group --compile          # one case, layers compiled
    python benchmarks/shared_prefixes.py group --backend megatron # with the Megatron trainer, whose layers differ with sharing
    python benchmarks/shared_prefixes.py --kernels                # the attention of one layer alone, by kernel (CUDA)
    python benchmarks/shared_prefixes.py --cpu-seconds            # small cases on a CPU, in CPU seconds of one thread

Weights are random and written to memory (`benchmarks/training.py`); nothing is downloaded. Tokens/s count every token of every sample in
both layouts, so that their ratio is the ratio of the times. The last columns compare log-probabilities (which differ by rounding: of
float32 on a CPU, of bfloat16 on CUDA) and gradient norms of the two.
"""

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
import torch.distributed as dist
from flex_attention import block_mask, flex_tree_attention
from training import DEVICE, GIB, case_config, model_directory, save_model, timed
from training_cases import Case

from fuligo.job.trainer_settings import trainer_settings
from fuligo.models.attention import varlen_attention, varlen_row
from fuligo.models.tree_attention import tree_row, varlen_tree_attention
from fuligo.trainer.batch import pack_tokens
from fuligo.trainer.ranks.world import World, join_world
from fuligo.trainer.shared_prefixes import find_shared_prefixes
from fuligo.trainer.shares import ScoreShare, StepShare, score_shares, step_shares
from fuligo.trainer.torch_backend.worker import TorchRankWorker
from fuligo.types import TrainBatch, TrainSample

WorkerT = TypeVar("WorkerT")

VOCAB_SIZE = 512


@dataclass(frozen=True, slots=True)
class Trees:
    """Trees of samples, all of one shape."""

    num_trees: int
    prompt: int
    """Tokens of the prompt."""
    num_branches: int
    """Answers to the prompt, or episodes from it."""
    turn: int
    """Tokens of an answer, or of each turn of an episode."""
    num_turns: int = 1
    """Turns of an episode; each is a sample that begins with all before it."""

    def samples(self, rng: np.random.Generator) -> list[TrainSample]:
        found: list[TrainSample] = []
        for tree in range(self.num_trees):
            prompt = rng.integers(3, VOCAB_SIZE, self.prompt)
            for _ in range(self.num_branches):
                tokens = prompt
                for _ in range(self.num_turns):
                    tokens = np.concatenate([tokens, rng.integers(3, VOCAB_SIZE, self.turn)])
                    found.append(self._sample(len(found), tree, tokens.astype(np.int32), rng))
        return found

    def _sample(self, index: int, tree: int, tokens: np.ndarray, rng: np.random.Generator) -> TrainSample:
        return TrainSample(
            index=index,
            group_index=tree,
            tokens=tokens,
            prompt_length=len(tokens) - self.turn,
            loss_mask=np.ones(self.turn, np.int8),
            reward=1.0,
            engine_logprobs=np.full(self.turn, -11.9, np.float32),
            versions=np.zeros(self.turn, np.int32),
            mask_sum=float(self.turn),
            advantages=rng.standard_normal(self.turn).astype(np.float32),
        )


CASES = {
    "group": Trees(num_trees=4, prompt=1024, num_branches=16, turn=512),
    "agents": Trees(num_trees=2, prompt=1024, num_branches=4, turn=256, num_turns=8),
    "short": Trees(num_trees=16, prompt=105, num_branches=16, turn=300),
}


SMALL_CASES = [
    (24, 8, 24),
    (64, 8, 64),
    (64, 8, 16),
    (105, 16, 7),
    (105, 16, 300),
    (256, 8, 64),
    (256, 8, 256),
    (512, 8, 64),
    (512, 4, 512),
]
"""Small cases: tokens of the prompt, number of answers, tokens of an answer."""
SMALL_TOKENS = 16384
"""Tokens of all samples of a small case."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", metavar="CASE", help=f"cases to measure, of {', '.join(CASES)} (default: all)")
    parser.add_argument("--model", default="qwen3-4b" if DEVICE == "cuda" else "tiny-dense", help="shape, a key of training_cases.MODELS")
    parser.add_argument("--num-layers", type=int, help="layers of the model (default: as published)")
    parser.add_argument("--max-tokens", type=int, default=12288, help="tokens of a row")
    parser.add_argument("--trees", type=int, help="trees of each case")
    parser.add_argument("--steps", type=int, default=3, help="timed optimizer steps, after two warm-ups")
    parser.add_argument("--compile", action="store_true", help="compile the layers, as runs do")
    parser.add_argument("--backend", choices=["torch", "megatron"], default="torch", help="trainer")
    parser.add_argument("--way", choices=["off", "on"], help=argparse.SUPPRESS)
    parser.add_argument("--kernels", action="store_true", help="measure attention alone")
    parser.add_argument(
        "--cpu-seconds", action="store_true", help="measure small cases in CPU seconds, which other processes disturb least"
    )
    options = parser.parse_args()
    if options.cpu_seconds:
        case = Case("tiny-dense", max_tokens=8192, flags=(), backend="torch")
        measure_cpu_seconds(build_worker(case, TorchRankWorker), options.steps)
        return
    names = options.cases or [*CASES]
    cases = {name: replace(CASES[name], num_trees=options.trees or CASES[name].num_trees) for name in names}
    print(f"torch {torch.__version__}, {torch.cuda.get_device_name() if DEVICE == 'cuda' else 'CPU'}, {options.model}", flush=True)
    if options.kernels:
        measure_kernels(cases)
        return
    if options.backend == "megatron":
        measure_megatron(cases, options)
        return
    flags = ("--precision", "bf16", *([] if options.compile else ["--no-torch-compile"])) if DEVICE == "cuda" else ()
    case = Case(options.model, num_layers=options.num_layers, max_tokens=options.max_tokens, flags=flags, backend="torch")
    worker = build_worker(case, TorchRankWorker)
    titles = ["case", "tokens", "saved", "rows", "tokens/s plain", "shared", "x", "scoring plain", "shared", "x", "GiB plain", "shared"]
    print_row([*titles, "max, mean difference of log p", "gradient norms"])
    print_row(["---"] * (len(titles) + 2))
    for name, trees in cases.items():
        measure(name, trees, worker, options.steps)
    if dist.is_initialized():
        dist.destroy_process_group()


def build_worker(case: Case, kind: Callable[[Any, World], WorkerT]) -> WorkerT:
    """Build the only rank of a case's trainer; it has the case's weights on the CPU or on one GPU."""
    save_model(case)
    settings = trainer_settings(case_config(case, []), DEVICE, initial_weights=model_directory(case), num_rollout=10)
    world = World()
    if settings.needs_process_group:
        store = dist.TCPStore("127.0.0.1", 0, world_size=1, is_master=True)
        world = join_world(0, 1, DEVICE, store=store, key=None, timeout_s=600.0)
    return kind(settings, world)


def measure_megatron(cases: dict[str, Trees], options: argparse.Namespace) -> None:
    """Print the times of the Megatron trainer, with and without sharing in separate processes, because the layers differ."""
    if options.way is not None:
        measure_megatron_way(cases, options)
        return
    titles = ["case", "tokens", "rows", "tokens/s plain", "shared", "x", "scoring plain", "shared", "x", "GiB plain", "shared"]
    print_row(titles)
    print_row(["---"] * len(titles))
    for name in cases:
        given = [word for word in sys.argv[1:] if word not in cases]
        ways: list[dict[str, Any]] = []
        for way in ("off", "on"):
            done = subprocess.run([sys.executable, __file__, name, *given, "--way", way], stdout=subprocess.PIPE, text=True, check=True)
            ways.append(json.loads(done.stdout.splitlines()[-1]))
        (today, shared), num_tokens = ways, ways[0]["tokens"]
        print_row(
            [
                *(name, f"{num_tokens:,}", f"{today['rows']} -> {shared['rows']}"),
                *(f"{num_tokens / today['train_s']:,.0f}", f"{num_tokens / shared['train_s']:,.0f}"),
                f"{today['train_s'] / shared['train_s']:.2f}",
                *(f"{num_tokens / today['score_s']:,.0f}", f"{num_tokens / shared['score_s']:,.0f}"),
                f"{today['score_s'] / shared['score_s']:.2f}",
                *(f"{way['peak_bytes'] / GIB:.1f}" for way in ways),
            ]
        )


def measure_megatron_way(cases: dict[str, Trees], options: argparse.Namespace) -> None:
    """Print the times of whole optimizer steps and of scoring as JSON."""
    from fuligo.trainer.megatron_backend.worker import MegatronRankWorker

    (trees,) = cases.values()
    flags = ("--share-prefixes", options.way)
    case = Case(options.model, num_layers=options.num_layers, max_tokens=options.max_tokens, flags=flags, backend="megatron")
    worker = build_worker(case, MegatronRankWorker)
    samples = trees.samples(np.random.default_rng(0))
    batch = TrainBatch(samples, [list(range(len(samples)))], [len(samples)])
    (to_score,), (to_train,) = score_shares(samples, worker.settings, None), step_shares(batch, worker.settings, None)
    for _ in range(2):
        worker.train(to_train)
        worker.logprobs(to_score)
    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()
    found = {
        "tokens": sum(len(sample.tokens) - 1 for sample in samples),
        "rows": len(to_train[0].schedule.plans),
        "train_s": min(timed(lambda: worker.train(to_train))[0] for _ in range(options.steps)),
        "score_s": min(timed(lambda: worker.logprobs(to_score))[0] for _ in range(options.steps)),
        "peak_bytes": torch.cuda.max_memory_allocated() if DEVICE == "cuda" else 0,
    }
    print(json.dumps(found))
    worker.close()
    dist.destroy_process_group()


def measure_cpu_seconds(worker: TorchRankWorker, num_steps: int) -> None:
    """Print the CPU seconds of training and scoring for small cases, without sharing and with it."""
    torch.set_num_threads(1)
    print_row(["samples", "saved", "training", "shared", "x", "scoring", "shared", "x"])
    print_row(["---"] * 8)
    for prompt, num_answers, answer in SMALL_CASES:
        trees = Trees(max(1, SMALL_TOKENS // (num_answers * (prompt + answer))), prompt, num_answers, answer)
        samples = trees.samples(np.random.default_rng(0))
        batch = TrainBatch(samples, [list(range(len(samples)))], [len(samples)])
        seconds: list[float] = []
        shared = 0
        for shares_prefixes in (False, True):
            settings = replace(worker.settings, shares_prefixes=shares_prefixes)
            (to_score,), (to_train,) = score_shares(samples, settings, None), step_shares(batch, settings, None)
            shared = sum(sum(plan.shared) for plan in to_score.schedule.plans)
            seconds.append(cpu_seconds(partial(gradients, worker, to_train[0]), num_steps))
            seconds.append(cpu_seconds(partial(worker.logprobs, to_score), num_steps))
        train, score, shared_train, shared_score = seconds
        times = [f"{train:.2f}", f"{shared_train:.2f}", f"{train / shared_train:.2f}"]
        times += [f"{score:.2f}", f"{shared_score:.2f}", f"{score / shared_score:.2f}"]
        saved = shared / sum(len(sample.tokens) - 1 for sample in samples)
        print_row([f"{num_answers} x {answer} to {prompt}", f"{saved:.0%}", *times])


def gradients(worker: TorchRankWorker, share: StepShare) -> None:
    worker.gradients(share)
    worker._learner.optimizer.zero_grad()


def cpu_seconds(call: Callable[[], object], num_steps: int) -> float:
    """Return the least CPU seconds of a call, after a warm-up."""
    call()
    found: list[float] = []
    for _ in range(num_steps):
        started = time.process_time()
        call()
        found.append(time.process_time() - started)
    return min(found)


@dataclass(frozen=True, slots=True)
class Measured:
    """One way to compute a step."""

    rows: int
    train_s: float
    score_s: float
    peak_bytes: int
    logprobs: np.ndarray
    grad_norm: float


def measure(name: str, trees: Trees, worker: TorchRankWorker, num_steps: int) -> None:
    samples = trees.samples(np.random.default_rng(0))
    batch = TrainBatch(samples, [list(range(len(samples)))], [len(samples)])
    num_tokens = sum(len(sample.tokens) - 1 for sample in samples)
    ways: list[Measured] = []
    for shares_prefixes in (False, True):
        settings = replace(worker.settings, shares_prefixes=shares_prefixes)
        (to_score,), (to_train,) = score_shares(samples, settings, None), step_shares(batch, settings, None)
        ways.append(measure_way(worker, to_score, to_train, num_steps))
    today, shared = ways
    row_tokens = sum(
        pack_tokens([to_score.samples[i] for i in plan.samples], torch.device("cpu"), shared=plan.shared).num_tokens
        for plan in to_score.schedule.plans
    )
    difference = np.abs(today.logprobs - shared.logprobs)
    print_row(
        [
            *(name, f"{num_tokens:,}", f"{1 - row_tokens / num_tokens:.0%}", f"{today.rows} -> {shared.rows}"),
            *(f"{num_tokens / today.train_s:,.0f}", f"{num_tokens / shared.train_s:,.0f}", f"{today.train_s / shared.train_s:.2f}"),
            *(f"{num_tokens / today.score_s:,.0f}", f"{num_tokens / shared.score_s:,.0f}", f"{today.score_s / shared.score_s:.2f}"),
            *(f"{way.peak_bytes / GIB:.1f}" for way in ways),
            f"{difference.max():.1e}, {difference.mean():.1e}",
            f"{today.grad_norm:.6g}, {shared.grad_norm:.6g}",
        ]
    )


def measure_way(worker: TorchRankWorker, to_score: ScoreShare, to_train: list[StepShare], num_steps: int) -> Measured:
    """Measure without changing the weights: gradients are computed and dropped, so that both layouts compute the same step."""

    def step() -> float:
        worker.gradients(to_train[0])
        grads = [parameter.grad for parameter in worker.policy.model.parameters() if parameter.grad is not None]
        norm = torch.nn.utils.get_total_norm(grads)
        worker._learner.optimizer.zero_grad()
        return float(norm.full_tensor() if hasattr(norm, "full_tensor") else norm)

    if DEVICE == "cuda":
        torch.cuda.reset_peak_memory_stats()
    grad_norm = [step() for _ in range(2)][-1]
    train_s = min(timed(step)[0] for _ in range(num_steps))
    peak = torch.cuda.max_memory_allocated() if DEVICE == "cuda" else 0
    worker.logprobs(to_score)
    score_s, logprobs = min((timed(lambda: worker.logprobs(to_score)) for _ in range(num_steps)), key=lambda each: each[0])
    return Measured(len(to_train[0].schedule.plans), train_s, score_s, peak, np.concatenate(logprobs or []), grad_norm)


def measure_kernels(cases: dict[str, Trees]) -> None:
    """Print the milliseconds of one layer's attention on one tree, forward and backward, with Qwen3-4B's heads."""
    print_row(["case", "plain", "varlen", "flex", "mask of flex"])
    print_row(["---"] * 5)
    for name, trees in cases.items():
        samples = replace(trees, num_trees=1).samples(np.random.default_rng(0))
        print_row([name, *(f"{ms:.2f}" for ms in kernels_of_tree(samples, torch.device("cuda")))])


def kernels_of_tree(samples: list[TrainSample], device: torch.device) -> list[float]:
    found = find_shared_prefixes([sample.tokens[:-1] for sample in samples])
    ordered = [samples[i] for i in found.order]
    plain, shared = pack_tokens(ordered, device), pack_tokens(ordered, device, shared=found.shared)
    tree, scale = shared.tree, 128**-0.5
    assert tree is not None
    sequences, row = varlen_row(plain.cu_seqlens, device), tree_row(tree, device)
    mask = block_mask(tree, device)
    return [
        kernel_ms(plain.num_tokens, lambda q, k, v: varlen_attention(q, k, v, sequences, scale=scale)),
        kernel_ms(shared.num_tokens, lambda q, k, v: varlen_tree_attention(q, k, v, row, scale=scale)),
        kernel_ms(shared.num_tokens, lambda q, k, v: flex_tree_attention(q, k, v, mask, scale=scale)),
        1e3 * min(timed(lambda: block_mask(tree, device))[0] for _ in range(3)),
    ]


def kernel_ms(num_tokens: int, attend: Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]) -> float:
    shapes = [(num_tokens, heads, 128) for heads in (32, 8, 8)]
    q, k, v = (torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True) for shape in shapes)
    upstream = torch.randn(num_tokens, 32, 128, device="cuda", dtype=torch.bfloat16)

    def step() -> None:
        torch.autograd.grad(attend(q, k, v), (q, k, v), upstream)

    for _ in range(3):
        step()
    return 1e3 * min(timed(step)[0] for _ in range(10))


def print_row(cells: list[str]) -> None:
    print(f"| {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
