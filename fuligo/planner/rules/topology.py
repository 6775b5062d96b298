"""Number, size and placement of engines.

Sources: SGLang 0.5.15.post1, `ServerArgs.check_server_args` (pipeline stages); sglang-router 0.3.2 (prefill and decode in pairs).
"""

from collections.abc import Iterator

from fuligo.config.findings import Change, Severity
from fuligo.config.rules.cluster import SHARED_FRACTION
from fuligo.config.rules.rule import set_flag, unset_flag
from fuligo.config.topology import EngineGroupSpec
from fuligo.planner.rules.parallel import trainer_gpus
from fuligo.planner.rules.rule import Fix, Violation, divisors, nearest_first, rule
from fuligo.planner.rules.servers import all_groups, engine_size, group_rule, option, placed, resizes, running, set_each, where
from fuligo.planner.subject import Subject
from fuligo.quantities import count


def _num_gpus_given(subject: Subject) -> str:
    config = subject.config
    shares = config.cluster.colocate and config.cluster.rollout_num_gpus is None
    return f"{trainer_gpus(config)}, shared by --colocate" if shares else f"--rollout-num-gpus {config.resolved_rollout_num_gpus}"


@rule("PLAN-SERVER-GPUS", "--sglang-config", "--rollout-num-gpus")
def groups_add_up(subject: Subject) -> Iterator[Violation]:
    """The GPUs of all engine groups must add up to the engines' GPUs."""
    config = subject.config
    groups = all_groups(subject)
    if config.engine.sglang_config is None or not groups:
        return
    total, there = sum(spec.num_gpus for spec in groups), config.resolved_rollout_num_gpus
    if total == there:
        return
    listed = " + ".join(str(spec.num_gpus) for spec in groups)
    yield Violation(
        f"--sglang-config: the groups' num_gpus {listed} = {total}, but the engines have {_num_gpus_given(subject)}",
        (*_resized_groups(groups, there - total), (set_flag("rollout_num_gpus", total),)),
        f"choose groups that add up to {there}",
    )


def _resized_groups(groups: tuple[EngineGroupSpec, ...], missing: int) -> Iterator[Fix]:
    """Yield fixes that resize one group to make up the difference, the largest groups first."""
    for spec in sorted(groups, key=lambda spec: -spec.num_gpus):
        size = spec.num_gpus + missing
        if spec.place is not None and size > 0 and size % spec.num_gpus_per_engine == 0:
            yield (Change(("engine", "sglang_config", spec.place[0], "server_groups", spec.place[1], "num_gpus"), size),)


