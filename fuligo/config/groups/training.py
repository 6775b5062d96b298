"""Flags of training: algorithm, batches, parallel layout, optimizer."""

from __future__ import annotations

from typing import Literal

from fuligo.algorithms.estimators import EstimatorName
from fuligo.config.flag import FlagGroup, flag
from fuligo.config.secret import Url


class AlgorithmFlags(FlagGroup):
    """Advantages and loss."""

    loss_type: Literal["policy_loss", "sft_loss", "custom_loss"] = flag("policy_loss", "loss to minimise", source="slime")
    advantage_estimator: EstimatorName = flag("grpo", "estimator that turns rewards into advantages", source="slime")
    disable_grpo_std_normalization: bool = flag(
        False, "subtract the group mean, but do not divide by the standard deviation", source="slime"
    )
    disable_rewards_normalization: bool = flag(False, "use raw rewards, without a group baseline", source="slime")
    normalize_advantages: bool = flag(False, "whiten advantages over all unmasked tokens of the rollout", source="slime")
    gamma: float = flag(1.0, "discount per token", source="slime", ge=0, le=1)
    lambd: float = flag(1.0, "lambda of generalised advantage estimation", source="slime", ge=0, le=1)
    value_clip: float = flag(0.2, "clip distance of the value loss", source="slime", gt=0)
    num_critic_only_steps: int = flag(
        0, "rollouts at the start in which only the value model learns", unit="rollouts", source="slime", ge=0
    )
    eps_clip: float = flag(0.2, "lower clip distance of the ratio", source="slime", ge=0)
    eps_clip_high: float | None = flag(None, "upper clip distance (default --eps-clip)", source="slime", ge=0)
    eps_clip_c: float | None = flag(None, "dual clip: upper bound of the ratio for negative advantages", source="slime", gt=1)
    entropy_coef: float = flag(0.0, "weight of the entropy bonus", source="slime")
    use_kl_loss: bool = flag(False, "add KL to the reference to the loss", source="slime")
    kl_loss_coef: float = flag(0.0, "weight of the KL loss", source="slime", ge=0)
    kl_loss_type: Literal["k1", "k2", "k3", "low_var_kl"] = flag("k1", "estimator of the KL", source="slime")
    use_unbiased_kl: bool = flag(False, "multiply the KL estimate by pi/pi_old", source="slime")
    kl_coef: float = flag(0.0, "weight of the KL subtracted from the rewards", source="slime", ge=0)
    calculate_per_token_loss: bool = flag(False, "average over all tokens of the global batch instead of per sample first", source="slime")
    use_tis: bool = flag(False, "correct the difference between engine and trainer by truncated importance sampling", source="slime")
    tis_mode: Literal["truncate", "icepop", "sequence-mask"] = flag(
        "truncate",
        "truncate clamps weights to the bounds; icepop masks tokens outside; sequence-mask whole responses, by geometric mean",
    )
    tis_clip: float = flag(2.0, "upper bound of the importance weight", source="slime", gt=0)
    tis_clip_low: float = flag(0.0, "lower bound of the importance weight", source="slime", ge=0)
    use_rollout_logprobs: bool = flag(False, "use the engine's log-probabilities as those of the old policy", source="slime")
    use_opsm: bool = flag(
        False, "off-policy sequence masking: ignore responses with negative advantage that are too far off-policy", source="slime"
    )
    opsm_delta: float = flag(
        1e-4, "threshold of --use-opsm: mean of log(old/policy) over the tokens of a response", unit="nats", source="slime", ge=0
    )
    use_routing_replay: bool = flag(
        False,
        "MoE: repeat the expert choices of the pass that computed the old log-probabilities (with one optimizer step per rollout, of the "
        "step itself)",
        source="slime",
    )
    use_rollout_routing_replay: bool = flag(
        False,
        "MoE: repeat the engine's expert choices (R3) in training and in the pass for old log-probabilities",
        source="slime",
    )
    use_opd: bool = flag(False, "on-policy distillation: learn from a teacher's log-probabilities", source="slime")
    opd_type: Literal["trainer", "engine", "megatron", "sglang"] | None = flag(
        None,
        "side that computes the teacher's log-probabilities: trainer (or megatron), or engine (or sglang); default: the side for which a "
        "teacher is given",
        source="slime",
    )
    opd_kl_coef: float = flag(1.0, "weight of the reverse KL to the teacher, subtracted from the advantages", source="slime", ge=0)
    opd_teacher_load: str | None = flag(
        None, "weights of the teacher for the trainer: a Hugging Face directory or a distributed checkpoint", source="slime", path=True
    )
    opd_teacher_url: Url | None = flag(
        None, "http://host:port of an engine or router that serves the teacher; default: the model named teacher in --sglang-config"
    )
    custom_advantage_function_path: str | None = flag(None, "hook: replaces the advantage estimator", source="slime")
    custom_loss_function_path: str | None = flag(None, "hook: (args, batch, logprobs) -> (loss, metrics)", source="slime")
    custom_tis_function_path: str | None = flag(None, "hook: replaces the importance weights", source="slime")


