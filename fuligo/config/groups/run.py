"""Flags of the run itself: processes, models, engines, checkpoints, output."""

from __future__ import annotations

from typing import Literal

from fuligo.config.flag import FlagGroup, flag
from fuligo.config.secret import Environment
from fuligo.config.server_groups import ModelServers


class ClusterFlags(FlagGroup):
    """Processes of the run and their devices."""

    device: Literal["auto", "cpu", "cuda"] = flag("auto", "device to compute on; auto uses CUDA if available")
    train_backend: Literal["auto", "torch", "megatron"] = flag("auto", "trainer; auto: torch unless a Megatron flag is given")
    rollout_backend: Literal["auto", "embedded", "sglang"] = flag(
        "auto",
        "engine; auto: embedded unless the trainer is megatron or you give an SGLang flag, --rollout-num-gpus* or external engines",
    )
    launcher: Literal["auto", "local", "ray"] = flag(
        "auto", "launcher of ranks and engines; auto: ray in a Ray job, with RAY_ADDRESS set, or for several nodes, else local"
    )
    actor_num_nodes: int = flag(1, "trainer nodes", source="slime", ge=1)
    actor_num_gpus_per_node: int | None = flag(
        None,
        "trainer processes per node, one per GPU (default: 8 with megatron, 1 with torch or on a CPU)",
        source="slime",
        ge=1,
    )
    num_gpus_per_node: int = flag(8, "GPUs per node", source="slime", ge=1)
    rollout_num_gpus: int | None = flag(
        None, "GPUs of all engines (default with --colocate: the trainer's); 0: external engines only", source="slime", ge=0
    )
    rollout_num_gpus_per_engine: int | None = flag(
        None, "GPUs per engine (default 1); SGLang's tensor-parallel size is this / its pipeline size", source="slime", ge=1
    )
    colocate: bool = flag(False, "trainer and engines share GPUs and take turns; each is offloaded while the other works", source="slime")
    hostfile: str | None = flag(
        None, "file with the nodes of the cluster for fuligo launch, one `address slots=8` per line", source="slime", path=True
    )
    env: Environment = flag(
        Environment(),
        "environment variables of all processes: a JSON object, or the name of one to take from this environment",
        source="slime",
    )


class ModelFlags(FlagGroup):
    """Policy model."""

    hf_checkpoint: str | None = flag(None, "Hugging Face directory: tokenizer, engine weights, model shape", source="slime", path=True)
    model_config_file: str | None = flag(
        None, "config.json (or its directory) to plan with if the checkpoint is not on this machine", path=True
    )
    trust_remote_code: bool = flag(
        False, "let tokenizers and SGLang run Python code of the checkpoint; without this flag, a checkpoint that needs it is refused"
    )
    override_model_config: bool = flag(
        False, "let MODEL_ARGS override the checkpoint's config.json; without this flag a disagreement is an error", source="slime"
    )
    custom_model_provider_path: str | None = flag(
        None, "hook: (pre_process, post_process, vp_stage=...), builds Megatron's model", source="slime"
    )
    precision: Literal["auto", "fp32", "bf16"] = flag(
        "auto", "compute dtype of the trainer (master weights stay fp32); auto: bf16 on CUDA, fp32 on a CPU"
    )
    gradient_checkpointing: bool = flag(False, "recompute every layer's activations in the backward pass")


class CheckpointFlags(FlagGroup):
    """Sources and destinations of weights and training state."""

    load: str | None = flag(
        None, "directory to resume from; if it is empty or has no tracker file, the run starts from --ref-load", source="slime", path=True
    )
    ref_load: str | None = flag(None, "initial weights and reference model (default --hf-checkpoint)", source="slime", path=True)
    critic_load: str | None = flag(None, "initial weights of the value model (default: the policy's)", source="slime", path=True)
    save: str | None = flag(None, "directory for checkpoints (default: checkpoints/ in the run directory)", source="slime", path=True)
    save_interval: int | None = flag(
        None, "rollouts between checkpoints; the last rollout is always saved", unit="rollouts", source="slime", ge=1
    )
    save_on_sigterm: float | None = flag(
        None,
        "on SIGTERM, finish the step in progress and save the last complete rollout if both take at most this long (default: end at once)",
        unit="s",
        gt=0,
    )
    save_hf: str | None = flag(None, "also export Hugging Face directories here; fuligo fills in {rollout_id}", source="slime", path=True)
    ckpt_step: int | None = flag(None, "resume from this iteration instead of the tracker file's", source="megatron", ge=0)
    async_save: bool = flag(False, "write checkpoints in the background while training continues", source="megatron")
    keep_checkpoints: int | None = flag(None, "keep only the newest N checkpoints", ge=1)


