"""Comparison of fuligo, TRL, verl and SkyRL on the same reinforcement learning: speed, memory, and seconds to a reward.

    python examples/fetch_model.py smollm2 models/smollm2
    python benchmarks/race.py                                              # one GPU: fuligo and TRL with `generate`
    python benchmarks/race.py fuligo trl-vllm verl-sglang --python trl-vllm=.venv-trl/bin/python --python verl-sglang=.venv-verl/bin/python
    python benchmarks/race.py fuligo-lora trl-generate-lora                # LoRA: rank 16, ten times the learning rate
    python benchmarks/race.py --small                                      # the same in a few minutes on a CPU

Every competitor gets the same model, questions (those of examples/smollm2), prompts and answers per step, length limit, precision
(bfloat16 with float32 master weights on a GPU, float32 on a CPU), loss and learning rate, one optimizer step per batch, in which every
sample is trained (fuligo: --no-skip-zero-advantages), and otherwise its defaults. Each runs from its command line in its own environment
(`--python`), one after the other; `race_competitors.py` has the commands. FULIGO_RACE_FLAGS, VERL_RACE_FLAGS and SKYRL_RACE_FLAGS add
flags to the commands of fuligo, verl and SkyRL, for machines whose engines lack the kernels of their defaults. verl and SkyRL also get the
settings that their documentation recommends for speed, see `verl_trainer`, `verl_engine`, `skyrl_trainer` and `skyrl_engine`. This script
records when each step appears in the competitor's own log. `race_work.py` computes the rewards, without any package.

Per competitor: seconds from the command to the end of the first step; median seconds, samples and sampled tokens per second of the
steps after the first two; peak of the GPUs' memory (nvidia-smi); seconds from the command to the first step with a mean reward of at
least --target.
"""

import argparse
import json
import os
import signal
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from race_competitors import COMPETITORS, Competitor
from race_work import Work

HERE = Path(__file__).resolve().parent
REPOSITORY = HERE.parent
MARK = "RACE_COMPETITOR"
"""Environment variable of all processes of a competitor; its value is the competitor's directory."""
NUM_WARM_UP = 2
POLL_S = 0.1
MEMORY_POLL_S = 1.0


@dataclass
class Step:
    end: float
    """Seconds after the command was started."""
    reward: float
    tokens: float


class GpuMemory:
    """Highest sum of used memory over the machine's GPUs (those of CUDA_VISIBLE_DEVICES), as nvidia-smi reports it; none without GPUs."""

    def __init__(self, on_gpu: bool) -> None:
        self.peak_bytes: int | None = 0 if on_gpu else None
        self._next_poll = 0.0

    def poll(self) -> None:
        if self.peak_bytes is None or time.monotonic() < self._next_poll:
            return
        self._next_poll = time.monotonic() + MEMORY_POLL_S
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        query = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits", *([f"--id={visible}"] if visible else [])]
        used = subprocess.run(query, check=True, capture_output=True, text=True).stdout.split()
        self.peak_bytes = max(self.peak_bytes, sum(map(int, used)) * 2**20)


def run(name: str, work: Work, directory: Path, python: str, limit_s: float, target: float) -> dict[str, float | None]:
    """Run one competitor to its end, or for at most `limit_s` seconds, and return its figures."""
    competitor = COMPETITORS[name]
    directory.mkdir(parents=True)
    command = competitor.command(work, directory, python)
    environment = {key: value.format(directory=directory) for key, value in competitor.environment.items()} | {MARK: str(directory)}
    memory = GpuMemory(work.device == "cuda")
    with (directory / "output.txt").open("w") as output:
        start = time.monotonic()
        process = subprocess.Popen(command, stdout=output, stderr=output, env={**os.environ, **environment}, start_new_session=True)
        steps: list[Step] = []
        try:
            while process.poll() is None and time.monotonic() - start < limit_s:
                collect(steps, directory / competitor.steps, competitor, work, start)
                memory.poll()
                time.sleep(POLL_S)
            collect(steps, directory / competitor.steps, competitor, work, start)
        finally:
            stop(process)
            end_remaining(str(directory))
    if process.returncode and time.monotonic() - start < limit_s:
        print(f"{name} ended with {process.returncode} after {len(steps)} steps; its output: {directory / 'output.txt'}", file=sys.stderr)
    return figures(steps, work, memory.peak_bytes, target)


def collect(steps: list[Step], file: Path, competitor: Competitor, work: Work, start: float) -> None:
    """Add the steps whose lines have appeared, with the current time."""
    if not file.exists():
        return
    text = file.read_text()
    for line in text[: text.rfind("\n") + 1].splitlines()[len(steps) :]:
        reward, tokens = competitor.read(json.loads(line), work)
        steps.append(Step(time.monotonic() - start, reward, tokens))


def stop(process: subprocess.Popen[bytes]) -> None:
    """End the process and its session, by SIGTERM first."""
    for how in (signal.SIGTERM, signal.SIGKILL):
        if process.poll() is None:
            os.killpg(process.pid, how)
            try:
                process.wait(timeout=30)
            except subprocess.TimeoutExpired:
                continue


