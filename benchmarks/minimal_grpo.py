"""Minimal GRPO loop in one file that does the work of the quickstart: the baseline for the overhead of a framework.

    python benchmarks/minimal_grpo.py                  # one run of this loop
    python benchmarks/minimal_grpo.py --compare        # this loop and `fuligo quickstart` alternately, and the ratio of their times

It uses the same checkpoint, task files, chat template, prompts per step, samples per prompt, optimizer, loss, number of steps and
evaluations, and leaves out samples without advantage, too, but transformers' `generate`, padded batches, no server, no checkpoints, no
records, no resume.
"""

import time

START = time.perf_counter()

import argparse
import json
import random
import re
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import yaml
from math_verify import parse, verify
from transformers import AutoModelForCausalLM, AutoTokenizer

ASSETS = Path(__file__).parents[1] / "fuligo" / "quickstart" / "assets"


def reward(response: str, label: str) -> float:
    """Return 1 if the last box after `</think>` equals the label, else 0."""
    if "</think>" not in response:
        return 0.0
    boxes = re.findall(r"\\boxed\{([^{}]*)\}", response.rsplit("</think>", maxsplit=1)[-1])
    if not boxes:
        return 0.0
    return 1.0 if boxes[-1].strip() == label else float(bool(verify(parse(f"${label}$"), parse(f"${boxes[-1]}$"))))


class Loop:
    def __init__(self, seed: int) -> None:
        self.config = yaml.safe_load((ASSETS / "config.yaml").read_text())
        self.tokenizer = AutoTokenizer.from_pretrained(ASSETS / "model", padding_side="left")
        self.model = AutoModelForCausalLM.from_pretrained(ASSETS / "model", dtype=torch.float32)
        optimizer = self.config["optimizer"]
        betas = (optimizer.get("adam_beta1", 0.9), optimizer.get("adam_beta2", 0.999))
        self.optimizer = torch.optim.AdamW(
            self.model.parameters(), lr=optimizer["lr"], betas=betas, weight_decay=optimizer.get("weight_decay", 0.01)
        )
        self.max_new_tokens = self.config["rollout"]["rollout_max_response_len"]
        torch.manual_seed(seed)
        self.random = random.Random(seed)

    @torch.no_grad()
    def sample(self, rows: list[dict], samples_per_prompt: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return token ids [B, T], attention mask [B, T] and response mask [B, T]; prompts are padded on the left."""
        prompts = [self.tokenizer.apply_chat_template(row["prompt"], add_generation_prompt=True, tokenize=False) for row in rows]
        inputs = self.tokenizer([prompt for prompt in prompts for _ in range(samples_per_prompt)], padding=True, return_tensors="pt")
        ids = self.model.generate(
            input_ids=inputs.input_ids, attention_mask=inputs.attention_mask, do_sample=True, top_k=0, max_new_tokens=self.max_new_tokens
        )
        prompt_length = inputs.input_ids.shape[1]
        ends = (ids[:, prompt_length:] == self.tokenizer.eos_token_id).cumsum(1)
        before_end = torch.cat([torch.zeros_like(ends[:, :1]), ends[:, :-1]], 1) == 0
        response = torch.cat([torch.zeros_like(inputs.input_ids, dtype=torch.bool), before_end], 1)
        attention = torch.cat([inputs.attention_mask.bool(), before_end], 1)
        return ids, attention, response

    def score(self, ids: torch.Tensor, response: torch.Tensor, labels: list[str]) -> torch.Tensor:
        texts = [self.tokenizer.decode(row[mask]) for row, mask in zip(ids, response, strict=True)]
        return torch.tensor([reward(text.removesuffix("<|im_end|>"), label) for text, label in zip(texts, labels, strict=True)])

    def evaluate(self, rows: list[dict]) -> float:
        self.model.eval()
        count = self.config["eval"].get("n_samples_per_eval_prompt", 1)
        ids, _, response = self.sample(rows, count)
        return self.score(ids, response, [row["label"] for row in rows for _ in range(count)]).mean().item()

    def step(self, rows: list[dict]) -> float:
        group = self.config["rollout"]["n_samples_per_prompt"]
        algorithm = self.config.get("algorithm", {})
        low, high = algorithm.get("eps_clip", 0.2), algorithm.get("eps_clip_high", 0.2)
        ids, attention, response = self.sample(rows, group)
        rewards = self.score(ids, response, [row["label"] for row in rows for _ in range(group)])
        grouped = rewards.view(-1, group)
        advantages = ((grouped - grouped.mean(1, keepdim=True)) / (grouped.std(1, keepdim=True) + 1e-6)).view(-1, 1)
        trained = advantages[:, 0] != 0
        if not trained.any():
            return rewards.mean().item()
        ids, attention, response, advantages = (each[trained] for each in (ids, attention, response, advantages))
        positions = (attention.cumsum(1) - 1).clamp(min=0)
        logits = self.model(input_ids=ids, attention_mask=attention, position_ids=positions).logits[:, :-1]
        logprobs = logits.log_softmax(-1).gather(-1, ids[:, 1:, None])[..., 0]
        mask = response[:, 1:].float()
        ratio = (logprobs - logprobs.detach()).exp()
        token_loss = -torch.minimum(ratio * advantages, ratio.clamp(1 - low, 1 + high) * advantages)
        loss = ((token_loss * mask).sum(1) / mask.sum(1).clamp(min=1)).sum() / len(rewards)
        self.optimizer.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        return rewards.mean().item()


def run(seed: int) -> None:
    train, test = ([json.loads(line) for line in (ASSETS / name).read_text().splitlines()] for name in ("train.jsonl", "test.jsonl"))
    loop = Loop(seed)
    loop.random.shuffle(train)
    batch = loop.config["rollout"]["rollout_batch_size"]
    before = loop.evaluate(test)
    for step in range(loop.config["data"]["num_rollout"]):
        rows = [train[(step * batch + offset) % len(train)] for offset in range(batch)]
        print(f"step {step} reward {loop.step(rows):.3f}", flush=True)
    after = loop.evaluate(test)
    print(f"reward {before:.2f} -> {after:.2f} in {time.perf_counter() - START:.1f} s (no run directory)")


def compare(repeats: int) -> None:
    """Time both programs alternately, so that other work on the machine slows both."""
    times: dict[str, list[float]] = {"minimal": [], "fuligo": []}
    with tempfile.TemporaryDirectory() as directory:
        for repeat in range(repeats):
            commands = {
                "minimal": [sys.executable, __file__, "--seed", str(repeat + 1)],
                "fuligo": [sys.executable, "-m", "fuligo", "quickstart", "--seed", str(repeat + 1), "--run-dir", f"{directory}/{repeat}"],
            }
            for name, command in commands.items():
                start = time.perf_counter()
                output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
                times[name].append(time.perf_counter() - start)
                print(f"{name:8} {times[name][-1]:6.1f} s   {output.strip().splitlines()[-1]}", flush=True)
    ratio = statistics.median(times["fuligo"]) / statistics.median(times["minimal"])
    print(f"median: fuligo / minimal = {ratio:.2f}")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--compare", action="store_true")
    parser.add_argument("--repeats", type=int, default=3)
    arguments = parser.parse_args()
    compare(arguments.repeats) if arguments.compare else run(arguments.seed)
