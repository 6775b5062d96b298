"""Backends, processes and GPUs that follow from a run's flags."""

import functools
from collections.abc import Iterable, Mapping
from typing import Literal

from fuligo.config.capabilities import ENGINE_CAPABILITIES, TRAINER_CAPABILITIES, EngineCapabilities, TrainerCapabilities
from fuligo.config.flag import PREFIXES, option_name
from fuligo.config.flags import MEGATRON_FLAGS, SGLANG_FLAGS, flags, name_problem
from fuligo.config.groups import TypedFlags
from fuligo.config.passthrough import PassThrough, RouterArguments, SglangArguments
from fuligo.config.secret import Environment

REQUESTS_PER_ENGINE = 512
"""Requests in flight per engine if the number that the engine runs at a time is unknown."""


class MegatronArguments(PassThrough):
    """Arguments of Megatron that no typed flag of fuligo covers: `--swiglu` is `{"swiglu": True}`."""

    __slots__ = ()
    group = "megatron"

    @classmethod
    def name_problem(cls, name: str) -> str | None:
        """Return why an argument of this name cannot be given, None if it can. Typed flags win over Megatron's of the same name."""
        return name_problem(cls.schema(), name)


@functools.cache
def _by_group(names: tuple[str, ...]) -> Mapping[str, frozenset[str]]:
    """Return the names of flags by group. Cached, because the rules ask for the same flags hundreds of times."""
    groups = {flags()[name].group for name in names}
    return {group: frozenset(name for name in names if flags()[name].group == group) for group in groups}


