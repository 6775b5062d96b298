"""Rules on backends, engines and their GPUs."""

from collections.abc import Iterator, Sequence

from fuligo.config import Config
from fuligo.config.findings import Change, Rule, simple_rule
from fuligo.config.flag import option_name
from fuligo.config.flags import EMBEDDED_FLAGS, MEGATRON_FLAGS, MTP_FLAGS, SGLANG_FLAGS, TORCH_FLAGS
from fuligo.config.rules.rule import Violation, rule, set_flag, unset_flag, unset_given
from fuligo.config.topology import engine_groups, policy_groups, policy_model

SHARED_FRACTION = 0.7
"""Fraction of GPU memory that published recipes assign to engines that share GPUs with the trainer."""


def _foreign(owner: str, chosen: str, options: Sequence[str], *fix: Change) -> Iterator[Violation]:
    """Yield a violation for the flags `options` of a backend (`owner`) in a run with another one (`chosen`), if there are any."""
    if options:
        shown = options[0] if len(options) == 1 else f"{', '.join(options[:-1])} and {options[-1]}"
        verb = "is a flag" if len(options) == 1 else "are flags"
        yield Violation(f"{shown} {verb} of {owner}, but the run has {chosen}", fix, flags=tuple(options))


@rule("CFG-TRAIN-BACKEND", "--train-backend")
def flags_of_the_other_trainer(config: Config) -> Iterator[Violation]:
    """Reject flags of the other trainer, which would be silently ignored."""
    if config.resolved_train_backend == "torch":
        foreign = config.given_options([name for name in MEGATRON_FLAGS if name not in MTP_FLAGS], ("megatron",))
        yield from _foreign("the Megatron trainer", "--train-backend torch", foreign, unset_flag("train_backend"))
        return
    options = config.given_options(TORCH_FLAGS)
    if not options:
        return
    text = f"{' and '.join(options)} can be used with the torch trainer only, but this run has the Megatron trainer"
    fixes = [*unset_given(config, TORCH_FLAGS)]
    if "--gradient-checkpointing" in options:
        text += "; Megatron has --recompute-granularity full instead of --gradient-checkpointing"
        if not config.parallel.recompute_granularity:
            full = set_flag("recompute_granularity", "full")
            fixes += [full, set_flag("recompute_method", "uniform"), set_flag("recompute_num_layers", 1)]
    yield Violation(text, tuple(fixes), flags=tuple(options))


@rule("CFG-ROLLOUT-BACKEND", "--rollout-backend")
def flags_of_the_other_engine(config: Config) -> Iterator[Violation]:
    """Reject flags of the other engine, which would be silently ignored."""
    owned_by_sglang = config.given_options(SGLANG_FLAGS, ("sglang", "router"))
    if config.resolved_rollout_backend != "embedded":
        given = config.given_options(EMBEDDED_FLAGS)
        yield from _foreign("the embedded engine", "SGLang engines", given, *unset_given(config, EMBEDDED_FLAGS))
    elif config.cluster.rollout_backend == "embedded":
        shared = () if config.cluster.rollout_num_gpus is not None else (set_flag("colocate", True),)
        yield from _foreign("SGLang engines", "--rollout-backend embedded", owned_by_sglang, unset_flag("rollout_backend"), *shared)
    else:  # only the router's flags are left: all others choose SGLang
        fix = (set_flag("rollout_backend", "sglang"), set_flag("colocate", True))
        yield from _foreign("SGLang's router", "the embedded engine", owned_by_sglang, *fix)


@rule("CFG-ROLLOUT-GPUS", "--rollout-num-gpus", "--colocate")
def engines_have_gpus(config: Config) -> Iterator[Violation]:
    """Require --rollout-num-gpus unless engines share the trainer's GPUs: fuligo chooses it only for a run without Ray."""
    cluster = config.cluster
    elsewhere = config.engine.rollout_external_engine_addrs or not config.needs_engine or cluster.device == "cpu"
    elsewhere = elsewhere or not config.trains  # without a trainer, engines take the first GPUs
    if not (config.engine_capabilities.beside_trainer or elsewhere or cluster.colocate) and cluster.rollout_num_gpus is None:
        if config.rollout.async_mode == "sync" and config.resolved_train_backend == "megatron":
            fix = (set_flag("colocate", True),)
            if config.sglang.get("mem_fraction_static") is None:
                fix = (*fix, Change(("sglang", "mem_fraction_static"), SHARED_FRACTION))
        else:
            fix = (set_flag("rollout_num_gpus", config.resolved_rollout_num_gpus_per_engine),)
        yield Violation("the engines need GPUs: their own (--rollout-num-gpus) or the trainer's (--colocate)", fix)


