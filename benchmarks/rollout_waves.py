"""Tokens per second of whole rollouts with many requests, compared with SGLang's offline engine with the same requests.

    python benchmarks/rollout_waves.py --engine-python python3 --device cuda --model MODEL --questions gsm8k/train.jsonl \
        --waves 64x16:1024 128x16:1024 --tokens 320 --offline

Each wave `PROMPTSxSAMPLES:CONCURRENCY` is a rollout of the real runner through sglang-router with at most CONCURRENCY requests in flight;
responses end at the model's end token or after `--tokens`. The cache is flushed before every rollout; the first of each wave is the
warm-up. With `--questions` the prompts are the file's questions in the model's chat template, else random token ids. `--offline` runs
the requests of the first wave in one call of `sglang.Engine` before the rollouts, without and with log-probabilities.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from synthetic_rollout import ASSETS, TIMEOUT_S, build_runner
from transformers import AutoTokenizer, PreTrainedTokenizerBase

from fuligo.config.secret import Environment
from fuligo.engines.host import PortClaims
from fuligo.engines.sglang.fleet import Fleet, FleetSettings
from fuligo.engines.sglang.router import RouterSettings
from fuligo.engines.sglang.server import CPU_ARGUMENTS, CPU_ENVIRONMENT, OWN_ARGUMENTS, ServerPorts, ServerSettings
from fuligo.types import IntArray

TORCHVISION_STUB = Path(__file__).parents[1] / "tests" / "sglang" / "stubs"
"""Stub of torchvision, which SGLang imports; the published one does not load with a CPU build of torch."""
HOST = "127.0.0.1"


@dataclass(frozen=True, slots=True)
class Wave:
    """Sizes of a rollout: `num_prompts` x `num_samples` requests, at most `concurrency` of them in flight."""

    num_prompts: int
    num_samples: int
    concurrency: int

    @classmethod
    def parse(cls, text: str) -> Wave:
        size, _, concurrency = text.partition(":")
        prompts, _, samples = size.partition("x")
        return cls(int(prompts), int(samples), int(concurrency or int(prompts) * int(samples)))


def variables(args: argparse.Namespace) -> dict[str, str]:
    # SGLang pins the memory of adapters, which needs a GPU.
    plain_memory = {"FULIGO_TEST_PLAIN_MEMORY": "1"} if getattr(args, "lora_rank", None) else {}
    return {"PYTHONPATH": str(TORCHVISION_STUB), **plain_memory} if args.device == "cpu" else {}


@asynccontextmanager
async def fleet(args: argparse.Namespace, *, tp: int = 1) -> AsyncIterator[Fleet]:
    """Start `args.engines` engines on `tp` GPUs each, and a router; stop them at the end of the block."""
    with PortClaims() as claims:
        servers = tuple(
            ServerSettings(
                name=f"engine {number}",
                model_path=args.model,
                tp_size=tp,
                pp_size=1,
                arguments=args.sglang,
                worker_type="regular",
                device=args.device,
                host=HOST,
                ports=ServerPorts.claim(claims),
                log_file=args.logs / f"engine-{number}.txt",
                gpu_ids=tuple(range(args.gpu + number * tp, args.gpu + (number + 1) * tp)) if args.device == "cuda" else (),
                python=args.engine_python,
                environment=Environment(variables(args)),
            )
            for number in range(args.engines)
        )
        router = RouterSettings(
            args.logs / "router.txt",
            HOST,
            claims.claim(),
            claims.claim(),
            python=args.engine_python,
            environment=Environment(variables(args)),
        )
        settings = FleetSettings(
            servers, router, restart=False, health_interval_s=60.0, health_timeout_s=60.0, request_retries=0, request_timeout_s=TIMEOUT_S
        )
        running = await Fleet.launch(settings)
        try:
            yield running
        finally:
            await running.stop()


def prompts(args: argparse.Namespace, tokenizer: PreTrainedTokenizerBase, count: int) -> list[IntArray]:
    if args.questions is None:
        first = np.random.default_rng(0).integers(0, tokenizer.vocab_size, count)
        return list((first[:, None] + np.arange(args.prompt_tokens)).astype(np.int32) % tokenizer.vocab_size)
    lines = Path(args.questions).read_text().splitlines()[:count]
    texts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": json.loads(line)["question"]}], tokenize=False, add_generation_prompt=True
        )
        for line in lines
    ]
    return [np.asarray(tokenizer(str(text), add_special_tokens=False)["input_ids"], np.int32) for text in texts]


async def measure(args: argparse.Namespace) -> None:
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    if args.offline:
        await run_offline(args, tokenizer)
    if args.offline_only:
        return
    start_s = time.perf_counter()
    async with fleet(args) as running:
        print(f"engines ready after {time.perf_counter() - start_s:.0f} s", flush=True)
        for wave in args.waves:
            ids = prompts(args, tokenizer, wave.num_prompts)
            runner = build_runner(
                running.group,
                tokenizer,
                ids,
                samples_per_prompt=wave.num_samples,
                num_tokens=args.tokens,
                concurrency=wave.concurrency,
                ignore_eos=args.ignore_eos,
            )
            for number in range(args.repeats + 1):
                await asyncio.gather(*(client.flush_cache() for client in running.group.clients))
                start_s = time.perf_counter()
                rollout = await runner.rollout(number)
                seconds = time.perf_counter() - start_s
                samples = [sample for group in rollout.groups for sample in group.samples]
                errors = [sample.error for sample in samples if sample.error]
                if errors:
                    raise RuntimeError(f"{len(errors)} of {len(samples)} samples failed: {errors[0]}")
                report(
                    f"wave {wave.num_prompts}x{wave.num_samples}:{wave.concurrency}",
                    number,
                    seconds,
                    sum(s.response_length for s in samples),
                )


async def run_offline(args: argparse.Namespace, tokenizer: PreTrainedTokenizerBase) -> None:
    wave: Wave = args.waves[0]
    requests = [ids.tolist() for ids in prompts(args, tokenizer, wave.num_prompts) for _ in range(wave.num_samples)]
    engine: dict[str, Any] = {
        "model_path": args.model,
        **OWN_ARGUMENTS,
        "log_level": "info",
        **(CPU_ARGUMENTS if args.device == "cpu" else {}),
        **args.sglang,
    }
    engine |= {"device": args.device, "base_gpu_id": args.gpu}
    if args.device == "cpu":
        del engine["disable_cuda_graph"], engine["base_gpu_id"]
    params = {"temperature": 1.0, "max_new_tokens": args.tokens, "ignore_eos": args.ignore_eos}
    task = {"engine": engine, "prompts": requests, "sampling_params": params, "return_logprob": [False, True], "rounds": args.repeats}
    file = args.logs / "offline.json"
    file.write_text(json.dumps(task))
    extra = variables(args) | (CPU_ENVIRONMENT if args.device == "cpu" else {})
    with (args.logs / "offline.txt").open("ab") as log:
        process = await asyncio.create_subprocess_exec(
            args.engine_python,
            str(Path(__file__).with_name("sglang_offline.py")),
            str(file),
            stdout=asyncio.subprocess.PIPE,
            stderr=log,
            env=os.environ | {"HF_HUB_OFFLINE": "1"} | extra,
        )
        assert process.stdout is not None
        async for line in process.stdout:
            if line.startswith(b'{"round"'):
                found = json.loads(line)
                report(f"offline, log-probabilities {found['logprobs']}", found["round"], found["seconds"], found["tokens"])
    if await process.wait():
        raise RuntimeError((args.logs / "offline.txt").read_text(errors="replace")[-3000:])


def report(name: str, number: int, seconds: float, tokens: int) -> None:
    print(f"{name}, {number or 'warm-up'}: {tokens} tokens in {seconds:.2f} s, {tokens / seconds:,.0f} tok/s", flush=True)


def add_fleet_flags(parser: argparse.ArgumentParser) -> None:
    """Add the flags that `fleet` reads."""
    parser.add_argument("--engine-python", required=True, help="interpreter with SGLang and sglang-router installed")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--gpu", type=int, default=0, help="first GPU")
    parser.add_argument("--engines", type=int, default=1, help="engines, one GPU each")
    parser.add_argument("--model", default=str(ASSETS / "model"))
    parser.add_argument("--logs", type=Path, help="directory for logs (default: a temporary one)")
    parser.add_argument("--sglang", type=json.loads, default={}, help="arguments of SGLang's server, as JSON, names with underscores")


def run_with_logs(measure: Callable[[argparse.Namespace], Coroutine[Any, Any, None]], args: argparse.Namespace) -> None:
    """Run a measurement, with `args.logs` or a temporary directory for the logs of its engines."""
    with tempfile.TemporaryDirectory(prefix="fuligo-bench-") as directory:
        args.logs = args.logs or Path(directory)
        args.logs.mkdir(parents=True, exist_ok=True)
        asyncio.run(measure(args))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add_fleet_flags(parser)
    parser.add_argument("--questions", help="file with a question in every line's JSON object")
    parser.add_argument("--prompt-tokens", type=int, default=64)
    parser.add_argument("--waves", type=Wave.parse, nargs="+", default=[Wave(4, 4, 16)])
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--ignore-eos", action="store_true", help="sample exactly --tokens tokens")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--offline", action="store_true", help="measure SGLang's offline engine before the rollouts")
    parser.add_argument("--offline-only", action="store_true", help="measure only the offline engine")
    run_with_logs(measure, parser.parse_args())


if __name__ == "__main__":
    main()
