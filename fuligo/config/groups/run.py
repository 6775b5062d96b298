"""Flags of the run itself: processes, models, engines, checkpoints, output."""

import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Literal

from fuligo.config.flag import FlagGroup, flag, megatron, slime
from fuligo.config.secret import Environment
from fuligo.config.server_groups import ModelServers


class ClusterFlags(FlagGroup):
    """Processes of the run and their devices."""

    device: Literal["auto", "cpu", "cuda"] = flag("auto", "device to compute on; auto uses CUDA if available")
    train_backend: Literal["auto", "torch", "megatron"] = flag("auto", "trainer; auto: torch unless a Megatron flag is given")
    rollout_backend: Literal["auto", "embedded", "sglang"] = flag(
        "auto",
        "engine; auto: sglang with the Megatron trainer, an SGLang flag, --rollout-num-gpus* or external engines, and on a GPU if SGLang "
        "is installed; else embedded",
    )
    launcher: Literal["auto", "local", "ray"] = flag(
        "auto", "launcher of ranks and engines; auto: ray in a Ray job, with RAY_ADDRESS set, or for several nodes, else local"
    )
    actor_num_nodes: int = slime(1, "trainer nodes", ge=1)
    actor_num_gpus_per_node: int | None = slime(
        None,
        "trainer processes per node, one per GPU (default: with megatron all GPUs of the node, at most 8; with torch or on a CPU, 1)",
        ge=1,
    )
    num_gpus_per_node: int = slime(8, "GPUs per node", ge=1)
    rollout_num_gpus: int | None = slime(
        None, "GPUs of all engines (default with --colocate: the trainer's); 0: external engines only", ge=0
    )
    rollout_num_gpus_per_engine: int | None = slime(
        None, "GPUs per engine (default 1); SGLang's tensor-parallel size is this divided by --sglang-pp-size", ge=1
    )
    colocate: bool | None = slime(
        None,
        "trainer and engines share GPUs and take turns; engines release their memory while the trainer works "
        "(default: if the GPUs are too few for both, or one of two would always be idle; --no-colocate keeps them apart)",
    )
    offload_train: bool | None = slime(
        None,
        "with --colocate, move the trainer to host memory while the engines sample (default: unless there is room beside the KV cache)",
    )
    hostfile: str | None = slime(None, "file with the nodes of the cluster for fuligo launch, one `address slots=8` per line", path=True)
    env: Environment = slime(
        Environment(), "environment variables of all processes: a JSON object, or the name of a variable to copy from this environment"
    )


class ModelFlags(FlagGroup):
    """Policy model."""

    hf_checkpoint: str | None = slime(
        None, "Hugging Face directory, or ORG/NAME[@REVISION] on the Hub: tokenizer, engine weights, model shape", path=True
    )
    model_config_file: str | None = flag(
        None, "config.json (or its directory) to plan with if the checkpoint is not on this machine", path=True
    )
    trust_remote_code: bool = flag(
        False, "let tokenizers and SGLang run Python code of the checkpoint; without this flag, a checkpoint that needs it is refused"
    )
    override_model_config: bool = slime(
        False,
        "let MODEL_ARGS (Megatron's flags for the model's shape) override the checkpoint's config.json; without this flag, a disagreement "
        "is an error",
    )
    custom_model_provider_path: str | None = slime(
        None, "hook: (pre_process, post_process, vp_stage=...) -> Megatron model of a pipeline stage"
    )
    precision: Literal["auto", "fp32", "bf16"] = flag(
        "auto", "compute dtype of the trainer (master weights stay fp32); auto: bf16 on CUDA, fp32 on a CPU"
    )
    gradient_checkpointing: bool = flag(False, "recompute every layer's activations in the backward pass (torch trainer)")
    torch_compile: bool | None = flag(
        None, "compile the layers of dense models on CUDA in bf16 (torch trainer; default: if the model has at least 50 M parameters)"
    )