@rule("CFG-EXTERNAL-ENGINES", "--rollout-external-engine-addrs", "--rollout-num-gpus")
def engines_are_here_or_elsewhere(config: Config) -> Iterator[Violation]:
    """Reject a mix of external engines and engines that the run starts, and a run that has neither."""
    addresses, num_gpus = config.engine.rollout_external_engine_addrs, config.cluster.rollout_num_gpus
    if num_gpus == 0 and not addresses and config.needs_engine:
        text = "--rollout-num-gpus 0 starts no engine, and no external engine is given"
        yield Violation(text, advice="use --rollout-external-engine-addrs, or raise --rollout-num-gpus")
    elif addresses and num_gpus:
        text = f"--rollout-external-engine-addrs uses running engines, but --rollout-num-gpus {num_gpus} would start others"
        yield Violation(text, (set_flag("rollout_num_gpus", 0),))
    elif addresses and config.cluster.colocate:
        text = "--colocate shares the trainer's GPUs with engines of this run, but --rollout-external-engine-addrs uses external ones"
        yield Violation(text, (unset_flag("colocate"),), flags=("--rollout-external-engine-addrs", "--colocate"))


@rule("CFG-NODE-GPUS", "--actor-num-gpus-per-node", "--num-gpus-per-node")
def trainer_fits_its_nodes(config: Config) -> Iterator[Violation]:
    """Reject more trainer GPUs per node than a node has."""
    wanted, there = config.resolved_actor_num_gpus_per_node, config.cluster.num_gpus_per_node
    if config.cluster.device != "cpu" and wanted > there:
        text = f"--actor-num-gpus-per-node {wanted} exceeds the GPUs of a node (--num-gpus-per-node {there})"
        yield Violation(text, (set_flag("actor_num_gpus_per_node", there),))


@rule("CFG-HOSTFILE", "--hostfile")
def nodes_are_started_by_launch(config: Config) -> Iterator[Violation]:
    """Reject a hostfile for `fuligo train`, which starts no nodes."""
    hostfile = config.cluster.hostfile
    if hostfile is not None:
        text = f"--hostfile {hostfile}: fuligo train does not start the nodes of a hostfile"
        yield Violation(text, advice=f"use fuligo launch --hostfile {hostfile} -- <these arguments>")


@rule("CFG-COLOCATE-SYNC", "--colocate")
def shared_engines_get_weights_each_step(config: Config) -> Iterator[Violation]:
    """Reject engines on shared GPUs that would run without current weights: between two syncs, or after a prefill-decode pair restarts."""
    if config.cluster.colocate and config.engine_capabilities.releases_memory:
        remedy = "give the engines their own GPUs (--rollout-num-gpus)"
        interval = config.weight_sync.update_weights_interval
        decoding = [group.model for group in engine_groups(config) if group.worker_type == "decode"]
        if config.engine.use_fault_tolerance and decoding and policy_model(config) in decoding:
            text = "--use-fault-tolerance cannot restart prefill and decode engines that share GPUs with the trainer (--colocate)"
            yield Violation(text, advice=remedy, flags=("--colocate", "--use-fault-tolerance"))
        elif interval > 1:
            given = f"--update-weights-interval {interval} with --colocate"
            text = f"{given}: engines lose their weights in each step, so each step must sync them"
            yield Violation(text, (set_flag("update_weights_interval", 1),), f"or {remedy}", ("--colocate", "--update-weights-interval"))


