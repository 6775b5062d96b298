"""Make model and data of the shapes example: python -m examples.shapes.make_assets

A tiny Qwen3-VL learns to count, then trains briefly on mostly random answers (the habit that GRPO has to break).
"""

import json
import random
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, PreTrainedTokenizerFast, Qwen3VLForConditionalGeneration

from examples.shapes.task import CELL, MOST, QUESTIONS, SIDE, problem
from fuligo.models.vision.processor import ImageProcessor, image_digest

HERE = Path(__file__).parent
NUM_TRAIN, NUM_TEST = 1024, 128
BATCH = 64
TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n"
    "{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}"
    "{% if part.type == 'image' %}<|vision_start|><|image_pad|><|vision_end|>{% else %}{{ part.text }}{% endif %}"
    "{% endfor %}{% endif %}<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>")
PROCESSOR = {
    "image_processor_type": "Qwen2VLImageProcessorFast",
    "patch_size": CELL // 2,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "size": {"shortest_edge": CELL**2, "longest_edge": 64 * CELL**2},
    "image_mean": [0.5, 0.5, 0.5],
    "image_std": [0.5, 0.5, 0.5],
}


def make_tokenizer() -> PreTrainedTokenizerFast:
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    texts = [f"user\n{question.removeprefix('<image>')}\nassistant\n" for question in QUESTIONS] * 8
    bpe.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=288, initial_alphabet=alphabet, show_progress=False))
    bpe.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    return PreTrainedTokenizerFast(tokenizer_object=bpe, pad_token=SPECIAL[0], eos_token=SPECIAL[2], chat_template=TEMPLATE)


def make_model(tokenizer: PreTrainedTokenizerFast) -> Qwen3VLForConditionalGeneration:
    """Return a model of 0.2 million random parameters."""
    start, end, image, video = (tokenizer.convert_tokens_to_ids(text) for text in SPECIAL[3:])
    config: Any = AutoConfig.for_model(
        "qwen3_vl",
        image_token_id=image,
        video_token_id=video,
        vision_start_token_id=start,
        vision_end_token_id=end,
        tie_word_embeddings=True,
        text_config={
            "vocab_size": len(tokenizer),
            "hidden_size": 64,
            "intermediate_size": 192,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 4,
            "head_dim": 16,
            "max_position_embeddings": 256,
            "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [4, 2, 2], "mrope_interleaved": True},
            "pad_token_id": tokenizer.pad_token_id,
            "eos_token_id": tokenizer.eos_token_id,
        },
        vision_config={
            "depth": 2,
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_heads": 2,
            "patch_size": PROCESSOR["patch_size"],
            "spatial_merge_size": PROCESSOR["merge_size"],
            "temporal_patch_size": PROCESSOR["temporal_patch_size"],
            "out_hidden_size": 64,
            "num_position_embeddings": (2 * SIDE // CELL) ** 2,
            "deepstack_visual_indexes": [0],
        },
    )
    torch.manual_seed(0)
    model = Qwen3VLForConditionalGeneration(config)
    model.generation_config.eos_token_id = tokenizer.eos_token_id
    return model


class Teacher:
    """Supervised training of the model on pictures that are drawn during training."""

    def __init__(self, folder: Path) -> None:
        """Write tokenizer and image processor to `folder`."""
        self.tokenizer = make_tokenizer()
        self.model = make_model(self.tokenizer)
        self.rng = random.Random(0)
        self.tokenizer.save_pretrained(folder)
        (folder / "preprocessor_config.json").write_text(json.dumps(PROCESSOR, indent=2) + "\n")
        self.processor = ImageProcessor(folder)

    def show(self, num_steps: int, lr: float, share_right: float) -> None:
        """Train on answers that are right with probability `share_right`, and random numbers otherwise."""
        optimizer = torch.optim.AdamW(self.model.parameters(), lr=lr, betas=(0.9, 0.98), weight_decay=0.01)
        schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, lr, total_steps=num_steps, pct_start=0.1)
        for step in range(num_steps):
            rows = [problem(self.rng) for _ in range(BATCH)]
            answers = [row["answer"] if self.rng.random() < share_right else str(self.rng.randint(0, 2 * MOST)) for row in rows]
            loss = self.loss(rows, answers)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
            if step % 100 == 99:
                print(f"step {step + 1}: loss {loss.item():.3f}", flush=True)

    def loss(self, rows: list[dict[str, Any]], answers: list[str]) -> torch.Tensor:
        """Return the mean negative log-probability of the answers' tokens, including the end token."""
        prompts, labels, patches = [], [], []
        image = self.model.config.image_token_id
        for row, answer in zip(rows, answers):
            data = row["images"][0]["bytes"]
            patches.append(self.processor.patches(data, image_digest(data)))
            parts = [{"type": "image"}, {"type": "text", "text": row["problem"].removeprefix("<image>")}]
            text = self.tokenizer.apply_chat_template([{"role": "user", "content": parts}], tokenize=False, add_generation_prompt=True)
            text = text.replace("<|image_pad|>", "<|image_pad|>" * (SIDE // CELL) ** 2)
            question = self.tokenizer(text, add_special_tokens=False)["input_ids"]
            reply = self.tokenizer(answer + "<|im_end|>", add_special_tokens=False)["input_ids"]
            prompts.append(torch.tensor(question + reply))
            labels.append(torch.tensor([-100] * len(question) + reply))
        ids = torch.nn.utils.rnn.pad_sequence(prompts, batch_first=True, padding_value=self.tokenizer.pad_token_id)
        mask = torch.nn.utils.rnn.pad_sequence([torch.ones_like(prompt) for prompt in prompts], batch_first=True)
        return self.model(
            input_ids=ids,
            attention_mask=mask,
            labels=torch.nn.utils.rnn.pad_sequence(labels, batch_first=True, padding_value=-100),
            pixel_values=torch.cat([torch.from_numpy(each.values) for each in patches]),
            image_grid_thw=torch.tensor([[1, each.num_rows, each.num_columns] for each in patches]),
            mm_token_type_ids=(ids == image).int(),
        ).loss


def write_data(path: Path, num_rows: int, rng: random.Random) -> None:
    image = pa.struct([("bytes", pa.binary()), ("path", pa.string())])
    schema = pa.schema([("problem", pa.string()), ("images", pa.list_(image)), ("answer", pa.string())])
    pq.write_table(pa.Table.from_pylist([problem(rng) for _ in range(num_rows)], schema=schema), path, compression="zstd")


def main() -> None:
    folder = HERE / "model"
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir()
    teacher = Teacher(folder)
    teacher.show(600, 3e-3, share_right=1.0)
    teacher.show(60, 3e-4, share_right=0.1)
    teacher.model.to(torch.bfloat16).save_pretrained(folder)
    rng = random.Random(1)
    write_data(HERE / "train.parquet", NUM_TRAIN, rng)
    write_data(HERE / "test.parquet", NUM_TEST, rng)


if __name__ == "__main__":
    main()
