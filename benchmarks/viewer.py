"""Performance of `fuligo view` on a long run: time and bytes of requests, indexing time, memory.

    python benchmarks/viewer.py [--steps 2000] [--samples 256] [--tokens 64]

The script writes a synthetic run (some minutes and gigabytes at full size), then serves it with `fuligo view` in its own process. A request
that costs nothing is timed as a baseline. CPU time of the server covers all its threads (Linux), and is also comparable on a busy machine.
"""

import argparse
import gzip
import json
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from fuligo.config import Config
from fuligo.observability.run_directory import RunDirectory
from fuligo.observability.samples import Training
from fuligo.types import Sample, SampleGroup, SampleStatus, Span, TokenScores, TrainSample

GROUP_SIZE = 8
NUM_PROMPTS = 4096
NUM_ENGINES = NUM_RANKS = 8
FIRST_VIEW = (
    "rollout/reward_mean,rollout/response_len_mean,rollout/truncated_ratio,rollout/zero_std_ratio,train/loss,train/entropy,train/kl,"
    "train/grad_norm,train/clip_fraction,train/logprob_abs_diff,perf/step_s,rollout/tokens_per_s,train/tokens_per_s,perf/idle_fraction"
)
REPEATS = 5
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def write_run(path: Path, num_steps: int, num_samples: int, num_tokens: int) -> None:
    run = RunDirectory.create(path, Config.model_validate({"data": {"num_rollout": num_steps}}), resume=False)
    rng = np.random.default_rng(1)
    for step in range(num_steps):
        groups = [_group(rng, step, at, num_samples // GROUP_SIZE, num_tokens) for at in range(num_samples // GROUP_SIZE)]
        run.write_samples(step, groups, _training(groups))
        run.trace.samples(step, [sample for group in groups for sample in group.samples])
        now_s = time.time()
        run.trace.ranks(step, [[Span(name, now_s, now_s) for name in ("score", "forward, backward", "optimizer")]] * NUM_RANKS)
        for name in ("rollout", "score", "train", "sync"):
            with run.trace.phase(name, step):
                pass
        values = {key: float(value) for key, value in zip(FIRST_VIEW.split(","), rng.random(14), strict=True)}
        others = {f"rollout/other_{key}": float(value) for key, value in enumerate(rng.random(30))}
        run.record({"step": step, "policy_version": step + 1, "time": time.time(), **values, **others, "rollout/num_tokens": 16384.0})
    run.close()


def _group(rng: np.random.Generator, step: int, at: int, per_step: int, num_tokens: int) -> SampleGroup:
    group = step * per_step + at
    prompt = f"Question {group % NUM_PROMPTS}: what is {group % NUM_PROMPTS} times {step % 7}? " + "Think about it step by step. " * 8
    samples = []
    for member in range(GROUP_SIZE):
        length = int(rng.integers(num_tokens // 2, num_tokens * 3 // 2))
        start = time.time()
        samples.append(
            Sample(
                index=group * GROUP_SIZE + member,
                group_index=group,
                prompt=prompt,
                prompt_ids=np.arange(64, dtype=np.int32),
                label="1",
                response_ids=rng.integers(0, 150_000, length).astype(np.int32),
                loss_mask=np.ones(length, np.int8),
                engine_logprobs=-rng.random(length, np.float32),
                versions=np.full(length, step, np.int32),
                status=SampleStatus.TRUNCATED if length > num_tokens * 1.45 else SampleStatus.COMPLETED,
                reward=float(rng.random() < 0.5),
                response=f"answer {rng.integers(0, 10**9)} " * (length // 8),
                spans=[
                    Span("generate", start, start + length / 100, engine=group % NUM_ENGINES, num_tokens=length),
                    Span("reward", start + length / 100, start + length / 99),
                ],
            )
        )
    return SampleGroup(group, group, samples)


def _training(groups: list[SampleGroup]) -> Training:
    samples = [sample for group in groups for sample in group.samples]
    trained = [
        TrainSample(
            index=sample.index,
            group_index=sample.group_index,
            tokens=sample.tokens,
            prompt_length=len(sample.prompt_ids),
            loss_mask=sample.loss_mask,
            reward=sample.reward_value(),
            engine_logprobs=sample.engine_logprobs,
            versions=sample.versions,
            mask_sum=1.0,
            advantages=np.full(len(sample.response_ids), sample.reward_value() - 0.5, np.float32),
        )
        for sample in samples
    ]
    scores = {at: TokenScores(sample.engine_logprobs - 0.01, -sample.engine_logprobs) for at, sample in enumerate(samples)}
    return Training(trained, scores)


@contextmanager
def served(path: Path) -> Iterator[tuple[str, int]]:
    """Start a server; yield its address and process id."""
    command = [sys.executable, "-m", "fuligo", "view", str(path), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        found = re.search(r"http://\S+", process.stdout.readline())
        assert found is not None
        try:
            yield found[0], process.pid
        finally:
            process.terminate()


def asked(address: str, path: str) -> tuple[float, int, bytes]:
    """Send a request; return its seconds, the (compressed) bytes received, and the answer."""
    request = urllib.request.Request(address + path, headers={"Accept-Encoding": "gzip"})
    begin_s = time.perf_counter()
    with _OPENER.open(request, timeout=60) as answer:
        data = answer.read()
        packed = answer.headers.get("Content-Encoding") == "gzip"
    elapsed_s = time.perf_counter() - begin_s
    return elapsed_s, len(data), gzip.decompress(data) if packed else data


def processor_s(pid: int) -> float:
    """Return the CPU seconds that the process has used so far."""
    tasks = [file.read_text() for file in Path(f"/proc/{pid}/task").glob("*/schedstat")]
    return sum(int(task.split()[0]) for task in tasks) / 1e9


def show(pid: int, what: str, address: str, *paths: str) -> None:
    """Send the requests several times; print the first and the median time, CPU time of the server, and the bytes received."""
    runs = []
    for _ in range(REPEATS):
        before_s = processor_s(pid)
        answers = [asked(address, path) for path in paths]
        runs.append((sum(answer[0] for answer in answers), processor_s(pid) - before_s, sum(answer[1] for answer in answers)))
    first_s, first_processor_s, num_bytes = runs[0]
    median_s, median_processor_s = (sorted(run[at] for run in runs)[REPEATS // 2] for at in range(2))
    print(
        f"{what:44} {1000 * first_s:8.1f} ms at first {1000 * median_s:8.1f} ms then; CPU {1000 * first_processor_s:8.1f} and "
        f"{1000 * median_processor_s:6.1f} ms; {num_bytes / 1024:9.1f} KiB",
        flush=True,
    )


def memory_mib(pid: int) -> float:
    text = Path(f"/proc/{pid}/status").read_text()
    return int(re.search(r"VmRSS:\s+(\d+)", text)[1]) / 1024


def measure(path: Path, num_steps: int) -> None:
    begin_s = time.perf_counter()
    with served(path) as (address, pid):
        print(f"{'start of the server':44} {1000 * (time.perf_counter() - begin_s):8.1f} ms, {memory_mib(pid):.0f} MiB")
        name = path.name
        show(pid, "a request that costs nothing", address, f"api/differences?run={name}")
        show(pid, "first view: page, runs, 14 curves", address, "", "api/runs", f"api/metrics?run={name}&keys={FIRST_VIEW}")
        show(pid, "samples while the index is built", address, f"api/samples?run={name}&limit=40")
        show(pid, "one sample by its link", address, f"api/sample?run={name}&step=3&row=100")
        while (known := json.loads(asked(address, "api/runs")[2])["runs"][0])["indexed"][0] < num_steps or known["trace_read"] < 1:
            time.sleep(0.2)
        known_s = time.perf_counter() - begin_s
        what = "all samples and the trace known after"
        print(f"{what:44} {known_s:8.1f} s, CPU {processor_s(pid):.1f} s, {memory_mib(pid):.0f} MiB, {known['num_samples']} samples")
        show(pid, "filter: reward, status", address, f"api/samples?run={name}&limit=40&reward_min=1&status=truncated")
        show(pid, "filter: one engine", address, f"api/samples?run={name}&limit=40&engine=3")
        show(pid, "order: longest of all", address, f"api/samples?run={name}&limit=40&order=-length")
        show(pid, "far down the list", address, f"api/samples?run={name}&limit=40&offset=400000")
        show(pid, "text: one answer of the search", address, f"api/samples?run={name}&limit=40&text=answer+77")
        show(pid, "same prompt over time", address, f"api/history?run={name}&prompt={_prompt(address, name)}")
        show(pid, "seconds of every step", address, f"api/steps?run={name}")
        show(pid, "one step's timeline", address, f"api/step?run={name}&step={num_steps // 2}")
        show(pid, "health", address, f"api/health?run={name}")
        show(
            pid,
            "poll for updates, every second",
            address,
            "api/runs",
            f"api/metrics?run={name}&keys={FIRST_VIEW}&after={num_steps}&generation=0",
        )
        print(f"{'memory at the end':44} {memory_mib(pid):8.0f} MiB")


def _prompt(address: str, name: str) -> str:
    return json.loads(asked(address, f"api/samples?run={name}&limit=1")[2])["rows"][0]["prompt_key"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else None)
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--samples", type=int, default=256, help="samples per step")
    parser.add_argument("--tokens", type=int, default=64, help="mean response length in tokens")
    parser.add_argument("--run", type=Path, help="directory of the run, which is reused if it exists (default: a temporary one)")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        path = options.run or Path(scratch) / "run"
        if not path.exists():
            write_run(path, options.steps, options.samples, options.tokens)
        size = sum(file.stat().st_size for file in path.rglob("*") if file.is_file())
        print(f"{options.steps} steps x {options.samples} samples x {options.tokens} tokens: {size / 1e6:,.0f} MB on disk")
        measure(path, options.steps)


if __name__ == "__main__":
    main()