class TrainFlags(FlagGroup):
    """Batches, micro-batches, seeds and trained parameters."""

    global_batch_size: int | None = flag(None, "samples per optimizer step", unit="samples", source="slime", ge=1)
    num_steps_per_rollout: int | None = flag(None, "optimizer steps per rollout", source="slime", ge=1)
    micro_batch_size: int | None = flag(
        None,
        "samples per micro-batch, without --use-dynamic-batch-size (default: packed up to 8192 tokens)",
        unit="samples",
        source="megatron",
        ge=1,
    )
    use_dynamic_batch_size: bool = flag(False, "pack samples into micro-batches of at most --max-tokens-per-gpu", source="slime")
    max_tokens_per_gpu: int | None = flag(
        None, "tokens per packed micro-batch; a longer sample gets its own", unit="tokens", source="slime", ge=1
    )
    log_probs_max_tokens_per_gpu: int | None = flag(
        None,
        "tokens per packed micro-batch in passes without gradients (default --max-tokens-per-gpu)",
        unit="tokens",
        source="slime",
        ge=1,
    )
    log_probs_chunk_size: int = flag(4096, "tokens whose logits are in memory at a time", unit="tokens", source="slime", ge=1)
    data_pad_size_multiplier: int = flag(128, "pad packed rows to a multiple of this", unit="tokens", source="slime", ge=1)
    balance_data: bool = flag(False, "balance data-parallel ranks by FLOPs", source="slime")
    seed: int = flag(1234, "seed of the trainer's random numbers", source="megatron", ge=0)
    only_train_params_name_list: list[str] = flag(
        [], "regexes of parameters to train, by their names in the checkpoint (or in Megatron); all others are frozen", source="slime"
    )
    freeze_params_name_list: list[str] = flag([], "regexes of parameters to freeze, by the same names", source="slime")
    mtp_num_layers: int | None = flag(None, "layers for multi-token prediction (MTP) to load", unit="layers", source="megatron", ge=0)
    enable_mtp_training: bool = flag(False, "train the MTP layers; otherwise they stay frozen", source="slime")
    mtp_loss_scaling_factor: float = flag(0.2, "weight of the MTP loss", source="megatron", ge=0)
    mtp_joint_training: bool = flag(False, "let the MTP loss also train the model, embedding and head instead of the MTP layers alone")
    ref_update_interval: int | None = flag(
        None, "rollouts between copies of the policy's weights into the reference", unit="rollouts", source="slime", ge=1
    )
    before_train_step_path: str | None = flag(None, "hook: (args, rollout_id, batch), called before training on every rollout")


