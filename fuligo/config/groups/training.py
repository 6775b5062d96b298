"""Flags of training: algorithm, batches, parallel layout, optimizer."""

from typing import Literal

from fuligo.algorithms.estimators import EstimatorName
from fuligo.config.flag import FlagGroup, flag, megatron, slime
from fuligo.config.secret import Url


class AlgorithmFlags(FlagGroup):
    """Advantages and loss."""

    loss_type: Literal["policy_loss", "sft_loss", "custom_loss"] = slime("policy_loss", "loss to minimize")
    advantage_estimator: EstimatorName = slime("grpo", "estimator that turns rewards into advantages")
    disable_grpo_std_normalization: bool = slime(False, "subtract the group mean, but do not divide by the standard deviation")
    disable_rewards_normalization: bool = slime(False, "use raw rewards, without a group baseline")
    normalize_advantages: bool = slime(False, "whiten advantages over all unmasked tokens of the rollout")
    gamma: float = slime(1.0, "discount per token", ge=0, le=1)
    turn_rewards: bool = flag(
        False, "place the reward of each turn of an environment at the end of that turn, instead of their sum at the end of the episode"
    )
    lambd: float = slime(1.0, "lambda of generalized advantage estimation", ge=0, le=1)
    value_clip: float = slime(0.2, "clip distance of the value loss", gt=0)
    num_critic_only_steps: int = slime(0, "rollouts at the start in which only the value model learns", unit="rollouts", ge=0)
    eps_clip: float = slime(0.2, "lower clip distance of the ratio", ge=0)
    eps_clip_high: float | None = slime(None, "upper clip distance (default --eps-clip)", ge=0)
    eps_clip_c: float | None = slime(None, "dual clip: upper bound of the ratio for negative advantages (default: no dual clip)", gt=1)
    entropy_coef: float = slime(0.0, "weight of the entropy bonus")
    use_kl_loss: bool = slime(False, "add the KL to the reference model as a term of the loss")
    kl_loss_coef: float = slime(0.0, "weight of the KL loss", ge=0)
    kl_loss_type: Literal["k1", "k2", "k3", "low_var_kl"] = slime("k1", "estimator of the KL")
    use_unbiased_kl: bool = slime(False, "multiply the KL estimate by pi/pi_old")
    kl_coef: float = slime(0.0, "weight of the KL subtracted from the rewards", ge=0)
    calculate_per_token_loss: bool = slime(False, "average the loss over all tokens of the global batch, instead of over each sample first")
    use_tis: bool = slime(False, "correct the difference between engine and trainer by truncated importance sampling")
    tis_mode: Literal["truncate", "icepop", "sequence-mask"] = flag(
        "truncate",
        "truncate: clamp weights to the bounds; icepop: mask tokens outside of them; sequence-mask: mask responses whose geometric mean "
        "of the weights is outside",
    )
    tis_clip: float = slime(2.0, "upper bound of the importance weight", gt=0)
    tis_clip_low: float = slime(0.0, "lower bound of the importance weight", ge=0)
    use_rollout_logprobs: bool = slime(False, "use the engine's log-probabilities as those of the old policy")
    use_opsm: bool = slime(False, "off-policy sequence masking: ignore responses with negative advantage that are too far off-policy")
    opsm_delta: float = slime(1e-4, "threshold of --use-opsm: mean of log(old/policy) over the tokens of a response", unit="nats", ge=0)
    use_routing_replay: bool = slime(
        False,
        "MoE: repeat the expert choices of the pass that computed the old log-probabilities (no effect with one step per rollout)",
    )
    use_rollout_routing_replay: bool = slime(
        False, "MoE: repeat the engine's expert choices (R3) in training and in the pass for old log-probabilities"
    )
    use_opd: bool = slime(False, "on-policy distillation: learn from a teacher's log-probabilities")
    opd_type: Literal["trainer", "engine", "megatron", "sglang"] | None = slime(
        None,
        "side that computes the teacher's log-probabilities: trainer (alias megatron) or engine (alias sglang); default: the side for "
        "which a teacher is given",
    )
    opd_kl_coef: float = slime(1.0, "weight of the reverse KL to the teacher, subtracted from the advantages", ge=0)
    opd_teacher_load: str | None = slime(
        None, "weights of the teacher for the trainer: a Hugging Face directory or a distributed checkpoint", path=True
    )
    opd_teacher_url: Url | None = flag(
        None, "http://host:port of an engine or router that serves the teacher; default: the model named teacher in --sglang-config"
    )
    skip_zero_advantages: bool | None = flag(
        None,
        "leave samples whose advantages are all 0 out of training, and skip optimizer steps that have no others (default: true if such "
        "samples have no gradient and neither --exact-on-policy nor --custom-tis-function-path reads them)",
    )
    custom_advantage_function_path: str | None = slime(
        None, "hook: (args, samples) -> advantages [R] of each sample, replaces the estimator"
    )
    custom_loss_function_path: str | None = slime(None, "hook: (args, batch, logprobs) -> (loss, metrics)")
    custom_tis_function_path: str | None = slime(None, "hook: (args, batch, old_logprobs), replaces the importance weights")
    custom_pg_loss_reducer_function_path: str | None = slime(
        None,
        "hook: (total_lengths, response_lengths, loss_masks, calculate_per_token_loss), returns a function that reduces the "
        "policy-gradient loss [N] to a scalar",
    )