class Placement(TypedFlags):
    """All settings of a run, and the backends, processes and GPUs that follow from them if `validate` accepts them."""

    sglang: SglangArguments = SglangArguments()
    router: RouterArguments = RouterArguments()
    megatron: MegatronArguments = MegatronArguments()

    def value_of(self, name: str) -> object:
        """Return the value of a typed flag."""
        return getattr(getattr(self, flags()[name].group), name)

    def given_options(self, names: Iterable[str], passed_on: Iterable[str] = ()) -> list[str]:
        """Return the options of the flags among `names` that differ from their default, and of all arguments of the groups `passed_on`.

        A config does not record where its values come from, so a flag counts as given if its value is not the default.
        """
        names = tuple(names)
        # Most flags are not set; finding those is faster than comparing every value with its default.
        may_differ = {name for group, own in _by_group(names).items() for name in own & getattr(self, group).model_fields_set}
        typed = [flags()[name].option for name in names if name in may_differ and self.value_of(name) != flags()[name].default]
        return [*typed, *(option_name(PREFIXES.get(group, "") + name) for group in passed_on for name in getattr(self, group))]

    @property
    def is_sft(self) -> bool:
        """True for supervised fine-tuning: the data holds the responses, nothing is sampled or scored."""
        return self.algorithm.loss_type == "sft_loss"

    @property
    def has_eval(self) -> bool:
        """True if evaluation data is given, or a function that evaluates."""
        flags = self.eval
        return bool(flags.eval_prompt_data) or flags.eval_config is not None or flags.eval_function_path is not None

    @property
    def needs_engine(self) -> bool:
        """True if the run samples: rollouts, or evaluations during SFT."""
        return not self.debug.debug_train_only and (not self.is_sft or self.has_eval)

    @property
    def trains(self) -> bool:
        """True if the run has a trainer: not for --debug-rollout-only and `fuligo eval`."""
        return not self.debug.debug_rollout_only

    @property
    def resolved_train_backend(self) -> Literal["torch", "megatron"]:
        """Trainer: as given; `auto` is megatron if a flag of the Megatron trainer differs from its default, else torch."""
        given = self.cluster.train_backend
        return given if given != "auto" else "megatron" if self.given_options(MEGATRON_FLAGS, ["megatron"]) else "torch"

    @property
    def resolved_rollout_backend(self) -> Literal["embedded", "sglang"]:
        """Engine: as given; `auto` is sglang with Megatron, with external engines, or if a flag of SGLang differs from its default."""
        given = self.cluster.rollout_backend
        if given != "auto":
            return given
        external = bool(self.engine.rollout_external_engine_addrs)
        sglang = external or self.resolved_train_backend == "megatron" or self.given_options(SGLANG_FLAGS, ["sglang"])
        return "sglang" if sglang else "embedded"

    @property
    def trainer_capabilities(self) -> TrainerCapabilities:
        return TRAINER_CAPABILITIES[self.resolved_train_backend]

    @property
    def engine_capabilities(self) -> EngineCapabilities:
        """Capabilities of the rollout backend's engines."""
        return ENGINE_CAPABILITIES[self.resolved_rollout_backend]

    @property
    def engine_environment(self) -> Environment:
        """Environment variables of engine and router processes, added to the driver's."""
        return self.cluster.env.merged(self.engine.engine_env)

    @property
    def shares_gpus(self) -> bool:
        """True if trainer and engines have the same GPUs (--colocate)."""
        return bool(self.cluster.colocate) and self.trains

    @property
    def takes_turns(self) -> bool:
        """True if trainer and engines use the same GPUs in turns."""
        return self.shares_gpus and self.needs_engine and self.engine_capabilities.releases_memory

    @property
    def offloads_trainer(self) -> bool:
        """True if weights and optimizer state of the trainer move to host memory while the engines sample."""
        return self.takes_turns and not self.trainer_stays

    @property
    def trainer_stays(self) -> bool:
        """True if weights and optimizer state of the trainer stay on GPUs that engines use in turns with it."""
        return self.takes_turns and self.cluster.offload_train is False

    @property
    def resolved_actor_num_gpus_per_node(self) -> int:
        """Trainer GPUs per node; on a CPU, trainer processes."""
        if self.cluster.actor_num_gpus_per_node is not None:
            return self.cluster.actor_num_gpus_per_node
        one = not self.trainer_capabilities.needs_gpus or self.cluster.device == "cpu"
        return 1 if one else min(8, self.cluster.num_gpus_per_node)

    @property
    def num_train_gpus(self) -> int:
        """Trainer GPUs, one per rank; on a CPU, trainer processes."""
        return self.cluster.actor_num_nodes * self.resolved_actor_num_gpus_per_node

    @property
    def resolved_rollout_num_gpus(self) -> int:
        """GPUs of all engines, shared ones included; 1 for the embedded engine, 0 if all engines are external or none is needed."""
        if not self.needs_engine:
            return 0
        if self.cluster.rollout_num_gpus is not None:
            return self.cluster.rollout_num_gpus
        if self.engine.rollout_external_engine_addrs:
            return 0
        if self.engine_capabilities.beside_trainer:
            return 1
        return self.num_train_gpus if self.cluster.colocate else self.resolved_rollout_num_gpus_per_engine

    @property
    def resolved_rollout_num_gpus_per_engine(self) -> int:
        """GPUs per engine (groups of `--sglang-config` may set their own number)."""
        return self.cluster.rollout_num_gpus_per_engine or 1

    @property
    def resolved_rollout_concurrency(self) -> int:
        """Requests in flight: as given (or chosen by the plan of a run on GPUs), else `REQUESTS_PER_ENGINE` for each engine."""
        own = self.resolved_rollout_num_gpus // self.resolved_rollout_num_gpus_per_engine
        num_engines = len(self.engine.rollout_external_engine_addrs) or own
        return self.rollout.rollout_concurrency or REQUESTS_PER_ENGINE * max(1, num_engines)

    @property
    def num_rollout_only_gpus(self) -> int:
        """Engine GPUs that the trainer does not use. The embedded engine shares the trainer's first GPU."""
        if self.engine_capabilities.beside_trainer:
            return 0
        shared = self.num_train_gpus if self.shares_gpus else 0
        return max(0, self.resolved_rollout_num_gpus - shared)

    @property
    def total_num_gpus(self) -> int:
        alone = self.num_train_gpus if self.trains or self.engine_capabilities.beside_trainer else 0
        return alone + self.num_rollout_only_gpus

    @property
    def num_nodes(self) -> int:
        trainer = self.cluster.actor_num_nodes if self.trains else 1
        return max(trainer, -(-self.total_num_gpus // self.cluster.num_gpus_per_node))

    @property
    def resolved_data_parallel_size(self) -> int:
        """Data-parallel size of the trainer, at least 1: GPUs / (TP x PP x CP)."""
        sizes = self.parallel
        one_replica = sizes.tensor_model_parallel_size * sizes.pipeline_model_parallel_size * sizes.context_parallel_size
        return max(1, self.num_train_gpus // one_replica)
