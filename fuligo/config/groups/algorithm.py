"""The flags of the group `algorithm`."""

from __future__ import annotations

from typing import Literal

from fuligo.algorithms.estimators import EstimatorName
from fuligo.config.group import FlagGroup, flag


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
    opd_teacher_url: str | None = flag(
        None, "http://host:port of an engine or router that serves the teacher; default: the model named teacher in --sglang-config"
    )
    custom_advantage_function_path: str | None = flag(None, "hook: replaces the advantage estimator", source="slime")
    custom_loss_function_path: str | None = flag(None, "hook: (args, batch, logprobs) -> (loss, metrics)", source="slime")
    custom_tis_function_path: str | None = flag(None, "hook: replaces the importance weights", source="slime")