class CheckpointFlags(FlagGroup):
    """Sources and destinations of weights and training state."""

    load: str | None = slime(
        None, "checkpoints to resume from, or weights to start from; if missing or empty, the run starts from --ref-load", path=True
    )
    ref_load: str | None = slime(None, "initial weights and reference model (default --hf-checkpoint)", path=True)
    critic_load: str | None = slime(None, "initial weights of the value model (default: the policy's)", path=True)
    save: str | None = slime(None, "directory for checkpoints (default: checkpoints/ in the run directory)", path=True)
    save_interval: int | None = slime(
        None, "rollouts between checkpoints (default: only after the last rollout, see --save-last)", unit="rollouts", ge=1
    )
    save_last: bool = flag(
        True,
        "save a checkpoint after the last rollout, and one of the last complete rollout if Ctrl-C or a failure ends the run; with "
        "--no-save-last, only --save-interval and --save-on-sigterm save one",
    )
    save_on_sigterm: float | None = flag(
        None,
        "on SIGTERM, finish the step in progress and save the last complete rollout if both take at most this long (default: exit at once)",
        unit="s",
        gt=0,
    )
    save_hf: str | None = slime(None, "also export Hugging Face directories here; fuligo fills in {rollout_id}", path=True)
    ckpt_step: int | None = megatron(None, "resume from this iteration instead of the tracker file's", ge=0)
    async_save: bool = megatron(False, "write checkpoints in the background while training continues")
    push_to_hub: str | None = flag(
        None, "also upload every export of --save-hf to ORG/NAME on the Hugging Face Hub; a new repository is private"
    )
    keep_checkpoints: int | None = flag(
        2,
        "keep the newest N checkpoints and all that flags such as --load refer to (none: keep all); never removes exports of --save-hf",
        ge=1,
    )
    max_restarts: int = flag(
        0, "restart the trainer from the newest checkpoint after the loss of a rank, at most N times; engines stay loaded", ge=0
    )


class EngineFlags(FlagGroup):
    """Inference engines."""

    rollout_external_engine_addrs: list[str] = slime([], "host:port of running engines to use (external engines)")
    sglang_config: list[ModelServers] | None = slime(
        None, "YAML file of engine groups, for prefill and decode or for several models (a config file may contain the list itself)"
    )
    use_fault_tolerance: bool = slime(False, "restart a dead engine with the current weights and retry its requests on other engines")
    rollout_health_check_interval: float = slime(30.0, "time between health checks of an engine", unit="s", gt=0)
    rollout_health_check_timeout: float = slime(
        30.0, "deadline of a health check; control calls that an engine answers between two steps get at least 120 s", unit="s", gt=0
    )
    embedded_max_running_requests: int = flag(256, "maximum number of requests in a decoding batch", unit="requests", ge=1)
    embedded_max_total_tokens: int | None = flag(
        None, "capacity of the KV cache (default: enough for the longest requests)", unit="tokens", ge=1
    )
    embedded_dtype: Literal["auto", "fp32", "bf16"] = flag("auto", "compute dtype; auto: bf16 on CUDA, fp32 on a CPU")
    embedded_num_threads: int | None = flag(None, "CPU threads of the engine (default: one fewer than the CPU cores)", ge=1)
    engine_start_timeout_s: float = flag(
        600.0, "deadline for starting an engine, and for calls that load, release or restore all of its weights or memory", unit="s", gt=0
    )
    engine_python: str | None = flag(
        None, "Python interpreter with SGLang and its router (default: the one that runs fuligo, or .venv-sglang next to it)", path=True
    )
    engine_env: Environment = flag(
        Environment(), "environment variables of engines and router, in the form of --env, whose values they override"
    )

    @property
    def interpreter(self) -> str:
        """Python interpreter of SGLang and its router; `make install-gpu` gives them an environment next to fuligo's."""
        beside = Path(sys.prefix).parent / ".venv-sglang" / "bin" / "python"
        if self.engine_python is None and find_spec("sglang") is None and beside.is_file():
            return str(beside)
        return self.engine_python or sys.executable


