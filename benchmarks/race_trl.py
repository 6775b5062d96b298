"""TRL's GRPOTrainer as a competitor of `race.py`, in its own environment: race_trl.py WORK.json STEPS.jsonl {generate,vllm}."""

import json
import sys
from pathlib import Path

from datasets import load_dataset
from peft import LoraConfig
from race_work import Work, trl_reward
from transformers import TrainerCallback
from trl import GRPOConfig, GRPOTrainer


class Records(TrainerCallback):
    """Callback that writes one line per logged step."""

    def __init__(self, file: Path, batch: int) -> None:
        self._file = file.open("w", buffering=1)
        self._batch = batch

    def on_log(self, args, state, control, logs=None, **kwargs) -> None:
        if logs and "reward" in logs:
            record = {"reward": logs["reward"], "tokens": logs["completions/mean_length"] * self._batch}
            self._file.write(json.dumps(record) + "\n")


def config(work: Work, engine: str, directory: Path) -> GRPOConfig:
    """Return TRL's settings: the sizes of the work, one optimizer step per batch of answers, and TRL's defaults for the rest."""
    on_gpu = work.device == "cuda"
    per_device = min(work.micro_batch, work.batch // work.num_gpus)
    vllm = {"use_vllm": True, "vllm_mode": "colocate", "vllm_gpu_memory_utilization": 0.4} if engine == "vllm" else {}
    return GRPOConfig(
        output_dir=str(directory),
        use_cpu=not on_gpu,
        bf16=on_gpu,
        gradient_checkpointing=False,
        per_device_train_batch_size=per_device,
        gradient_accumulation_steps=work.batch // (per_device * work.num_gpus),
        num_generations=work.num_samples,
        max_completion_length=work.max_tokens,
        max_steps=work.num_steps,
        learning_rate=work.lr,
        lr_scheduler_type="constant",
        loss_type="grpo",
        beta=0.0,
        temperature=1.0,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        disable_tqdm=True,
        **vllm,
    )


def lora(work: Work) -> LoraConfig:
    return LoraConfig(r=work.lora_rank, lora_alpha=2 * work.lora_rank, target_modules="all-linear", task_type="CAUSAL_LM")


def main() -> None:
    work, steps, engine = Work.load(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
    trainer = GRPOTrainer(
        model=work.model,
        reward_funcs=trl_reward,
        train_dataset=load_dataset("json", data_files=work.prompts, split="train"),  # from_list: not picklable with pyarrow on Python 3.12
        callbacks=[Records(steps, work.batch)],
        args=config(work, engine, steps.parent),
        peft_config=lora(work) if work.lora_rank else None,
    )
    trainer.train()


if __name__ == "__main__":
    main()