class EngineFlags(FlagGroup):
    """Inference engines that sample."""

    rollout_external_engine_addrs: list[str] = flag([], "host:port of running engines to use (external engines)", source="slime")
    sglang_config: list[ModelServers] | None = flag(
        None,
        "YAML file of engine groups, for prefill and decode or for several models (in a config file also its list)",
        source="slime",
    )
    use_fault_tolerance: bool = flag(
        False, "restart a dead engine with the current weights and retry its requests on other engines", source="slime"
    )
    rollout_health_check_interval: float = flag(30.0, "time between health checks of an engine", unit="s", source="slime", gt=0)
    rollout_health_check_timeout: float = flag(
        30.0,
        "deadline of a health check; if above 120 s, also of calls that an engine answers between two decoding steps",
        unit="s",
        source="slime",
        gt=0,
    )
    embedded_max_running_requests: int = flag(256, "requests that the engine decodes together", unit="requests", ge=1)
    embedded_max_total_tokens: int | None = flag(
        None, "capacity of the KV cache (default: enough for the longest requests)", unit="tokens", ge=1
    )
    embedded_dtype: Literal["auto", "fp32", "bf16"] = flag("auto", "compute dtype; auto: bf16 on CUDA, fp32 on a CPU")
    embedded_num_threads: int | None = flag(None, "CPU threads of the engine (default: one fewer than cores)", ge=1)
    engine_start_timeout_s: float = flag(
        600.0, "deadline for starting an engine, and for calls that move all its weights or memory", unit="s", gt=0
    )
    engine_python: str | None = flag(
        None, "Python interpreter with SGLang and its router installed (default: the one that runs fuligo)", path=True
    )
    engine_env: Environment = flag(Environment(), "environment variables of engines and router, given as --env, which they override")


class WeightSyncFlags(FlagGroup):
    """Weight sync from the trainer to the engines."""

    update_weight_transport: Literal["auto", "tensor", "nccl", "gloo", "disk"] = flag(
        "auto", "auto: tensor for shared GPUs or processes, nccl to separate SGLang GPUs, else disk", source="slime"
    )
    update_weight_mode: Literal["full", "delta"] = flag(
        "full", "send all weights, or what changed since the last weight sync", source="slime"
    )
    update_weight_buffer_size: int = flag(512 * 1024**2, "size of one bucket of weights", unit="bytes", source="slime", ge=1)
    update_weights_interval: int = flag(1, "rollouts between weight syncs", unit="rollouts", source="slime", ge=1)
    check_weight_update_equal: bool = flag(
        False, "after each weight sync, verify that the engine's weights equal the trainer's", source="slime"
    )


class ObservabilityFlags(FlagGroup):
    """Run directory, console output and metric sinks."""

    run_dir: str | None = flag(None, "run directory (default runs/<name>)", path=True)
    name: str | None = flag(None, "run name (default: date and time)")
    progress: Literal["auto", "rich", "plain", "none"] = flag("auto", "console display; auto: rich on a terminal, plain elsewhere")
    shared_outputs: bool = flag(
        False, "let other users read what the run writes, as the umask says (default: its own user alone; samples may be confidential)"
    )
    save_samples: bool = flag(True, "write samples/rollout_*.parquet (true or false)")
    use_tensorboard: bool = flag(False, "also write TensorBoard events to the run directory")
    use_wandb: bool = flag(False, "also report to Weights & Biases", source="slime")
    wandb_project: str | None = flag(None, "W&B project", source="slime")
    wandb_group: str | None = flag(None, "W&B group", source="slime")
    wandb_mode: Literal["online", "offline", "disabled"] | None = flag(None, "W&B mode", source="slime")
    sink_path: str | None = flag(None, "hook: class (args, run_dir) whose write(record) receives every step and evaluation")


class DebugFlags(FlagGroup):
    """Runs of one side of the system alone, and against the plan."""

    ignore_memory_plan: bool = flag(False, "start although the plan finds that GPUs have too little memory; it may overestimate")
    debug_rollout_only: bool = flag(False, "sample and score, never train", source="slime")
    debug_train_only: bool = flag(False, "train on --load-debug-rollout-data, start no engine", source="slime")
    save_debug_rollout_data: str | None = flag(
        None, "file for the samples of each rollout; fuligo fills in {rollout_id}", source="slime", path=True
    )
    load_debug_rollout_data: str | None = flag(
        None, "file with saved samples of each rollout; fuligo fills in {rollout_id}", source="slime", path=True
    )