@rule("CFG-TRANSPORT", "--update-weight-transport")
def transport_reaches_the_engines(config: Config) -> Iterator[Violation]:
    """Reject transports that cannot reach the engines: shared memory needs one node, NCCL needs separate GPUs."""
    transport, cluster = config.weight_sync.update_weight_transport, config.cluster
    given = f"--update-weight-transport {transport}"
    fix = (unset_flag("update_weight_transport"),)
    separate = not config.engine_capabilities.beside_trainer and not cluster.colocate and cluster.device != "cpu"
    if transport not in ("auto", *config.engine_capabilities.weight_transports):
        yield Violation(f"{given} broadcasts to SGLang engines; the embedded engine supports tensor or disk", fix)
    elif transport == "nccl" and cluster.colocate:
        flags = ("--update-weight-transport", "--colocate")
        yield Violation(f"{given} needs separate GPUs for trainer and engines, but --colocate shares them", fix, flags=flags)
    elif transport == "nccl" and cluster.device == "cpu":
        yield Violation(f"{given} runs on GPUs, but --device is cpu", (set_flag("update_weight_transport", "gloo"),))
    elif transport == "tensor" and separate and config.num_nodes > 1:
        yield Violation(f"{given} shares memory, but trainer and engines are on {config.num_nodes} nodes", fix)


@rule("CFG-KEPT-REQUESTS", "--update-weight-requests", "--rollout-backend", "--rollout-external-engine-addrs", "--sglang-config")
def requests_stay_in_the_engine(config: Config) -> Iterator[Violation]:
    """Reject --update-weight-requests continue where engines cannot keep requests over a weight sync, or it is not tested."""
    if config.weight_sync.update_weight_requests == "continue" and config.trains and (reason := _no_kept_requests_because(config)):
        flag, text = reason
        flags = ("--update-weight-requests", *([flag] if flag else []))
        yield Violation(f"--update-weight-requests continue: {text}", (unset_flag("update_weight_requests"),), flags=flags)


def _no_kept_requests_because(config: Config) -> tuple[str, str] | None:
    """Return the flag that prevents keeping requests over a weight sync, and the reason; None if they can be kept."""
    if not config.engine_capabilities.keeps_requests:
        return "--rollout-backend", f"{config.resolved_rollout_backend} engines cannot continue with the KV cache of older weights"
    if config.engine.rollout_external_engine_addrs:
        return "--rollout-external-engine-addrs", "external engines may lack the plugin that keeps requests"
    if config.syncs_adapter:
        return "--lora-sync", "engines replace an adapter only without requests; --lora-sync merged would work"
    if config.algorithm.use_rollout_routing_replay:
        return "--use-rollout-routing-replay", "the experts recorded over a weight sync are not tested"
    for group in policy_groups(config):
        values = group.arguments
        if group.worker_type in ("prefill", "decode"):
            return "--sglang-config", f"{group.worker_type} engines cannot pause with requests"
        if group.pp_size > 1:
            return "--sglang-pp-size", "engines with pipeline stages cannot pause with requests"
        if values.value("dp_size") > 1:
            return "--sglang-dp-size", "data-parallel ranks pause in different steps and would wait for each other"
        if values.value("enable_pdmux"):
            return "--sglang-enable-pdmux", "engines that multiplex prefill and decode go on sampling during a pause"
        if values.get("speculative_algorithm") is not None:
            return "--sglang-speculative-algorithm", "speculative decoding over a weight sync is not tested"
    return None


@rule("CFG-STORED-CACHE", "--sglang-hicache-storage-backend", "--sglang-enable-lmcache")
def no_cache_outlives_the_weights(config: Config) -> Iterator[Violation]:
    """Reject KV cache stored outside the engines: SGLang looks it up by tokens alone, so it would reuse that of older weights."""
    if not config.trains or config.engine.rollout_external_engine_addrs:
        return
    for group in policy_groups(config):
        for name in ("hicache_storage_backend", "enable_lmcache"):
            if value := group.arguments.value(name):
                option = option_name(f"sglang_{name}")
                given = option if value is True else f"{option} {value}"
                text = f"{given}: after a weight sync, engines would reuse stored KV cache of older weights"
                if config.sglang.get(name) == value:
                    yield Violation(text, (Change(("sglang", name), None),), flags=(option,))
                else:
                    yield Violation(text, advice=f"remove {name} from --sglang-config", flags=(option,))
                return


