"""Make everything that `fuligo quickstart` ships: tokenizer, task files, and the warm-start checkpoint.

    python examples/quickstart/make_assets.py --work-dir /tmp/quickstart-assets

The model is trained by two SFT runs of fuligo: on worked answers only (the skill), then briefly on mostly guessed and careless answers (the
habit that GRPO has to break). The result, in bfloat16, replaces `fuligo/quickstart/assets/`.
"""

import argparse
import json
import random
import shutil
import subprocess
import sys
from pathlib import Path

import torch
from task import careless, guess, problem, worked
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

HERE = Path(__file__).parent
ASSETS = HERE.parents[1] / "fuligo" / "quickstart" / "assets"
NUM_TRAIN, NUM_TEST = 1_600, 96
NUM_SKILL, NUM_HABIT = 81_920, 10_240
HABIT = {"worked": 0.25, "careless": 0.25, "guess": 0.5}
CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def make_tokenizer(rng: random.Random) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE with single digits and about 330 tokens; `<think>` and `</think>` are ordinary added tokens."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    bpe.decoder = decoders.ByteLevel()
    texts = []
    for _ in range(4_000):
        a, b, question = problem(rng)
        texts += [f"user\n{question}", f"assistant\n{worked(a, b)}".replace("<think>", " ").replace("</think>", " ")]
    bpe.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=336,
            special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    bpe.add_tokens([AddedToken(text, normalized=False) for text in ("<think>", "</think>")])
    return PreTrainedTokenizerFast(tokenizer_object=bpe, pad_token="<|endoftext|>", eos_token="<|im_end|>", chat_template=CHAT_TEMPLATE)


def make_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """Build a model of about 0.8 million random parameters."""
    torch.manual_seed(0)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=128,
            intermediate_size=384,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            max_position_embeddings=512,
            tie_word_embeddings=True,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
            bos_token_id=None,
        )
    )


def write_rows(path: Path, rows: list[dict]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_data(work_dir: Path, rng: random.Random) -> None:
    """Write training and held-out prompts in the dapo-math format; SFT rows share no sum with the held-out prompts."""
    task: dict[tuple[int, int], dict] = {}
    while len(task) < NUM_TRAIN + NUM_TEST:
        a, b, question = problem(rng)
        task.setdefault((min(a, b), max(a, b)), {"prompt": [{"role": "user", "content": question}], "label": str(a + b)})
    sums, rows = list(task), list(task.values())
    write_rows(work_dir / "train.jsonl", rows[:NUM_TRAIN])
    write_rows(work_dir / "test.jsonl", rows[NUM_TRAIN:])
    held_out = set(sums[NUM_TRAIN:])

    def sft_rows(count: int, shares: dict[str, float]) -> list[dict]:
        out: list[dict] = []
        while len(out) < count:
            a, b, question = problem(rng)
            if (min(a, b), max(a, b)) in held_out:
                continue
            style = rng.choices(list(shares), list(shares.values()))[0]
            answer = {"worked": worked(a, b), "careless": careless(a, b), "guess": guess(a, b, rng)}[style]
            out.append({"prompt": [{"role": "user", "content": question}, {"role": "assistant", "content": answer}]})
        return out

    write_rows(work_dir / "skill.jsonl", sft_rows(NUM_SKILL, {"worked": 1.0}))
    write_rows(work_dir / "habit.jsonl", sft_rows(NUM_HABIT, HABIT))


def sft(config: Path, checkpoint: Path, data: Path, run_dir: Path) -> Path:
    """Run SFT and return the Hugging Face directory of its last checkpoint."""
    command = [sys.executable, "-m", "fuligo", "train", "--config", str(config), "--hf-checkpoint", str(checkpoint)]
    subprocess.run([*command, "--prompt-data", str(data), "--run-dir", str(run_dir)], check=True)
    iteration = (run_dir / "checkpoints" / "latest_checkpointed_iteration.txt").read_text().strip()
    return run_dir / "checkpoints" / f"iter_{int(iteration):07d}" / "hf"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work-dir", type=Path, required=True)
    work_dir: Path = parser.parse_args().work_dir
    work_dir.mkdir(parents=True, exist_ok=True)
    rng = random.Random(0)

    initial = work_dir / "initial"
    tokenizer = make_tokenizer(rng)
    make_model(tokenizer).save_pretrained(initial)
    tokenizer.save_pretrained(initial)
    write_data(work_dir, rng)
    skill = sft(HERE / "sft_skill.yaml", initial, work_dir / "skill.jsonl", work_dir / "run-skill")
    habit = sft(HERE / "sft_habit.yaml", skill, work_dir / "habit.jsonl", work_dir / "run-habit")

    model_dir = ASSETS / "model"
    shutil.rmtree(model_dir, ignore_errors=True)
    AutoModelForCausalLM.from_pretrained(habit, dtype=torch.bfloat16).save_pretrained(model_dir)
    AutoTokenizer.from_pretrained(habit).save_pretrained(model_dir)
    for name in ("train.jsonl", "test.jsonl"):
        shutil.copy(work_dir / name, ASSETS / name)
    print(f"wrote {ASSETS}")


if __name__ == "__main__":
    main()