class ParallelFlags(FlagGroup):
    """Parallelism and recomputation of the Megatron trainer. Names and meanings are Megatron's."""

    tensor_model_parallel_size: int = flag(1, "tensor-parallel size (TP): GPUs that share each matrix", source="megatron", ge=1)
    sequence_parallel: bool = flag(False, "split norms and residuals along the sequence over the TP group (SP)", source="megatron")
    pipeline_model_parallel_size: int = flag(1, "pipeline stages (PP)", source="megatron", ge=1)
    virtual_pipeline_model_parallel_size: int | None = flag(
        None, "interleaved stages per pipeline rank (VPP; default: one)", source="megatron", ge=1
    )
    decoder_first_pipeline_num_layers: int | None = flag(
        None, "layers of the first stage; the middle stages share the rest equally", unit="layers", source="megatron", ge=1
    )
    decoder_last_pipeline_num_layers: int | None = flag(
        None, "layers of the last stage; the middle stages share the rest equally", unit="layers", source="megatron", ge=1
    )
    context_parallel_size: int = flag(1, "context-parallel size (CP): GPUs that share each sequence", source="megatron", ge=1)
    allgather_cp: bool = flag(False, "gather keys and values for context parallelism (required by sparse attention)", source="slime")
    expert_model_parallel_size: int = flag(1, "expert-parallel size (EP): groups of GPUs that share the experts", source="megatron", ge=1)
    expert_tensor_parallel_size: int | None = flag(
        None, "tensor-parallel size within an expert (ETP; default --tensor-model-parallel-size)", source="megatron", ge=1
    )
    recompute_granularity: Literal["full", "selective"] | None = flag(
        None, "recompute activations in the backward pass: of whole layers (full), or of --recompute-modules (selective)", source="megatron"
    )
    recompute_method: Literal["uniform", "block"] | None = flag(
        None, "full recomputation in chunks of layers (uniform), or of the first layers of each stage (block)", source="megatron"
    )
    recompute_num_layers: int | None = flag(
        None, "layers per chunk (uniform), or layers to recompute (block)", unit="layers", source="megatron", ge=1
    )
    recompute_modules: list[str] = flag(
        [],
        "modules of selective recomputation: core_attn, moe_act, layernorm, mla_up_proj, mlp, moe (default core_attn)",
        source="megatron",
    )
    moe_token_dispatcher_type: Literal["allgather", "alltoall", "flex"] = flag(
        "allgather", "dispatcher that sends tokens to their experts", source="megatron"
    )
    moe_enable_deepep: bool = flag(False, "dispatch with DeepEP; needs --moe-token-dispatcher-type flex", source="megatron")
    attention_backend: Literal["auto", "flash", "fused", "unfused", "local"] = flag(
        "auto", "attention kernels of TransformerEngine", source="megatron"
    )
    accumulate_allreduce_grads_in_fp32: bool = flag(
        False, "reduce gradients in fp32; this is the default unless --grad-reduce-in-bf16 is given", source="megatron"
    )


class OptimizerFlags(FlagGroup):
    """AdamW and its learning-rate schedule."""

    optimizer: Literal["adam"] = flag("adam", "optimizer", source="megatron")
    lr: float = flag(1e-6, "peak learning rate", source="megatron", ge=0)
    min_lr: float = flag(0.0, "learning rate at the end of the decay", source="megatron", ge=0)
    lr_decay_style: Literal["constant", "linear", "cosine"] = flag(
        "constant", "learning-rate schedule after the warm-up", source="megatron"
    )
    lr_decay_iters: int | None = flag(
        None, "optimizer steps until --min-lr (default: the whole run)", unit="steps", source="megatron", ge=1
    )
    lr_warmup_iters: int = flag(0, "optimizer steps of linear warm-up", unit="steps", source="megatron", ge=0)
    critic_lr: float | None = flag(None, "peak learning rate of the value model (default --lr)", source="slime", ge=0)
    critic_lr_warmup_iters: int = flag(0, "optimizer steps of linear warm-up for the value model", unit="steps", source="slime", ge=0)
    weight_decay: float = flag(0.01, "decoupled weight decay; not applied to norms and biases", source="megatron", ge=0)
    adam_beta1: float = flag(0.9, "Adam's beta 1", source="megatron", ge=0, lt=1)
    adam_beta2: float = flag(0.999, "Adam's beta 2", source="megatron", ge=0, lt=1)
    adam_eps: float = flag(1e-8, "Adam's epsilon", source="megatron", gt=0)
    clip_grad: float = flag(1.0, "maximum global gradient norm; 0 disables clipping", source="megatron", ge=0)
    use_distributed_optimizer: bool = flag(True, "shard the optimizer state over the data-parallel ranks", source="megatron")
    optimizer_cpu_offload: bool = flag(False, "keep the optimizer state and run the step on the CPU", source="megatron")
    overlap_cpu_optimizer_d2h_h2d: bool = flag(
        False, "overlap copies of gradients and weights with the CPU step; with --optimizer-cpu-offload", source="megatron"
    )
    use_precision_aware_optimizer: bool = flag(
        False, "let the optimizer hold the fp32 weights and keep its state in lower precision", source="megatron"
    )
