"""Command lines of the competitors of `race.py`, each in an environment of its own, and how to read their steps.

    python -m venv .venv-trl && .venv-trl/bin/pip install "trl==1.16.0" "vllm==0.26.0" peft
    python -m venv .venv-verl && .venv-verl/bin/pip install "verl[sglang]==0.9.1" "liger-kernel==0.8.5"
    python -m venv .venv-skyrl && .venv-skyrl/bin/pip install "skyrl[fsdp]==0.3.0"

verl and SkyRL also need flash-attn 2: `pip install --no-build-isolation flash-attn==2.8.3` before them, or `race_flash` where it cannot be
compiled. SkyRL needs Python 3.12.
"""

import os
import shlex
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

from race_work import Work

HERE = Path(__file__).resolve().parent
FLAGS_VARIABLE = "FULIGO_RACE_FLAGS"
SKYRL_FLAGS_VARIABLE = "SKYRL_RACE_FLAGS"
VERL_FLAGS_VARIABLE = "VERL_RACE_FLAGS"
LORA_RANK = 16
LORA_LR_FACTOR = 10

Command = Callable[[Work, Path, str], list[str]]
"""Function that returns a competitor's command line, given the work, the directory for its files, and its Python."""


@dataclass
class Competitor:
    """Program that does the work and writes a line of JSON per step."""

    command: Command
    steps: str
    """Name of the file with its steps in the competitor's directory."""
    read: Callable[[dict, Work], tuple[float, float]]
    """Function that returns the mean reward and the number of sampled tokens in a line."""
    environment: dict[str, str] = field(default_factory=dict)


def fuligo(work: Work, directory: Path, python: str) -> list[str]:
    """Return fuligo's command. Samples without advantage, which it leaves out by default, are trained, as the others train them."""
    flags: dict[str, object] = {
        "hf-checkpoint": work.model,
        "prompt-data": work.prompts,
        "input-key": "prompt",
        "label-key": "label",
        "rollout-batch-size": work.num_prompts,
        "n-samples-per-prompt": work.num_samples,
        "rollout-max-response-len": work.max_tokens,
        "num-rollout": work.num_steps,
        "custom-rm-path": f"{HERE / 'race_work.py'}:fuligo_reward",
        "lr": work.lr,
        "num-steps-per-rollout": 1,
        "run-dir": directory / "run",
    }
    words = [word for name, value in flags.items() for word in (f"--{name}", str(value))] + shlex.split(os.environ.get(FLAGS_VARIABLE, ""))
    if work.lora_rank:
        words += ["--lora-rank", str(work.lora_rank), "--lora-alpha", str(2 * work.lora_rank)]
    sizes = ["--actor-num-gpus-per-node", str(work.num_gpus), "--colocate"] if work.num_gpus > 1 else []
    switches = ["--apply-chat-template", "--rollout-shuffle", "--no-skip-zero-advantages"]
    return [python, "-m", "fuligo", "train", *words, *switches, "--device", work.device, *sizes]


def with_lora(command: Command) -> Command:
    """Return the command that trains LoRA adapters instead, with the higher learning rate that they need."""

    def adapted(work: Work, directory: Path, python: str) -> list[str]:
        return command(replace(work, lora_rank=LORA_RANK, lr=work.lr * LORA_LR_FACTOR), directory, python)

    return adapted


def trl(engine: str) -> Command:
    def command(work: Work, directory: Path, python: str) -> list[str]:
        launch = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={work.num_gpus}"] if work.num_gpus > 1 else []
        return [python, *launch, str(HERE / "race_trl.py"), str(work.save(directory / "work.json")), str(directory / "steps.jsonl"), engine]

    return command


