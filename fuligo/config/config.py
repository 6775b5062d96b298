"""Configuration of a run, with the values that follow from its flags."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Literal

from pydantic import PrivateAttr

from fuligo.algorithms.estimators import ESTIMATORS
from fuligo.config.flag import PREFIXES, option_name
from fuligo.config.groups.sampling import RolloutFlags
from fuligo.config.placement import Placement
from fuligo.config.secret import Secret
from fuligo.config.server_groups import TEACHER


@dataclass(slots=True, frozen=True)
class ServedModel:
    """Router that takes requests for a model."""

    url: str
    key: str = field(repr=False)
    """API key that callers send as `Authorization: Bearer KEY`."""


class Config(Placement):
    """All settings of a run, grouped by concern. The properties assume a config that `validate` accepts."""

    _served_models: dict[str, ServedModel] = PrivateAttr(default_factory=dict)

    @property
    def served_models(self) -> Mapping[str, ServedModel]:
        """Routers of the models of `--sglang-config`, by the model's name. Empty before the engines run."""
        return self._served_models

    def served_at(self, models: Mapping[str, ServedModel]) -> Config:
        """Return a copy that knows these routers, for hooks to find the models."""
        config = self.model_copy()
        config._served_models = dict(models)
        return config

    def secrets(self) -> Iterator[tuple[str, Secret]]:
        """Yield the option and the value of each secret."""
        for group, values in self.model_dump().items():
            for name, value in values.items():
                option = option_name(PREFIXES.get(group, "") + name)
                yield from ((option, secret) for secret in _secrets_in(value))

    @property
    def hf_checkpoint_path(self) -> Path:
        """Directory of `--hf-checkpoint`."""
        assert self.model.hf_checkpoint is not None, "validated"
        return Path(self.model.hf_checkpoint)

    @property
    def shares_prefixes(self) -> bool:
        """True if the trainer computes a common prefix of samples once.

        `auto` is on with the torch trainer and prompts without images; plan and trainer turn it off for models that do not support it.
        """
        choice = self.train.share_prefixes
        return choice == "on" or (choice == "auto" and self.trainer_capabilities.shares_prefixes and not self.data.multimodal_keys)

    @property
    def freezes_tower(self) -> bool:
        """True if a vision tower is not trained: the run freezes it, or its prompts have no images."""
        return self.train.freeze_vision_tower or not self.data.multimodal_keys

    @property
    def samples_per_rollout(self) -> int:
        """Samples of one rollout: prompts x responses per prompt. In SFT each prompt has one given response."""
        responses = 1 if self.is_sft else self.rollout.n_samples_per_prompt
        return self.rollout.rollout_batch_size * responses

    @property
    def resolved_num_steps_per_rollout(self) -> int:
        """Optimizer steps per rollout: as given, else the number of global batches in a rollout, else 1."""
        if self.train.num_steps_per_rollout is not None:
            return self.train.num_steps_per_rollout
        if self.train.global_batch_size is not None:
            return max(1, self.samples_per_rollout // self.train.global_batch_size)
        return 1

    @property
    def resolved_global_batch_size(self) -> int:
        """Samples of one optimizer step."""
        return self.train.global_batch_size or self.samples_per_rollout // self.resolved_num_steps_per_rollout

    @property
    def resolved_over_sampling_batch_size(self) -> int:
        """Prompts of one sampling wave."""
        return self.rollout.over_sampling_batch_size or self.rollout.rollout_batch_size

    @property
    def resolved_eps_clip_high(self) -> float:
        """Upper clip distance of the ratio; the lower one by default."""
        return self.algorithm.eps_clip if self.algorithm.eps_clip_high is None else self.algorithm.eps_clip_high

    @property
    def needs_reference(self) -> bool:
        """True if the run loads a reference model."""
        return self.algorithm.use_kl_loss or self.algorithm.kl_coef != 0

    @property
    def needs_old_logprobs(self) -> bool:
        """True if the trainer computes log-probabilities of the whole rollout before its first optimizer step.

        With one step per rollout, the step itself computes them, unless a hook or a KL term in rewards or advantages needs them earlier.
        With --use-rollout-logprobs, the engine's log-probabilities are used instead.
        """
        if self.is_sft or self.train.rollout_data_postprocess_path is not None:
            return not self.is_sft
        needed = self.resolved_num_steps_per_rollout > 1 or self.algorithm.use_opd or self.algorithm.kl_coef != 0
        return needed and not self.algorithm.use_rollout_logprobs

    @property
    def has_served_teacher(self) -> bool:
        """True if `--sglang-config` serves a model named teacher."""
        return any(servers.name == TEACHER for servers in self.engine.sglang_config or ())

    @property
    def teacher_from(self) -> Literal["trainer", "engine"] | None:
        """Side that computes the teacher's log-probabilities: as given, else the side that has a teacher. None without a teacher."""
        flags = self.algorithm
        if not flags.use_opd or self.is_sft:
            return None
        if flags.opd_type is not None:
            return "trainer" if flags.opd_type in ("trainer", "megatron") else "engine"
        if flags.opd_teacher_load is not None:
            return "trainer"
        return "engine" if flags.opd_teacher_url is not None or self.has_served_teacher else None

    @property
    def has_custom_generation(self) -> bool:
        """True if an environment, an agent or the user's function answers each row: it reads the prompt as it likes, and may judge."""
        return bool(self.rollout.custom_generate_function_path or self.rollout.agent or self.rollout.environment)

    @property
    def is_unjudged(self) -> bool:
        """True if the policy learns only from a teacher, without rewards."""
        by_hook = self.has_custom_generation or self.rollout.rollout_function_path
        judged = self.reward.rm_type or self.reward.custom_rm_path or self.data.metadata_key or by_hook
        return self.algorithm.use_opd and not judged and not self.is_sft

    @property
    def sample_timeout_s(self) -> float:
        """Deadline for generating one sample, in seconds: --episode-timeout-s if given with --environment, else --rollout-timeout-s."""
        flags = self.rollout
        return flags.rollout_timeout_s if flags.environment is None else flags.episode_timeout_s or flags.rollout_timeout_s

    @property
    def trains_values(self) -> bool:
        """True if the run trains a value model in addition to the policy."""
        return ESTIMATORS[self.algorithm.advantage_estimator].uses_values and not self.is_sft

    @property
    def saves(self) -> bool:
        """True if the run saves checkpoints even if no signal ends it."""
        flags, num_rollout = self.checkpoint, self.data.num_rollout
        if not self.trains or flags.save_last:
            return self.trains
        return flags.save_interval is not None and (num_rollout is None or flags.save_interval <= num_rollout)

    @property
    def learns_from_advantages_alone(self) -> bool:
        """True if a sample whose advantages are all 0 adds nothing to the gradient: every term of the loss is weighted by advantages."""
        flags = self.algorithm
        others = (
            flags.entropy_coef,
            flags.use_kl_loss and flags.kl_loss_coef,
            flags.custom_pg_loss_reducer_function_path,
            self.trains_values,
            self.train.enable_mtp_training,
            self.megatron.get("moe_aux_loss_coeff"),
            self.megatron.get("moe_router_bias_update_rate"),
            self.model.custom_model_provider_path,  # its layers may have their own loss
        )
        return flags.loss_type == "policy_loss" and not any(others)

    @property
    def resolved_skip_zero_advantages(self) -> bool:
        """True if the trainer leaves out samples whose advantages are all 0: the flag if set, else True if nothing depends on them.

        --exact-on-policy also compares the log-probabilities of these samples, and a custom function for importance weights may compute
        weights over all samples of a micro-batch.
        """
        flags = self.algorithm
        if flags.skip_zero_advantages is not None:
            return flags.skip_zero_advantages
        is_read = self.train.exact_on_policy or flags.custom_tis_function_path is not None
        return self.learns_from_advantages_alone and not is_read

    @property
    def uses_adapter(self) -> bool:
        """True if the policy has a LoRA adapter, which is trained instead of its weights."""
        return self.lora.lora_rank is not None or self.lora.lora_adapter is not None

    @property
    def syncs_adapter(self) -> bool:
        """True if engines receive the adapter by itself; otherwise they receive weights with the adapter merged in."""
        if not (self.uses_adapter and self.needs_engine) or self.lora.lora_sync == "merged":
            return False
        return self.lora.lora_sync == "adapter" or (not self.no_adapter_because and not self.engine_capabilities.names_adapters)

    @property
    def syncs_quantized(self) -> bool:
        """True if weights are synced to engines that can serve a quantized `--hf-checkpoint`."""
        return self.needs_engine and self.engine_capabilities.serves_quantized and not self.debug.debug_rollout_only

    @property
    def no_adapter_because(self) -> str:
        """Reason why engines cannot take an adapter by itself; empty if they can."""
        facts, transport = self.engine_capabilities, self.weight_sync.update_weight_transport
        if self.engine.rollout_external_engine_addrs:
            return "external engines were started without adapter support"
        if not facts.applies_adapters:
            return f"the run's {self.resolved_rollout_backend} engines take whole weights only"
        if transport not in ("auto", "tensor"):
            return f"--update-weight-transport {transport} writes whole models"
        if not facts.names_adapters:
            return ""
        if not self.trains:
            return "without training, no adapter is sent to the engines"
        if self.takes_turns:
            return "engines that release their weights with --colocate get all of them back with each sync"
        if self.lora.lora_base_precision != "full":
            return f"the engines load --hf-checkpoint, but the adapter is trained on a base in {self.lora.lora_base_precision}"
        if self.model.hf_checkpoint is not None and self.initial_weights_path not in (None, self.model.hf_checkpoint):
            return f"the engines load --hf-checkpoint, but the adapter is trained on {self.initial_weights_path}"
        if not self.trainer_capabilities.sends_adapters:
            return "the Megatron trainer merges the adapter into the weights for SGLang"
        if self.lora.lora_experts:
            return "SGLang's format of experts' adapters differs from PEFT's"
        if self.sglang.value("dp_size") != 1 or self.sglang.value("pp_size") != 1:
            return "SGLang loads adapters only with --sglang-dp-size 1 and --sglang-pp-size 1"
        if self.engine.sglang_config is not None:
            return "the servers of --sglang-config have their own arguments"
        return ""

    @property
    def replays_engine_routing(self) -> bool:
        """True if the trainer routes every token to the experts that the engine chose."""
        return self.algorithm.use_rollout_routing_replay and not self.is_sft

    @property
    def replays_routing(self) -> bool:
        """True if the trainer replays expert choices: those of the engine, or of the pass that computed the old log-probabilities."""
        return self.replays_engine_routing or (self.algorithm.use_routing_replay and not self.is_sft)

    @property
    def initial_weights_path(self) -> str | None:
        """Path of initial weights and reference (Hugging Face directory, distributed checkpoint, or directory of checkpoints); None if
        not given."""
        return self.checkpoint.ref_load or self.model.hf_checkpoint

    @property
    def max_sample_tokens(self) -> int | None:
        """Longest trainable sample in tokens (prompt + response, or a whole conversation); None without a limit."""
        prompt, response = self.data.rollout_max_prompt_len, 0 if self.is_sft else self.rollout.rollout_max_response_len
        limits = (self.rollout.rollout_max_context_len, None if prompt is None else prompt + response)
        return min((limit for limit in limits if limit is not None), default=None)

    @property
    def eval_data_sets(self) -> dict[str, str]:
        """Dataset name -> file of `--eval-prompt-data` (not of `--eval-config`)."""
        given = self.eval.eval_prompt_data
        return {"aime": given[0]} if len(given) == 1 else dict(zip(given[::2], given[1::2], strict=True))

    @property
    def eval_rollout(self) -> RolloutFlags:
        """Sampling flags of evaluations: the rollout's, overridden by those of `eval` that are given."""
        names = ("max_response_len", "temperature", "top_p", "top_k")
        given = {f"rollout_{name}": getattr(self.eval, f"eval_{name}") for name in names}
        return self.rollout.model_copy(update={name: value for name, value in given.items() if value is not None})

    @property
    def resolved_eval_reward_key(self) -> str | None:
        """Key of the reward that an evaluation reports; None if rewards are numbers."""
        return self.reward.eval_reward_key or self.reward.reward_key

    @property
    def num_drawn(self) -> int | None:
        """Minimum number of rows of --prompt-data that the run draws; 0 if the user's code draws them; None: each row at least once."""
        if self.data.data_source_path is not None or self.rollout.rollout_function_path is not None:
            return 0
        return None if self.data.num_rollout is None else self.data.num_rollout * self.rollout.rollout_batch_size

    def resolved_num_rollout(self, num_prompts: int) -> int:
        """Return the number of rollouts: `--num-rollout`, else the whole rollouts in `--num-epoch` passes over the data, at least 1."""
        if self.data.num_rollout is not None:
            return self.data.num_rollout
        assert self.data.num_epoch is not None
        return max(1, self.data.num_epoch * num_prompts // self.rollout.rollout_batch_size)

    def run_directory(self, started: datetime) -> Path:
        """Return the run directory: `--run-dir`, else `runs/<name>`; the start time is the default name."""
        if self.observability.run_dir is not None:
            return Path(self.observability.run_dir)
        return Path("runs") / (self.observability.name or started.strftime("%Y-%m-%d-%H%M%S"))


def _secrets_in(value: object) -> Iterator[Secret]:
    if isinstance(value, Secret):
        yield value
    elif isinstance(value, Mapping | list):
        for entry in value.values() if isinstance(value, Mapping) else value:
            yield from _secrets_in(entry)
