"""The engines that a run starts: every group of `--sglang-config` with its values resolved."""

from dataclasses import dataclass

from fuligo.config import Config
from fuligo.config.passthrough import SglangArguments
from fuligo.config.server_groups import ModelServers, ServerGroup, WorkerType

_A2A_BACKENDS_WITHOUT_EP = ("none",)
"""Values of `moe_a2a_backend` with which SGLang 0.5.15 does not spread the experts over all tensor-parallel GPUs of an engine."""
DRAFTS_OF_MODEL = ("EAGLE", "NEXTN")
"""Speculative algorithms that draft with the model's own MTP layer."""


@dataclass(frozen=True, slots=True)
class EngineGroupSpec:
    """Group of equal engines with all values resolved."""

    model: str
    """Name of the model; each model has one router."""
    model_path: str | None
    """Checkpoint that the engines load; None if --hf-checkpoint is not set."""
    worker_type: WorkerType
    num_gpus: int
    """GPUs of all engines of the group."""
    num_gpus_per_engine: int
    arguments: SglangArguments
    """`--sglang-*` with the group's overrides."""
    update_weights: bool
    """True if the engines receive the trainer's weights."""
    place: tuple[int, int] | None = None
    """Indices of model and group in `engine.sglang_config`; None without `--sglang-config`."""

    @property
    def num_engines(self) -> int:
        """Number of engines; 0 for a placeholder."""
        return 0 if self.worker_type == "placeholder" else self.num_gpus // self.num_gpus_per_engine

    @property
    def drafts_with_own_layers(self) -> bool:
        """True if the engines draft with the MTP layer of their model."""
        given = self.arguments.get("speculative_draft_model_path")
        return self.arguments.get("speculative_algorithm") in DRAFTS_OF_MODEL and given is None

    @property
    def pp_size(self) -> int:
        """Pipeline stages per engine."""
        return self.arguments.value("pp_size")

    @property
    def tp_size(self) -> int:
        """Tensor-parallel GPUs per engine, at least 1."""
        return max(1, self.num_gpus_per_engine // self.pp_size)

    @property
    def dp_size(self) -> int:
        """Attention replicas per engine; 1 without DP attention."""
        return self.arguments.value("dp_size") if self.arguments.value("enable_dp_attention") else 1

    @property
    def ep_size(self) -> int:
        """Expert-parallel size of an engine, as SGLang resolves it from `moe_a2a_backend`."""
        spread = self.arguments.value("moe_a2a_backend") not in _A2A_BACKENDS_WITHOUT_EP
        return self.tp_size if spread else self.arguments.value("ep_size")


def engine_groups(config: Config) -> tuple[EngineGroupSpec, ...]:
    """Return all engine groups of a run: one group without `--sglang-config`, none if the run starts no SGLang engine."""
    if config.engine_capabilities.beside_trainer or config.resolved_rollout_num_gpus == 0:
        return ()
    given, policy = config.engine.sglang_config, (None, config.model.hf_checkpoint)
    models = [ModelServers(server_groups=[ServerGroup(num_gpus=config.resolved_rollout_num_gpus)])] if given is None else given
    return tuple(
        EngineGroupSpec(
            model=servers.name,
            model_path=servers.model_path or config.model.hf_checkpoint,
            worker_type=group.worker_type,
            num_gpus=group.num_gpus,
            num_gpus_per_engine=group.num_gpus_per_engine or servers.num_gpus_per_engine or config.resolved_rollout_num_gpus_per_engine,
            arguments=config.sglang.merged(group.overrides) if group.overrides else config.sglang,
            update_weights=servers.model_path in policy if servers.update_weights is None else servers.update_weights,
            place=None if given is None else (index, number),
        )
        for index, servers in enumerate(models)
        for number, group in enumerate(servers.server_groups)
    )


def policy_groups(config: Config) -> list[EngineGroupSpec]:
    """Return the engine groups that serve the policy."""
    return [group for group in engine_groups(config) if group.model == policy_model(config)]


def policy_tp_size(config: Config) -> int:
    """Return the largest tensor-parallel size of the policy's engines: 1 if embedded, --rollout-num-gpus-per-engine if none is started."""
    if config.engine_capabilities.beside_trainer:
        return 1
    return max((group.tp_size for group in policy_groups(config)), default=config.resolved_rollout_num_gpus_per_engine)


def policy_model(config: Config) -> str:
    """Return the name of the model that rollouts are sampled from: the first that receives the trainer's weights, else the first.

    The run must start SGLang engines.
    """
    groups = engine_groups(config)
    return next((group.model for group in groups if group.update_weights), groups[0].model)


def keeps_draft(config: Config, group: EngineGroupSpec) -> bool:
    """Return whether the group drafts for the policy with weights that are never synced.

    These are the weights of a separate draft model, or MTP layers that the trainer does not load (with LoRA, it syncs none).
    """
    arguments = group.arguments
    if group.model != policy_model(config) or arguments.get("speculative_algorithm") in (None, "NGRAM"):
        return False
    has_own_model = arguments.get("speculative_draft_model_path") is not None
    return has_own_model or config.uses_adapter or not config.train.mtp_num_layers