def verl(engine: str, recomputes: bool) -> Command:
    """Return the command of verl 0.9.1 with the settings that its documentation recommends for speed, as far as the GPU has room.

    `recomputes`: compute the old policy's log-probabilities with the trainer before each step, which is verl's default. Without it,
    `bypass_mode` takes the engine's, which saves a forward pass; fuligo and TRL also save it if a batch is one optimizer step.
    """

    def command(work: Work, directory: Path, python: str) -> list[str]:
        import pyarrow as pa
        import pyarrow.parquet as pq

        rows = [
            {
                "data_source": "race",
                "prompt": row["prompt"],
                "reward_model": {"style": "rule", "ground_truth": row["label"]},
                "extra_info": {"index": index},
            }
            for index, row in enumerate(work.rows())
        ]
        pq.write_table(pa.Table.from_pylist(rows), directory / "prompts.parquet")
        settings: dict[str, object] = {
            "algorithm.adv_estimator": "grpo",
            "algorithm.rollout_correction.bypass_mode": not recomputes,
            "data.train_files": directory / "prompts.parquet",
            "data.val_files": directory / "prompts.parquet",
            "data.train_batch_size": work.num_prompts,
            "data.max_prompt_length": work.max_prompt_tokens,
            "data.max_response_length": work.max_tokens,
            "reward.custom_reward_function.path": HERE / "race_work.py",
            "reward.custom_reward_function.name": "verl_reward",
            "trainer.logger": "[file]",
            "trainer.total_training_steps": work.num_steps,
            "trainer.n_gpus_per_node": work.num_gpus,
            "trainer.val_before_train": False,
            "trainer.default_local_dir": directory / "checkpoints",
            "hydra.run.dir": directory / "hydra",
            **verl_trainer(work),
            **verl_engine(work, engine),
        }
        words = [f"{name}={value}" for name, value in settings.items()]
        return [python, "-m", "verl.trainer.main_ppo", *words, *shlex.split(os.environ.get(VERL_FLAGS_VARIABLE, ""))]

    return command


def verl_trainer(work: Work) -> dict[str, object]:
    """Return the settings of verl's trainer: packed rows of up to 32,768 tokens, without recomputation, since a small model leaves room."""
    return {
        "actor_rollout_ref.model.path": work.model,
        "actor_rollout_ref.model.use_remove_padding": True,
        "actor_rollout_ref.model.enable_gradient_checkpointing": False,
        "actor_rollout_ref.model.use_liger": work.device == "cuda",
        "actor_rollout_ref.actor.strategy": "fsdp2",
        "actor_rollout_ref.actor.ppo_mini_batch_size": work.num_prompts,
        "actor_rollout_ref.actor.use_dynamic_bsz": True,
        "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": max(32768, work.max_prompt_tokens + work.max_tokens),
        "actor_rollout_ref.actor.loss_agg_mode": "seq-mean-token-mean",
        "actor_rollout_ref.actor.optim.lr": work.lr,
    }


def verl_engine(work: Work, engine: str) -> dict[str, object]:
    """Return the settings of verl's engine: all requests of a step at once, with CUDA graphs; it keeps its memory during training."""
    requests = work.batch // work.num_gpus
    settings: dict[str, object] = {
        "actor_rollout_ref.rollout.name": engine,
        "actor_rollout_ref.rollout.n": work.num_samples,
        "actor_rollout_ref.rollout.tensor_model_parallel_size": 1,
        "actor_rollout_ref.rollout.gpu_memory_utilization": 0.4,
        "actor_rollout_ref.rollout.free_cache_engine": False,
        "actor_rollout_ref.rollout.max_num_seqs": requests + 1,  # SGLang counts a request whose prompt is in chunks twice
    }
    if engine == "sglang":
        settings["+actor_rollout_ref.rollout.engine_kwargs.sglang.cuda_graph_max_bs_decode"] = requests
    return settings


def skyrl(work: Work, directory: Path, python: str) -> list[str]:
    """Return the command of SkyRL 0.3.0 with the settings that its documentation recommends for speed, as far as the GPU has room.

    SkyRL always offloads its model and puts its engine to sleep in turn when they share GPUs, and always computes the log-probabilities of
    the old policy with the trainer for its default loss. For several GPUs, its router passes requests round robin: it would otherwise
    choose the engine by a session, and requests of single-turn batches have none. `race_skyrl.py` adds the reward and the steps' file.
    """
    settings: dict[str, object] = {
        "data.train_data": f"['{work.prompts}']",
        "environment.env_class": "race",
        "trainer.algorithm.advantage_estimator": "grpo",
        "trainer.algorithm.use_kl_loss": False,
        "trainer.train_batch_size": work.num_prompts,
        "trainer.policy_mini_batch_size": work.num_prompts,
        "trainer.max_prompt_length": work.max_prompt_tokens,
        "trainer.max_training_steps": work.num_steps,
        "trainer.epochs": work.num_steps,
        "trainer.placement.colocate_all": True,
        "trainer.placement.policy_num_gpus_per_node": work.num_gpus,
        "trainer.eval_before_train": False,
        "trainer.eval_interval": -1,
        "trainer.ckpt_interval": -1,
        "trainer.resume_mode": "none",
        "trainer.logger": "console",
        "trainer.print_example_interval": -1,
        "trainer.enable_ray_gpu_monitor": False,
        "trainer.ckpt_path": directory / "checkpoints",
        "trainer.export_path": directory / "exports",
        "trainer.log_path": directory / "logs",
        **skyrl_trainer(work),
        **skyrl_engine(work),
    }
    words = [f"{name}={value}" for name, value in settings.items()]
    extra = shlex.split(os.environ.get(SKYRL_FLAGS_VARIABLE, ""))
    return [python, str(HERE / "race_skyrl.py"), str(directory / "steps.jsonl"), *words, *extra]