@rule("CFG-DP-ATTENTION", "--sglang-dp-size", "--sglang-enable-dp-attention")
def replicas_are_of_attention(config: Config) -> Iterator[Violation]:
    """Require DP attention with a DP size above 1: full replicas are separate engines behind the router."""
    for group in engine_groups(config):
        dp_size = group.arguments.value("dp_size")
        if dp_size > 1 and not group.arguments.value("enable_dp_attention"):
            where = "" if group.place is None else f" (model {group.model}, group {group.place[1] + 1} of --sglang-config)"
            text = f"--sglang-dp-size {dp_size}{where} without --sglang-enable-dp-attention: full replicas must be separate engines"
            yield Violation(text, (Change(("sglang", "enable_dp_attention"), True),))
            return


@rule("CFG-ENGINE-KEYS", "--sglang-tokenizer-worker-num", "--sglang-skip-server-warmup")
def engines_ask_for_keys(config: Config) -> Iterator[Violation]:
    """Reject settings with which SGLang does not check the API key, or cannot start because its warm-up sends none."""
    for group in engine_groups(config):
        if group.arguments.value("tokenizer_worker_num") > 1:
            text = "--sglang-tokenizer-worker-num above 1: SGLang then checks no API key, so anyone could change the engine's weights"
            yield Violation(text, (Change(("sglang", "tokenizer_worker_num"), 1),), flags=("--sglang-tokenizer-worker-num",))
            return
        if group.arguments.get("skip_server_warmup") is False:
            text = "--sglang-skip-server-warmup is false: SGLang's warm-up calls the engine without the API key that the run sets"
            yield Violation(text, (Change(("sglang", "skip_server_warmup"), True),), flags=("--sglang-skip-server-warmup",))
            return


@rule("CFG-SERVED-MODELS", "--sglang-config")
def one_model_follows_the_trainer(config: Config) -> Iterator[Violation]:
    """Require distinct model names, and exactly one model that receives the trainer's weights; rollouts are sampled from it."""
    models = config.engine.sglang_config
    groups = engine_groups(config)
    if models is None or not groups or not config.needs_engine:
        return
    names = [model.name for model in models]
    twice = next((name for name in names if names.count(name) > 1), None)
    following = list(dict.fromkeys(group.model for group in groups if group.update_weights))
    if twice is not None:
        yield Violation(f"--sglang-config: two models are named {twice}", advice="give each model its own name; hooks and logs use it")
    elif not following and not config.debug.debug_rollout_only:
        text = "--sglang-config: no model receives the trainer's weights: none has `update_weights: true`, and none is --hf-checkpoint"
        yield Violation(text, advice="set `update_weights: true` for the model to sample rollouts from")
    elif len(following) > 1 and not config.debug.debug_rollout_only:
        text = f"--sglang-config: {' and '.join(following)} would receive the trainer's weights, but rollouts are sampled from one model"
        yield Violation(text, advice="set `update_weights: false` for the others, or make them server groups of one model")


# fmt: off
TABLE: tuple[Rule[Config, Change], ...] = (
    simple_rule("CFG-EXTERNAL-TOPOLOGY", "--rollout-external-engine-addrs --sglang-config",
        "Reject a topology for external engines: it describes engines to start.",
        lambda config: config.engine.rollout_external_engine_addrs and config.engine.sglang_config is not None,
        "--sglang-config describes engines to start, but --rollout-external-engine-addrs uses running ones", unset_flag("sglang_config")),
    simple_rule("CFG-WEIGHT-MODE", "--update-weight-mode --rollout-backend",
        "Reject --update-weight-mode delta with the embedded engine, which refuses a weight sync that lacks a tensor.",
        lambda config: config.weight_sync.update_weight_mode == "delta" and config.trains and config.needs_engine
        and not config.engine_capabilities.takes_changes,
        lambda config: f"--update-weight-mode delta leaves unchanged tensors out, and {config.resolved_rollout_backend} engines take "
        "complete syncs only",
        unset_flag("update_weight_mode")),
)
# fmt: on
