"""Backends, engines, and the GPUs that they take."""

from __future__ import annotations

from collections.abc import Iterable

from fuligo.config import Config
from fuligo.config.findings import Change
from fuligo.config.flags import EMBEDDED_FLAGS, MEGATRON_FLAGS, SGLANG_FLAGS, TORCH_FLAGS
from fuligo.config.rules.rule import Violation, rule, set_flag, unset_flag
from fuligo.config.topology import engine_groups

SHARED_FRACTION = 0.7
"""Of a GPU's memory, what published recipes give engines beside a trainer."""


def _foreign(backend: str, switch: str, owner: str, options: Iterable[str], further: tuple[Change, ...] = ()) -> Violation | None:
    """The flags of another backend than the one that `switch` chose."""
    given = tuple(options)
    if not given:
        return None
    shown = given[0] if len(given) == 1 else f"{', '.join(given[:-1])} and {given[-1]}"
    verb = "is a flag" if len(given) == 1 else "are flags"
    return Violation(
        f"{shown} {verb} of {owner}, the run has --{switch.replace('_', '-')} {backend}", (unset_flag(switch), *further), flags=given
    )


@rule("CFG-TRAIN-BACKEND", "--train-backend")
def trainer_has_its_own_flags(config: Config) -> Violation | None:
    """A flag of the other trainer would be silently ignored."""
    if config.resolved_train_backend == "torch":
        foreign = config.given_options(MEGATRON_FLAGS, ("megatron",))
        return _foreign("torch", "train_backend", "the Megatron trainer", foreign)
    foreign = config.given_options(TORCH_FLAGS)
    if not foreign:
        return None
    full = (set_flag("recompute_granularity", "full"), set_flag("recompute_method", "uniform"), set_flag("recompute_num_layers", 1))
    recompute = () if config.parallel.recompute_granularity else full
    text = "--gradient-checkpointing is a flag of the torch trainer; with Megatron it is --recompute-granularity full"
    return Violation(text, (unset_flag("gradient_checkpointing"), *recompute), flags=tuple(foreign))


@rule("CFG-ROLLOUT-BACKEND", "--rollout-backend")
def engines_have_their_own_flags(config: Config) -> Violation | None:
    """A flag of the other engine would be silently ignored."""
    if config.resolved_rollout_backend == "embedded":
        owned_by_sglang = config.given_options(SGLANG_FLAGS, ("sglang", "router"))
        if config.cluster.rollout_backend == "embedded":
            shared = () if config.cluster.rollout_num_gpus is not None else (set_flag("colocate", True),)
            return _foreign("embedded", "rollout_backend", "SGLang engines", owned_by_sglang, shared)
        if not owned_by_sglang:
            return None
        text = f"{', '.join(owned_by_sglang)}: no router runs without SGLang engines, and nothing asks for those"
        return Violation(text, (set_flag("rollout_backend", "sglang"), set_flag("colocate", True)), flags=tuple(owned_by_sglang))
    embedded = config.given_options(EMBEDDED_FLAGS)
    if not embedded:
        return None
    text = f"{', '.join(embedded)}: settings of the embedded engine, the run has SGLang engines"
    return Violation(
        text, tuple(unset_flag(name) for name in EMBEDDED_FLAGS if f"--{name.replace('_', '-')}" in embedded), flags=tuple(embedded)
    )


@rule("CFG-ROLLOUT-GPUS", "--rollout-num-gpus", "--colocate")
def engines_have_gpus(config: Config) -> Violation | None:
    """How many GPUs the engines take is not guessed, except where they take the trainer's."""
    cluster = config.cluster
    elsewhere = config.engine.rollout_external_engine_addrs or not config.needs_engine or cluster.device == "cpu"
    if config.resolved_rollout_backend == "embedded" or elsewhere or cluster.colocate or cluster.rollout_num_gpus is not None:
        return None
    if config.rollout.async_mode == "sync" and config.resolved_train_backend == "megatron":
        room = () if config.sglang.get("mem_fraction_static") is not None else (Change(("sglang", "mem_fraction_static"), SHARED_FRACTION),)
        fix = (set_flag("colocate", True), *room)
    else:
        fix = (set_flag("rollout_num_gpus", config.resolved_rollout_num_gpus_per_engine),)
    return Violation("nothing says which GPUs the engines take: their own (--rollout-num-gpus) or the trainer's (--colocate)", fix)


@rule("CFG-EXTERNAL-ENGINES", "--rollout-external-engine-addrs", "--rollout-num-gpus")
def engines_are_here_or_elsewhere(config: Config) -> Violation | None:
    """Engines are started by the run, or run already."""
    addresses, num_gpus = config.engine.rollout_external_engine_addrs, config.cluster.rollout_num_gpus
    if num_gpus == 0 and not addresses and config.needs_engine:
        text = "--rollout-num-gpus 0 starts no engine, and none is given that runs already"
        return Violation(text, advice="give engines by --rollout-external-engine-addrs, or GPUs to start some on")
    if addresses and num_gpus:
        text = f"--rollout-external-engine-addrs uses engines that run already, --rollout-num-gpus {num_gpus} would start others"
        return Violation(text, (set_flag("rollout_num_gpus", 0),))
    if addresses and config.cluster.colocate:
        text = "--colocate shares the trainer's GPUs with engines of this run, --rollout-external-engine-addrs uses others"
        return Violation(text, (unset_flag("colocate"),), flags=("--rollout-external-engine-addrs", "--colocate"))
    return None