class TrainFlags(FlagGroup):
    """Batches, micro-batches, seeds and trained parameters."""

    global_batch_size: int | None = slime(
        None, "samples per optimizer step (default: a rollout's, divided by its steps)", unit="samples", ge=1
    )
    num_steps_per_rollout: int | None = slime(
        None, "optimizer steps per rollout (default: as many as --global-batch-size allows, else 1)", ge=1
    )
    micro_batch_size: int | None = megatron(
        None,
        "samples per micro-batch, without --use-dynamic-batch-size (default: packed up to 8192 tokens; on GPUs as planned)",
        unit="samples",
        ge=1,
    )
    use_dynamic_batch_size: bool = slime(False, "pack samples into micro-batches of at most --max-tokens-per-gpu")
    max_tokens_per_gpu: int | None = slime(
        None, "tokens per packed micro-batch; a longer sample becomes a separate micro-batch", unit="tokens", ge=1
    )
    log_probs_max_tokens_per_gpu: int | None = slime(
        None, "tokens per packed micro-batch in passes without gradients (default --max-tokens-per-gpu)", unit="tokens", ge=1
    )
    log_probs_chunk_size: int = slime(4096, "tokens whose logits are in memory at a time", unit="tokens", ge=1)
    share_prefixes: Literal["auto", "on", "off"] = flag(
        "auto",
        "compute a prefix that samples of a micro-batch share (such as the prompt of several responses) only once; auto: with the torch "
        "trainer, if the layers of the model and of its teacher support it and prompts have no images",
    )
    exact_on_policy: bool = flag(
        False,
        "compute log-probabilities that equal the engine's bitwise, and end the run if one differs; with the torch trainer: Llama, Qwen2, "
        "Qwen3 and Qwen3-MoE, with SGLang on one or two GPUs per engine, or with the embedded engine on a CPU",
    )
    data_pad_size_multiplier: int = slime(128, "pad packed rows to a multiple of this", unit="tokens", ge=1)
    balance_data: bool = slime(False, "balance data-parallel ranks by FLOPs")
    seed: int = megatron(1234, "seed of the trainer's random numbers", ge=0)
    only_train_params_name_list: list[str] = slime(
        [], "regexes of parameters to train, by their names in the checkpoint (or in Megatron); all others are frozen"
    )
    freeze_params_name_list: list[str] = slime([], "regexes of parameters to freeze, by their names in the checkpoint (or in Megatron)")
    freeze_vision_tower: bool = flag(False, "freeze the vision tower of a vision-language model (default: train it if prompts have images)")
    mtp_num_layers: int | None = megatron(None, "layers for multi-token prediction (MTP) to load (default 0)", unit="layers", ge=0)
    enable_mtp_training: bool = slime(False, "train the MTP layers; otherwise they stay frozen")
    mtp_loss_scaling_factor: float = megatron(0.2, "weight of the MTP loss", ge=0)
    mtp_joint_training: bool = flag(False, "let the MTP loss also train the model, embedding and head instead of only the MTP layers")
    ref_update_interval: int | None = slime(
        None, "rollouts between copies of the policy's weights into the reference (default: it never changes)", unit="rollouts", ge=1
    )
    rollout_data_postprocess_path: str | None = slime(
        None, "hook: (args, groups), may change the samples to train on after their log-probabilities are computed"
    )
    before_train_step_path: str | None = flag(None, "hook: (args, rollout_id, batch), called before training on every rollout")


class LoraFlags(FlagGroup):
    """Low-rank adapter (LoRA) that is trained instead of the model's own weights."""

    lora_rank: int | None = flag(None, "train an adapter of this rank instead of the weights (8 to 64 for RL)", ge=1)
    lora_alpha: float = flag(32.0, "the adapter's output is scaled by alpha / rank", gt=0)
    lora_dropout: float = flag(0.0, "dropout on the adapter's inputs (supervised fine-tuning only)", ge=0, lt=1)
    lora_target_modules: list[str] = flag([], "layers to adapt, such as q_proj v_proj (default: all linear layers except the output layer)")
    lora_experts: bool = flag(False, "also adapt all experts of an MoE model, each with its own A and B")
    lora_use_rslora: bool = flag(False, "scale the adapter's output by alpha / sqrt(rank) instead of alpha / rank (rsLoRA)")
    lora_adapter: str | None = flag(
        None, "adapter to start from, a PEFT directory, which also gives rank, alpha and layers; fuligo eval applies it", path=True
    )
    lora_base_precision: Literal["full", "8bit", "nf4"] = flag(
        "full",
        "storage of the frozen linear layers and experts in the torch trainer: as loaded, or in 8 or 4 bits (QLoRA; needs fuligo[qlora])",
    )
    lora_sync: Literal["auto", "adapter", "merged"] = flag(
        "auto",
        "send engines the adapter, or weights with the adapter merged in; auto: adapter with the run's own embedded engine, else merged",
    )


