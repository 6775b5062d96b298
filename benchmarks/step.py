"""Seconds of a GRPO step compared with TRL's GRPOTrainer on a CPU: same model, prompts, numbers of tokens, samples per prompt and loss.

    python benchmarks/step.py [--steps 12] [--rounds 2] [--threads N]

32 prompts x 8 samples of the quickstart's task and model (a Qwen3 of 0.8M parameters). Lengths are fixed, so that both do the same work:

- equal: every response 16 tokens.
- mixed: 8 to 256 tokens with a long tail (mean about 40).

fuligo runs `fuligo train` as a user would, with the engine over HTTP and recorded metrics and samples; a custom generate function requests
each sample's length and ignores the end token. TRL generates with transformers' `generate`, its method on a CPU; a logits processor forbids
the end token before a row's length and forces it there. The time of a step is that from the end of the previous step to its own. The
programs run alternately, `--rounds` times each; the lowest of a program's median step times counts.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from itertools import pairwise
from pathlib import Path

import numpy as np

ASSETS = Path(__file__).parents[1] / "fuligo" / "quickstart" / "assets"
NUM_PROMPTS, SAMPLES_PER_PROMPT = 32, 8
MAX_TOKENS = 256
WARM_UP_STEPS = 2
LENGTHS_VARIABLE = "STEP_BENCHMARK_LENGTHS"


def response_lengths(kind: str) -> list[int]:
    """Return the response lengths of the 256 samples of a step, in tokens."""
    if kind == "equal":
        return [16] * (NUM_PROMPTS * SAMPLES_PER_PROMPT)
    rng = np.random.default_rng(0)
    lengths = np.clip(8 + rng.exponential(32, NUM_PROMPTS * SAMPLES_PER_PROMPT), 8, MAX_TOKENS).astype(int)
    lengths[0] = MAX_TOKENS
    return lengths.tolist()


def score(token_ids) -> float:
    """Return a reward that differs within groups and costs nothing."""
    return int(sum(token_ids)) % 7 / 7


async def generate(args, sample, sampling_params):
    """Generate the number of tokens that is fixed for the sample (`--custom-generate-function-path`)."""
    from fuligo.rollout.custom_generate import continue_sample

    lengths = response_lengths(os.environ[LENGTHS_VARIABLE])
    return await continue_sample(sample, {**sampling_params, "max_new_tokens": lengths[sample.index % len(lengths)], "ignore_eos": True})


async def reward(args, sample) -> float:
    """Score a sample (`--custom-rm-path`)."""
    return score(sample.response_ids)


def step_times_of_fuligo(kind: str, num_steps: int, directory: Path) -> list[float]:
    import yaml

    config = {
        "cluster": {"device": "cpu"},
        "model": {"hf_checkpoint": str(ASSETS / "model")},
        "data": {"prompt_data": str(ASSETS / "train.jsonl"), "input_key": "prompt", "apply_chat_template": True, "num_rollout": num_steps},
        "rollout": {
            "rollout_batch_size": NUM_PROMPTS,
            "n_samples_per_prompt": SAMPLES_PER_PROMPT,
            "rollout_max_response_len": MAX_TOKENS,
            "custom_generate_function_path": f"{__file__}:generate",
        },
        "reward": {"custom_rm_path": f"{__file__}:reward"},
        "train": {"num_steps_per_rollout": 1, "use_dynamic_batch_size": True, "max_tokens_per_gpu": 16384},
        "optimizer": {"lr": 1e-6},
        "observability": {"run_dir": str(directory / "run"), "progress": "none"},
    }
    (directory / "config.yaml").write_text(yaml.safe_dump(config))
    command = [sys.executable, "-m", "fuligo", "train", "--config", str(directory / "config.yaml")]
    subprocess.run(command, check=True, env={**os.environ, LENGTHS_VARIABLE: kind})
    ends = [json.loads(line)["time"] for line in (directory / "run" / "metrics.jsonl").read_text().splitlines()]
    return [end - start for start, end in pairwise(ends)]


def step_times_of_trl(kind: str, num_steps: int, directory: Path) -> list[float]:
    """Return the seconds of TRL's steps, measured in its own process, like fuligo's."""
    ends = directory / "ends.json"
    subprocess.run([sys.executable, __file__, "--trl", kind, str(num_steps), str(ends)], check=True, stdout=subprocess.DEVNULL)
    return [end - start for start, end in pairwise(json.loads(ends.read_text()))]


def run_trl(kind: str, num_steps: int, ends_file: Path) -> None:
    import torch
    from datasets import load_dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, TrainerCallback
    from trl import GRPOTrainer

    model = AutoModelForCausalLM.from_pretrained(ASSETS / "model", dtype=torch.float32)
    tokenizer = AutoTokenizer.from_pretrained(ASSETS / "model")
    fix_lengths(model, response_lengths(kind), tokenizer.eos_token_id)
    prompts = load_dataset("json", data_files=str(ASSETS / "train.jsonl"), split="train").select_columns("prompt")
    ends: list[float] = []

    class Clock(TrainerCallback):
        def on_step_end(self, *args, **kwargs) -> None:
            ends.append(time.time())

    trainer = GRPOTrainer(
        model=model,
        processing_class=tokenizer,
        reward_funcs=lambda completion_ids, **_: [score(ids) for ids in completion_ids],
        train_dataset=prompts,
        callbacks=[Clock()],
        args=trl_config(num_steps, ends_file.parent),
    )
    trainer.train()
    ends_file.write_text(json.dumps(ends))


def fix_lengths(model, lengths: list[int], end_token: int) -> None:
    """Make `model.generate` end every row at its length: forbid the end token before it and force it there."""
    import torch
    from transformers import LogitsProcessorList

    lasts = torch.tensor(lengths)
    plain_generate = model.generate

    def generate_fixed(**inputs):
        prompt_length = inputs["input_ids"].shape[1]

        def end_at_length(input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:
            last = lasts == input_ids.shape[1] - prompt_length + 1
            end_scores = scores[:, end_token].clone()
            scores = scores.masked_fill(last[:, None], -torch.inf)
            scores[:, end_token] = torch.where(last, end_scores, -torch.inf)
            return scores

        return plain_generate(**inputs, logits_processor=LogitsProcessorList([end_at_length]))

    model.generate = generate_fixed


def trl_config(num_steps: int, directory: Path):
    """Return TRL's settings: the sizes of fuligo's run, with everything off that fuligo does not do."""
    from trl import GRPOConfig

    return GRPOConfig(
        output_dir=str(directory),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        per_device_train_batch_size=NUM_PROMPTS * SAMPLES_PER_PROMPT,
        num_generations=SAMPLES_PER_PROMPT,
        max_completion_length=MAX_TOKENS,
        max_steps=num_steps,
        learning_rate=1e-6,
        loss_type="grpo",
        beta=0.0,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
    )


def median_step(times, kind: str, num_steps: int) -> float:
    with tempfile.TemporaryDirectory() as directory:
        return statistics.median(times(kind, num_steps + WARM_UP_STEPS, Path(directory))[WARM_UP_STEPS - 1 :])


def compare(num_steps: int, rounds: int) -> None:
    programs = {"fuligo": step_times_of_fuligo, "TRL": step_times_of_trl}
    for kind in ("equal", "mixed"):
        lengths = response_lengths(kind)
        best = dict.fromkeys(programs, float("inf"))
        for _ in range(rounds):
            for name, times in programs.items():
                best[name] = min(best[name], median_step(times, kind, num_steps))
        print(f"{kind:6} {len(lengths)} samples of {min(lengths)}-{max(lengths)} tokens, mean {statistics.mean(lengths):.0f}: ", end="")
        print(", ".join(f"{name} {seconds:.3f} s" for name, seconds in best.items()), end="")
        print(f"; TRL / fuligo = {best['TRL'] / best['fuligo']:.2f}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--threads", type=int, help="threads per process (default: torch's choice)")
    parser.add_argument("--trl", nargs=3, metavar=("KIND", "STEPS", "FILE"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.trl is not None:
        kind, num_steps, file = options.trl
        return run_trl(kind, int(num_steps), Path(file))
    if options.threads is not None:
        os.environ["OMP_NUM_THREADS"] = str(options.threads)
    return compare(options.steps, options.rounds)


if __name__ == "__main__":
    main()