def skyrl_trainer(work: Work) -> dict[str, object]:
    """Return the settings of SkyRL's trainer: those of `verl_trainer`, and an optimizer that stays on the GPU during rollouts.

    Prompts are read in the process itself, since worker processes would start again in each epoch. SkyRL has no Liger kernels.
    """
    return {
        "data.dataloader.num_workers": 0,
        "trainer.strategy": "fsdp",
        "trainer.policy.model.path": work.model,
        "trainer.policy.optimizer_config.lr": work.lr,
        "trainer.policy.optimizer_config.offload_after_step": False,
        "trainer.gradient_checkpointing": False,
        "trainer.remove_microbatch_padding": True,
        "trainer.max_tokens_per_microbatch": max(32768, work.max_prompt_tokens + work.max_tokens),
        "trainer.algorithm.loss_reduction": "sequence_mean",
    }


def skyrl_engine(work: Work) -> dict[str, object]:
    """Return the settings of SkyRL's engines, one per GPU: those of `verl_engine`; without statistics, for which Ray needs a dashboard."""
    requests = work.batch // work.num_gpus
    return {
        "generator.batched": True,
        "generator.n_samples_per_prompt": work.num_samples,
        "generator.sampling_params.max_generate_length": work.max_tokens,
        "generator.inference_engine.num_engines": work.num_gpus,
        "generator.inference_engine.tensor_parallel_size": 1,
        "generator.inference_engine.gpu_memory_utilization": 0.4,
        "generator.inference_engine.max_num_seqs": requests,
        "generator.inference_engine.engine_init_kwargs.max_cudagraph_capture_size": requests,
        "generator.inference_engine.enable_ray_prometheus_stats": False,
        "generator.inference_engine.router_init_kwargs.policy": "round_robin",
    }


def read_fuligo(line: dict, work: Work) -> tuple[float, float]:
    return line["rollout/reward_mean"], line["rollout/num_tokens"]


def read_trl(line: dict, work: Work) -> tuple[float, float]:
    return line["reward"], line["tokens"]


def read_verl(line: dict, work: Work) -> tuple[float, float]:
    return line["data"]["critic/score/mean"], line["data"]["response_length/mean"] * work.batch


def read_skyrl(line: dict, work: Work) -> tuple[float, float]:
    return line["reward/avg_raw_reward"], line["generate/avg_num_tokens"] * work.batch


SKYRL_ENVIRONMENT = {"SKYRL_GENERATE_CONCURRENCY_PER_ENGINE": "0"}
"""Send all requests of a step at once; SkyRL's default is 512 per engine."""
VERL_ENVIRONMENT = {"VERL_FILE_LOGGER_PATH": "{directory}/steps.jsonl"}
COMPETITORS = {
    "fuligo": Competitor(fuligo, "run/metrics.jsonl", read_fuligo),
    "fuligo-lora": Competitor(with_lora(fuligo), "run/metrics.jsonl", read_fuligo),
    "trl-generate": Competitor(trl("generate"), "steps.jsonl", read_trl),
    "trl-generate-lora": Competitor(with_lora(trl("generate")), "steps.jsonl", read_trl),
    "trl-vllm": Competitor(trl("vllm"), "steps.jsonl", read_trl),
    "trl-vllm-lora": Competitor(with_lora(trl("vllm")), "steps.jsonl", read_trl),
    "skyrl": Competitor(skyrl, "steps.jsonl", read_skyrl, SKYRL_ENVIRONMENT),
    "verl-sglang": Competitor(verl("sglang", recomputes=True), "steps.jsonl", read_verl, VERL_ENVIRONMENT),
    "verl-sglang-bypass": Competitor(verl("sglang", recomputes=False), "steps.jsonl", read_verl, VERL_ENVIRONMENT),
    "verl-vllm": Competitor(verl("vllm", recomputes=True), "steps.jsonl", read_verl, VERL_ENVIRONMENT),
    "verl-vllm-bypass": Competitor(verl("vllm", recomputes=False), "steps.jsonl", read_verl, VERL_ENVIRONMENT),
}
