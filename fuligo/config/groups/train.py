"""The flags of the group `train`."""

from __future__ import annotations

from fuligo.config.group import FlagGroup, flag


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