class ParallelFlags(FlagGroup):
    """Parallelism and recomputation of the Megatron trainer. Names and meanings are Megatron's."""

    tensor_model_parallel_size: int = megatron(1, "tensor-parallel size (TP): GPUs that share each matrix", ge=1)
    sequence_parallel: bool = megatron(False, "split norms and residuals along the sequence over the TP group (SP)")
    pipeline_model_parallel_size: int = megatron(1, "pipeline stages (PP)", ge=1)
    virtual_pipeline_model_parallel_size: int | None = megatron(None, "interleaved stages per pipeline rank (VPP; default: one)", ge=1)
    decoder_first_pipeline_num_layers: int | None = megatron(
        None, "layers of the first stage (default: an equal share); the middle stages share the rest equally", unit="layers", ge=1
    )
    decoder_last_pipeline_num_layers: int | None = megatron(
        None, "layers of the last stage (default: an equal share); the middle stages share the rest equally", unit="layers", ge=1
    )
    context_parallel_size: int = megatron(1, "context-parallel size (CP): GPUs that share each sequence", ge=1)
    allgather_cp: bool = slime(False, "gather keys and values for context parallelism (required by sparse attention)")
    expert_model_parallel_size: int = megatron(1, "expert-parallel size (EP): ranks among which the experts are divided", ge=1)
    expert_tensor_parallel_size: int | None = megatron(
        None, "tensor-parallel size within an expert (ETP; default --tensor-model-parallel-size)", ge=1
    )
    recompute_granularity: Literal["full", "selective"] | None = megatron(
        None,
        "recompute activations in the backward pass: of whole layers (full), or of --recompute-modules (selective); default: "
        "no recomputation",
    )
    recompute_method: Literal["uniform", "block"] | None = megatron(
        None, "full recomputation in chunks of layers (uniform), or of the first layers of each stage (block)"
    )
    recompute_num_layers: int | None = megatron(
        None, "layers per chunk (--recompute-method uniform), or layers of each stage to recompute (block)", unit="layers", ge=1
    )
    recompute_modules: list[str] = megatron(
        [], "modules of selective recomputation: core_attn, moe_act, layernorm, mla_up_proj, mlp, moe, shared_experts (default core_attn)"
    )
    moe_token_dispatcher_type: Literal["allgather", "alltoall", "flex"] = megatron(
        "allgather", "dispatcher that sends tokens to their experts"
    )
    moe_enable_deepep: bool = megatron(False, "dispatch with DeepEP; needs --moe-token-dispatcher-type flex")
    attention_backend: Literal["auto", "flash", "fused", "unfused", "local"] = megatron(
        "auto", "attention kernels: those of TransformerEngine, or fuligo's own (local)"
    )
    accumulate_allreduce_grads_in_fp32: bool = megatron(
        False, "reduce gradients in fp32; this is the default unless --grad-reduce-in-bf16 is given"
    )


class OptimizerFlags(FlagGroup):
    """AdamW and its learning-rate schedule."""

    optimizer: Literal["adam"] = megatron("adam", "optimizer; adam is AdamW, as in Megatron")
    lr: float = megatron(1e-6, "peak learning rate", ge=0)
    min_lr: float = megatron(0.0, "learning rate at the end of the decay", ge=0)
    lr_decay_style: Literal["constant", "linear", "cosine"] = megatron("constant", "learning-rate schedule after the warm-up")
    lr_decay_iters: int | None = megatron(None, "optimizer steps until --min-lr (default: the whole run)", unit="steps", ge=1)
    lr_warmup_iters: int = megatron(0, "optimizer steps of linear warm-up", unit="steps", ge=0)
    critic_lr: float | None = slime(None, "peak learning rate of the value model (default --lr)", ge=0)
    critic_lr_warmup_iters: int = slime(0, "optimizer steps of linear warm-up for the value model", unit="steps", ge=0)
    weight_decay: float = megatron(0.01, "decoupled weight decay; not applied to norms and biases", ge=0)
    adam_beta1: float = megatron(0.9, "Adam's beta 1", ge=0, lt=1)
    adam_beta2: float = megatron(0.999, "Adam's beta 2", ge=0, lt=1)
    adam_eps: float = megatron(1e-8, "Adam's epsilon", gt=0)
    clip_grad: float = megatron(1.0, "maximum global gradient norm; 0 disables clipping", ge=0)
    use_distributed_optimizer: bool = megatron(True, "shard the optimizer state over the data-parallel ranks")
    optimizer_cpu_offload: bool = megatron(False, "keep the optimizer state and run the step on the CPU")
    overlap_cpu_optimizer_d2h_h2d: bool = megatron(
        False, "with --optimizer-cpu-offload, overlap copies of gradients and weights with the CPU step"
    )
    use_precision_aware_optimizer: bool = megatron(False, "let the optimizer hold the fp32 weights and keep its state in lower precision")
