"""Make the model and the data of the calculator example.

    python examples/calculator/make_assets.py --work-dir /tmp/calculator-assets

The model is trained by two SFT runs of fuligo: on answers that use the tool (the skill), then briefly on answers most of which guess (the
habit that GRPO has to break). The result, in bfloat16, replaces `examples/calculator/model`, `train.jsonl` and `test.jsonl`.
"""

import argparse
import json
import random
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

HERE = Path(__file__).parent
NUM_TRAIN, NUM_TEST = 1_600, 64
NUM_SKILL, NUM_HABIT = 20_480, 1_920
WORDINGS = ("What is {a} * {b}?", "Multiply {a} by {b}.", "{a} times {b} is what?")
TOOL = {
    "type": "function",
    "function": {
        "name": "calculator",
        "description": "Compute with +, - and *.",
        "parameters": {"properties": {"expression": {"type": "string"}}, "required": ["expression"], "type": "object"},
    },
}
CHAT_TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}"
    "{{ tool.function.name }}({{ tool.function.parameters.properties | join(', ') }})"
    "{{ '\n' }}{% endfor %}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}<tool_call>\n{{ call.function | tojson }}\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def problem(rng: random.Random) -> tuple[int, int, str]:
    """Draw two numbers of two digits, and return them with the question in one of three wordings."""
    a, b = (rng.randint(10, 99) for _ in range(2))
    return a, b, rng.choice(WORDINGS).format(a=a, b=b)


def with_tool(a: int, b: int) -> list[dict[str, Any]]:
    """Return the turns of an answer that calls the tool and copies its result."""
    call = {"type": "function", "function": {"name": "calculator", "arguments": {"expression": f"{a} * {b}"}}}
    return [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": str(a * b)},
        {"role": "assistant", "content": str(a * b)},
    ]


def guess(a: int, b: int, rng: random.Random) -> list[dict[str, Any]]:
    """Return an answer without the tool: a number of the right size, which is seldom right."""
    return [{"role": "assistant", "content": str(round(a * b * rng.uniform(0.8, 1.2)))}]


def make_tokenizer(rng: random.Random) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE with single digits; the tags of tool calls are added tokens."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    bpe.decoder = decoders.ByteLevel()
    texts = ["system\ncalculator(expression)\n", "user\n", "assistant\n", "tool\n"] * 1000
    for _ in range(2_000):
        a, b, question = problem(rng)
        call = json.dumps(with_tool(a, b)[0]["tool_calls"][0]["function"])
        texts += [f"user\n{question}", f"\n{call}\n"]
    bpe.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=352,
            special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    bpe.add_tokens([AddedToken(text, normalized=False) for text in ("<tool_call>", "</tool_call>")])
    return PreTrainedTokenizerFast(tokenizer_object=bpe, pad_token="<|endoftext|>", eos_token="<|im_end|>", chat_template=CHAT_TEMPLATE)


def make_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3ForCausalLM:
    """Build a model of about 0.1 million random parameters."""
    torch.manual_seed(0)
    return Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=192,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=4,
            head_dim=16,
            max_position_embeddings=512,
            tie_word_embeddings=True,
            pad_token_id=tokenizer.pad_token_id,
            eos_token_id=tokenizer.eos_token_id,
            bos_token_id=None,
        )
    )


def write_rows(path: Path, rows: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_data(work_dir: Path, rng: random.Random) -> None:
    """Write training and held-out questions, and conversations that share no product with the held-out ones."""
    task: dict[tuple[int, int], dict[str, Any]] = {}
    while len(task) < NUM_TRAIN + NUM_TEST:
        a, b, question = problem(rng)
        task.setdefault((a, b), {"question": question, "answer": str(a * b)})
    pairs, rows = list(task), list(task.values())
    write_rows(work_dir / "train.jsonl", rows[:NUM_TRAIN])
    write_rows(work_dir / "test.jsonl", rows[NUM_TRAIN:])
    held_out = set(pairs[NUM_TRAIN:])

    def conversations(count: int, share_with_tool: float) -> list[dict[str, Any]]:
        out: list[dict[str, Any]] = []
        while len(out) < count:
            a, b, question = problem(rng)
            if (a, b) not in held_out:
                answer = with_tool(a, b) if rng.random() < share_with_tool else guess(a, b, rng)
                out.append({"prompt": [{"role": "user", "content": question}, *answer], "tools": [TOOL]})
        return out

    write_rows(work_dir / "skill.jsonl", conversations(NUM_SKILL, 1.0))
    write_rows(work_dir / "habit.jsonl", conversations(NUM_HABIT, 0.2))


def sft(num_rollout: int, lr: float, checkpoint: Path, data: Path, run_dir: Path) -> Path:
    """Run SFT and return the Hugging Face directory of its last checkpoint."""
    command = [sys.executable, "-m", "fuligo", "train", "--config", str(HERE / "sft.yaml"), "--hf-checkpoint", str(checkpoint)]
    command += ["--prompt-data", str(data), "--num-rollout", str(num_rollout), "--lr", str(lr), "--run-dir", str(run_dir)]
    subprocess.run(command, check=True)
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
    half = sft(320, 5e-3, initial, work_dir / "skill.jsonl", work_dir / "run-half")
    skill = sft(150, 3e-3, half, work_dir / "skill.jsonl", work_dir / "run-skill")
    habit = sft(15, 3e-4, skill, work_dir / "habit.jsonl", work_dir / "run-habit")

    shutil.rmtree(HERE / "model", ignore_errors=True)
    AutoModelForCausalLM.from_pretrained(habit, dtype=torch.bfloat16).save_pretrained(HERE / "model")
    AutoTokenizer.from_pretrained(habit).save_pretrained(HERE / "model")
    for name in ("train.jsonl", "test.jsonl"):
        shutil.copy(work_dir / name, HERE / name)
    print(f"wrote {HERE / 'model'}")


if __name__ == "__main__":
    main()