class WeightSyncFlags(FlagGroup):
    """Weight sync from the trainer to the engines."""

    update_weight_transport: Literal["auto", "tensor", "nccl", "gloo", "disk"] = slime(
        "auto",
        "transport of weights to the engines; auto: disk to external engines, nccl to SGLang engines on separate GPUs, else tensor (shared "
        "memory), or gloo between machines",
    )
    update_weight_mode: Literal["full", "delta"] = slime("full", "send all weights, or only those that changed since the last weight sync")
    update_weight_buffer_size: int = slime(512 * 1024**2, "size of one bucket of weights", unit="bytes", ge=1)
    update_weights_interval: int = slime(1, "rollouts between weight syncs", unit="rollouts", ge=1)
    update_weight_requests: Literal["abort", "continue"] = flag(
        "abort",
        "requests in flight at a weight sync (--async-mode full): abort them and send them again with their tokens, or continue them in "
        "the engine with the new weights and their KV cache",
    )
    check_weight_update_equal: bool = slime(False, "after each weight sync, verify that the engine's weights equal the trainer's")


class ObservabilityFlags(FlagGroup):
    """Run directory, console output and metric sinks."""

    run_dir: str | None = flag(None, "run directory (default runs/<name>)", path=True)
    name: str | None = flag(None, "run name (default: date and time)")
    progress: Literal["auto", "rich", "plain", "none"] = flag("auto", "console display; auto: rich on a terminal, plain elsewhere")
    shared_outputs: bool = flag(
        False, "let other users read the run's files, as far as the umask allows (default: private, since samples may be confidential)"
    )
    save_samples: bool = flag(True, "write all samples to samples/rollout_*.parquet")
    use_tensorboard: bool = flag(False, "also write TensorBoard events to the run directory")
    use_wandb: bool = slime(False, "also report to Weights & Biases")
    wandb_project: str | None = slime(None, "W&B project")
    wandb_group: str | None = slime(None, "W&B group")
    wandb_mode: Literal["online", "offline", "disabled"] | None = slime(None, "W&B mode")
    use_trackio: bool = flag(False, "also report to Trackio, in the directory or Space that its environment variables name")
    use_mlflow: bool = flag(False, "also report to MLflow, at MLFLOW_TRACKING_URI")
    tracking_project: str = flag("fuligo", "Trackio's project, or MLflow's experiment")
    profile: list[int] = flag(
        [], "rollouts to profile; RUN_DIR/profile gets traces of training and of SGLang engines, and on GPUs a memory snapshot"
    )
    profile_ranks: list[int] = flag([0], "trainer ranks to profile")
    custom_rollout_log_function_path: str | None = slime(
        None, "hook: (rollout_id, args, samples, metrics, rollout_time); if it returns True, the rollout is not reported to trackers"
    )
    custom_eval_rollout_log_function_path: str | None = slime(
        None, "hook: (rollout_id, args, data, metrics); if it returns True, the evaluation is not reported to trackers"
    )
    custom_config_path: str | None = slime(None, "YAML file with additional attributes of args, for hooks", path=True)
    sink_path: str | None = flag(
        None, "hook: class (args, run_dir) with close() and write(record), which receives the metrics of every step and evaluation"
    )


class DebugFlags(FlagGroup):
    """Runs of the trainer or the engines by themselves, and runs that the memory plan advises against."""

    ignore_memory_plan: bool = flag(False, "start although the plan finds that GPUs have too little memory; it may overestimate")
    debug_rollout_only: bool = slime(False, "sample and score, never train")
    debug_train_only: bool = slime(False, "train on --load-debug-rollout-data, without engines")
    save_debug_rollout_data: str | None = slime(None, "file for the samples of each rollout; fuligo fills in {rollout_id}", path=True)
    load_debug_rollout_data: str | None = slime(None, "file with saved samples of each rollout; fuligo fills in {rollout_id}", path=True)