@group_rule("PLAN-ENGINE-GPUS", "--rollout-num-gpus-per-engine", "--rollout-num-gpus", "--sglang-config", groups=all_groups)
def engines_are_whole(subject: Subject, spec: EngineGroupSpec) -> Iterator[Violation]:
    """The GPUs of a group must form whole engines."""
    config = subject.config
    if spec.worker_type == "placeholder" or (spec.num_gpus and spec.num_gpus % spec.num_gpus_per_engine == 0):
        return
    there = f"num_gpus {spec.num_gpus}{where(spec)} of --sglang-config" if spec.place else _num_gpus_given(subject)
    sizes = nearest_first(spec.num_gpus_per_engine, divisors(spec.num_gpus) if spec.num_gpus else [])
    fixes = list(resizes(subject, spec, sizes))
    if spec.place is None and config.cluster.rollout_num_gpus is not None and spec.num_gpus > spec.num_gpus_per_engine:
        fixes.append((set_flag("rollout_num_gpus", spec.num_gpus // spec.num_gpus_per_engine * spec.num_gpus_per_engine),))
    relation = "exceeds" if spec.num_gpus_per_engine > spec.num_gpus else "does not divide"
    yield Violation(f"{engine_size(subject, spec)} {relation} {there}", tuple(fixes), "choose a size that divides the GPUs")


@group_rule("PLAN-ENGINE-NODES", "--rollout-num-gpus-per-engine", "--num-gpus-per-node", groups=running)
def engines_fill_nodes(subject: Subject, spec: EngineGroupSpec) -> Iterator[Violation]:
    """An engine's number of GPUs must divide the GPUs of a node or be a multiple of them."""
    config, node = subject.config, subject.config.cluster.num_gpus_per_node
    if config.cluster.device == "cpu":
        return
    size = spec.num_gpus_per_engine
    if node % size == 0 or size % node == 0 or spec.num_gpus % size:
        return
    fitting = [other for other in divisors(spec.num_gpus) if node % other == 0 or other % node == 0]
    yield Violation(
        f"{engine_size(subject, spec)} neither divides nor is a multiple of the {node} GPUs of a node (--num-gpus-per-node): "
        "engines would straddle nodes",
        tuple(resizes(subject, spec, nearest_first(size, fitting))),
    )


@group_rule("PLAN-ENGINE-PP", "--sglang-pp-size", "--rollout-num-gpus-per-engine", groups=running)
def pipeline_divides_engine(subject: Subject, spec: EngineGroupSpec) -> Iterator[Violation]:
    """An engine's GPUs are its tensor-parallel GPUs times its pipeline stages."""
    if spec.num_gpus_per_engine % spec.pp_size:
        sizes = nearest_first(spec.pp_size, divisors(spec.num_gpus_per_engine))
        text = f"{placed(spec, 'pp_size')} does not divide {engine_size(subject, spec)}"
        yield Violation(text, set_each(subject, spec, "pp_size", *sizes))


@group_rule("PLAN-ENGINE-PP-LAYERS", "--sglang-pp-size", groups=running)
def pipeline_has_layers(subject: Subject, spec: EngineGroupSpec) -> Iterator[Violation]:
    """Every pipeline stage of an engine needs at least one layer."""
    num_layers = subject.rollout_architecture.num_layers
    if spec.pp_size > num_layers and spec.num_gpus_per_engine % spec.pp_size == 0:
        sizes = [size for size in divisors(spec.num_gpus_per_engine) if size <= num_layers]
        text = f"{placed(spec, 'pp_size')} exceeds the model's {num_layers} layers"
        yield Violation(text, set_each(subject, spec, "pp_size", *nearest_first(spec.pp_size, sizes)))


@rule("PLAN-PD-PAIR", "--sglang-config")
def prefill_comes_with_decode(subject: Subject) -> Iterator[Violation]:
    """Prefill and decode engines work in pairs; a router serves either such pairs or regular engines."""
    types: dict[str, set[str]] = {}
    for spec in running(subject):
        types.setdefault(spec.model, set()).add(spec.worker_type)
    for model, there in types.items():
        if there in ({"regular"}, {"prefill", "decode"}):
            continue
        if "regular" in there:
            *others, last = sorted(there)
            problem = f"{', '.join(others)} and {last} engines: one router serves either regular engines or pairs of prefill and decode"
        else:
            problem = f"{next(iter(there))} engines only: prefill and decode engines come in pairs"
        advice = "use both prefill and decode groups, or make all of them regular"
        yield Violation(f"--sglang-config: model {model} has {problem}", tuple(_paired(subject, model)), advice)


def _paired(subject: Subject, model: str) -> Iterator[Fix]:
    """Yield fixes: the regular groups, or one of several groups, get the missing type; or all become regular."""
    groups = [spec for spec in running(subject) if spec.model == model and spec.place is not None]
    there = {spec.worker_type for spec in groups}
    missing = "decode" if "prefill" in there else "prefill"
    regular = [spec for spec in groups if spec.worker_type == "regular"]
    if regular and len(there) == 2:
        yield tuple(_as_worker(spec, missing) for spec in regular)
    elif len(groups) > 1:
        yield (_as_worker(groups[0 if missing == "prefill" else -1], missing),)
    transfers = tuple(Change(("sglang", name), None) for name in subject.config.sglang if name.startswith("disaggregation_"))
    yield (*(_as_worker(spec, "regular") for spec in groups if spec not in regular), *transfers)


def _as_worker(spec: EngineGroupSpec, worker_type: str) -> Change:
    assert spec.place is not None
    return Change(("engine", "sglang_config", spec.place[0], "server_groups", spec.place[1], "worker_type"), worker_type)


@rule("PLAN-PD-NO-EFFECT", "--sglang-config", "--sglang-disaggregation-transfer-backend", "--sglang-disaggregation-ib-device")
def disaggregation_has_pairs(subject: Subject) -> Iterator[Violation]:
    """Disaggregation flags have no effect without prefill and decode engines."""
    groups = running(subject)
    if not groups or any(spec.worker_type in ("prefill", "decode") for spec in groups):
        return
    schema = subject.config.sglang.schema()
    given = [
        name for name, value in subject.config.sglang.items() if name.startswith("disaggregation_") and value != schema.flags[name].default
    ]
    if given:
        options = tuple(option(name) for name in given)
        have = "has" if len(options) == 1 else "have"
        text = f"{' and '.join(options)} {have} no effect without prefill and decode groups in --sglang-config"
        yield Violation(text, (tuple(Change(("sglang", name), None) for name in given),), flags=options)


@rule("PLAN-SPLIT-GPUS", "--rollout-num-gpus", "--actor-num-gpus-per-node", "--colocate", severity=Severity.WARNING)
def separate_gpus_take_turns(subject: Subject) -> Iterator[Violation]:
    """In sync mode, separate GPUs take turns: the trainer's GPUs are idle while the engines sample, and vice versa."""
    config = subject.config
    separate = not config.engine_capabilities.beside_trainer and not config.cluster.colocate and config.cluster.device != "cpu"
    engines, trainer = config.num_rollout_only_gpus, config.num_train_gpus
    if not separate or not engines or config.rollout.async_mode != "sync" or config.is_sft or config.debug.debug_rollout_only:
        return
    together = trainer + engines
    shared = (
        set_flag("colocate", True),
        unset_flag("rollout_num_gpus"),
        set_flag("actor_num_gpus_per_node", together // config.cluster.actor_num_nodes),
    )
    fixes: tuple[Fix, ...] = ((set_flag("async_mode", "one-step"),),)
    if together % config.cluster.actor_num_nodes == 0 and together <= config.cluster.actor_num_nodes * config.cluster.num_gpus_per_node:
        fixes = ((*shared, Change(("sglang", "mem_fraction_static"), SHARED_FRACTION)), *fixes)
    yield Violation(
        f"the trainer has {count(trainer, 'GPU')} and the engines have {engines} others (--rollout-num-gpus), {together} in total: in sync "
        "mode one side idles while the other works; --colocate shares the GPUs, --async-mode one-step uses both sides at once",
        fixes,
    )
