"""Supervised warm start of the tiny models in the examples.

Each model is trained by two or more SFT runs of fuligo on conversations of its task: first until it masters the task (the skill), then
briefly on answers that are mostly guesses (the habit that GRPO has to break).
"""

import json
import random
import shutil
import subprocess
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast, Qwen3Config, Qwen3ForCausalLM

SFT_CONFIG = Path(__file__).with_name("warm_start.yaml")
CHAT_TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{% for tool in tools %}"
    "{{ tool.function.name }}({{ tool.function.parameters.properties | join(', ') }})"
    "{{ '\n' }}{% endfor %}<|im_end|>\n{% endif %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content or '' }}"
    "{% for call in message.tool_calls or [] %}<tool_call>\n{{ call.function | tojson }}\n</tool_call>{% endfor %}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
Row = dict[str, Any]


def tool_definition(name: str, parameter: str) -> Row:
    """Return the definition of a tool with one string parameter, with the fields that the chat template shows."""
    parameters = {"properties": {parameter: {"type": "string"}}, "required": [parameter], "type": "object"}
    return {"type": "function", "function": {"name": name, "description": "", "parameters": parameters}}


def tool_answer(name: str, arguments: dict[str, str], result: str, answer: str) -> list[Row]:
    """Return the turns of an answer that calls a tool and reads its result."""
    call = {"type": "function", "function": {"name": name, "arguments": arguments}}
    return [
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "content": result},
        {"role": "assistant", "content": answer},
    ]


def conversation(question: str, answer: list[Row], tools: Sequence[Row] = ()) -> Row:
    """Return a row of SFT data."""
    return {"prompt": [{"role": "user", "content": question}, *answer], "tools": list(tools)}


def mixed(skill: Sequence[Row], guesses: Sequence[Row], share: float, rng: random.Random) -> list[Row]:
    """Return `guesses`, where each conversation is replaced with probability `share` by that of `skill` at the same position."""
    return [shown if rng.random() < share else guess for shown, guess in zip(skill, guesses, strict=True)]


def make_tokenizer(conversations: Iterable[Row], vocab_size: int) -> PreTrainedTokenizerFast:
    """Train a byte-level BPE with single digits on conversations; the tags of tool calls are added tokens."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    bpe.decoder = decoders.ByteLevel()
    texts: list[str] = []
    for row in conversations:
        for tool in row["tools"]:
            function = tool["function"]
            texts.append(f"system\n{function['name']}({', '.join(function['parameters']['properties'])})\n")
        for message in row["prompt"]:
            texts.append(f"{message['role']}\n{message['content']}")
            texts += [f"\n{json.dumps(call['function'])}\n" for call in message.get("tool_calls", ())]
    bpe.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=vocab_size,
            special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    bpe.add_tokens([AddedToken(text, normalized=False) for text in ("<tool_call>", "</tool_call>")])
    return PreTrainedTokenizerFast(tokenizer_object=bpe, pad_token="<|endoftext|>", eos_token="<|im_end|>", chat_template=CHAT_TEMPLATE)


def make_model(tokenizer: PreTrainedTokenizerFast, folder: Path, num_layers: int = 2) -> Path:
    """Write a model of about 0.1 million random parameters, with its tokenizer, to `folder`; return `folder`."""
    torch.manual_seed(0)
    model = Qwen3ForCausalLM(
        Qwen3Config(
            vocab_size=len(tokenizer),
            hidden_size=64,
            intermediate_size=192,
            num_hidden_layers=num_layers,
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
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return folder


def write_rows(path: Path, rows: Iterable[Row]) -> Path:
    """Write rows as JSON lines; return `path`."""
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def sft(num_rollout: int, lr: float, checkpoint: Path, data: Path, run_dir: Path) -> Path:
    """Run SFT and return the Hugging Face directory of its last checkpoint."""
    command = [sys.executable, "-m", "fuligo", "train", "--config", str(SFT_CONFIG), "--hf-checkpoint", str(checkpoint)]
    command += ["--prompt-data", str(data), "--num-rollout", str(num_rollout), "--lr", str(lr), "--run-dir", str(run_dir)]
    subprocess.run(command, check=True)
    iteration = (run_dir / "checkpoints" / "latest_checkpointed_iteration.txt").read_text().strip()
    return run_dir / "checkpoints" / f"iter_{int(iteration):07d}" / "hf"


def ship(checkpoint: Path, folder: Path) -> None:
    """Write a checkpoint's model in bfloat16, with its tokenizer, to `folder`."""
    shutil.rmtree(folder, ignore_errors=True)
    AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.bfloat16).save_pretrained(folder)
    AutoTokenizer.from_pretrained(checkpoint).save_pretrained(folder)
    print(f"wrote {folder}")