def end_remaining(mark: str) -> None:
    """End the processes that the competitor left in other sessions, such as Ray's, found by the mark in their environment (Linux only)."""
    for entry in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"{MARK}={mark}".encode() in entry.read_bytes().split(b"\0"):
                os.kill(int(entry.parent.name), signal.SIGKILL)
        except OSError:
            continue  # the process has ended, or belongs to another user


def figures(steps: list[Step], work: Work, peak_bytes: int | None, target: float) -> dict[str, float | None]:
    timed = list(pairwise(steps[NUM_WARM_UP - 1 :]))
    seconds = statistics.median(after.end - before.end for before, after in timed) if timed else None
    tokens = statistics.median(after.tokens / (after.end - before.end) for before, after in timed) if timed else None
    reached = next((step.end for step in steps if step.reward >= target), None)
    return {
        "steps": len(steps),
        "first_step_s": steps[0].end if steps else None,
        "step_s": seconds,
        "samples_per_s": work.batch / seconds if seconds else None,
        "tokens_per_s": tokens,
        "peak_gib": peak_bytes / 2**30 if peak_bytes is not None else None,
        "first_reward": steps[0].reward if steps else None,
        "last_reward": steps[-1].reward if steps else None,
        "target_s": reached,
    }


def write_prompts(directory: Path) -> Path:
    """Write the questions of examples/smollm2, with the name of their instruction as the label; return the file."""
    subprocess.run(
        [sys.executable, str(REPOSITORY / "examples" / "smollm2" / "make_tasks.py"), str(directory)], check=True, stdout=subprocess.DEVNULL
    )
    rows = [json.loads(line) for line in (directory / "short-train.jsonl").read_text().splitlines()]
    prompts = directory / "prompts.jsonl"
    lines = ({"prompt": [{"role": "user", "content": row["prompt"]}], "label": row["metadata"]["instruction_id_list"][0]} for row in rows)
    prompts.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return prompts


def show(results: dict[str, dict[str, float | None]]) -> None:
    columns = list(next(iter(results.values())))
    print(" | ".join(["competitor", *columns]))
    for name, result in results.items():
        cells = ["-" if result[column] is None else f"{result[column]:.4g}" for column in columns]
        print(" | ".join([name, *cells]), flush=True)


def main() -> None:
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that the competitor also ends
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "competitors", nargs="*", default=["fuligo", "trl-generate"], metavar="COMPETITOR", help=f"any of {', '.join(COMPETITORS)}"
    )
    parser.add_argument(
        "--python", action="append", default=[], metavar="NAME=PATH", help="interpreter of a competitor (default: this one)"
    )
    parser.add_argument("--model", default="models/smollm2", help="directory, as examples/fetch_model.py writes it")
    parser.add_argument("--directory", type=Path, default=Path("runs/race"), help="new directory for everything that the competitors write")
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--num-gpus", type=int, default=1)
    parser.add_argument("--limit-s", type=float, default=1800.0, help="end a competitor after this time, and count the steps so far")
    parser.add_argument("--target", type=float, default=0.9, help="mean reward of a step to reach")
    parser.add_argument("--small", action="store_true", help="4 prompts x 4 answers of up to 32 tokens on the CPU")
    options = parser.parse_args()
    unknown = set(options.competitors) - set(COMPETITORS)
    if unknown:
        parser.error(f"unknown competitor {', '.join(sorted(unknown))}; choose from {', '.join(COMPETITORS)}")
    if options.directory.exists():
        parser.error(f"cannot use --directory {options.directory}: it exists already; give a new one")
    pythons = dict(entry.partition("=")[::2] for entry in options.python)
    if wrong := [f"{name}={python}" for name, python in pythons.items() if name not in COMPETITORS or not python]:
        parser.error(f"cannot use --python {wrong[0]}: give NAME=PATH with the name of a competitor")
    directory = options.directory.resolve()
    directory.mkdir(parents=True)
    sizes = (4, 4, 32, "cpu", 16) if options.small else (64, 16, 320, "cuda", 32)
    num_prompts, num_samples, max_tokens, device, micro_batch = sizes
    work = Work(
        model=str(Path(options.model).resolve()),
        prompts=str(write_prompts(directory)),
        num_prompts=num_prompts,
        num_samples=num_samples,
        max_prompt_tokens=256,
        max_tokens=max_tokens,
        num_steps=options.steps,
        lr=2e-5,
        device=device,
        num_gpus=options.num_gpus,
        micro_batch=micro_batch,
    )
    results = {}
    for name in options.competitors:
        results[name] = run(name, work, directory / name, pythons.get(name, sys.executable), options.limit_s, options.target)
        show({name: results[name]})
    (directory / "results.json").write_text(json.dumps(results, indent=1))
    show(results)


if __name__ == "__main__":
    main()