@rule("CFG-EXTERNAL-TOPOLOGY", "--rollout-external-engine-addrs", "--sglang-config")
def topology_is_of_engines_here(config: Config) -> Violation | None:
    """A topology says which engines to start."""
    if not config.engine.rollout_external_engine_addrs or config.engine.sglang_config is None:
        return None
    text = "--sglang-config says which engines to start, --rollout-external-engine-addrs uses those that run already"
    return Violation(text, (unset_flag("sglang_config"),))


@rule("CFG-NODE-GPUS", "--actor-num-gpus-per-node", "--num-gpus-per-node")
def trainer_fits_its_nodes(config: Config) -> Violation | None:
    """A node gives no more GPUs than it has."""
    wanted, there = config.resolved_actor_num_gpus_per_node, config.cluster.num_gpus_per_node
    if config.cluster.device == "cpu" or wanted <= there:
        return None
    text = f"--actor-num-gpus-per-node {wanted} is more than a node has, --num-gpus-per-node {there}"
    return Violation(text, (set_flag("actor_num_gpus_per_node", there),))


@rule("CFG-TRANSPORT", "--update-weight-transport")
def transport_reaches_the_engines(config: Config) -> Violation | None:
    """Shared memory needs a shared device, a broadcast separate ones."""
    transport, cluster = config.weight_sync.update_weight_transport, config.cluster
    given = f"--update-weight-transport {transport}"
    fix = (unset_flag("update_weight_transport"),)
    if transport in ("nccl", "gloo") and config.resolved_rollout_backend == "embedded":
        return Violation(f"{given} broadcasts to SGLang engines, the embedded engine takes tensor or disk", fix)
    if transport == "nccl" and cluster.colocate:
        flags = ("--update-weight-transport", "--colocate")
        return Violation(f"{given} needs a GPU for each side, with --colocate they share one", fix, flags=flags)
    if transport == "nccl" and cluster.device == "cpu":
        return Violation(f"{given} runs on GPUs, --device is cpu", (set_flag("update_weight_transport", "gloo"),))
    separate = config.resolved_rollout_backend == "sglang" and not cluster.colocate and cluster.device != "cpu"
    if transport == "tensor" and separate and config.num_nodes > 1:
        return Violation(f"{given} shares memory, and trainer and engines are on {config.num_nodes} nodes", fix)
    return None


@rule("CFG-DP-ATTENTION", "--sglang-dp-size", "--sglang-enable-dp-attention")
def replicas_are_of_attention(config: Config) -> Violation | None:
    """Whole replicas are engines of their own behind the router; within an engine only attention has replicas."""
    for group in engine_groups(config):
        dp_size = group.arguments.value("dp_size")
        if dp_size > 1 and not group.arguments.value("enable_dp_attention"):
            where = "" if group.place is None else f" (model {group.model}, group {group.place[1] + 1} of --sglang-config)"
            text = f"--sglang-dp-size {dp_size}{where} without --sglang-enable-dp-attention: whole replicas are engines of their own"
            return Violation(text, (Change(("sglang", "enable_dp_attention"), True),))
    return None


@rule("CFG-SERVED-MODELS", "--sglang-config")
def one_model_follows_the_trainer(config: Config) -> Violation | None:
    """Rollouts are sampled from one model, which is given the trainer's weights; the others stay as they are."""
    models = config.engine.sglang_config
    groups = engine_groups(config)
    if models is None or not groups or not config.needs_engine:
        return None
    names = [model.name for model in models]
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        return Violation(
            f"--sglang-config: two models are called {twice}", advice="hooks and logs tell models by their names: give each its own"
        )
    following = list(dict.fromkeys(group.model for group in groups if group.update_weights))
    if len(following) == 1 or config.debug.debug_rollout_only:
        return None
    if not following:
        return Violation(
            "--sglang-config: no model follows the trainer: none has `update_weights: true`, and none is --hf-checkpoint",
            advice="give the model that rollouts are sampled from `update_weights: true`",
        )
    return Violation(
        f"--sglang-config: {' and '.join(following)} would follow the trainer, rollouts are sampled from one",
        advice="give the others `update_weights: false`, or make them server groups of one model",
    )


RULES = (
    trainer_has_its_own_flags,
    engines_have_their_own_flags,
    engines_have_gpus,
    engines_are_here_or_elsewhere,
    topology_is_of_engines_here,
    trainer_fits_its_nodes,
    transport_reaches_the_engines,
    replicas_are_of_attention,
    one_model_follows_the_trainer,
)
