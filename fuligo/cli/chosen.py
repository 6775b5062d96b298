"""Choice of values for unset flags on this machine: those of the plan for its GPUs, SGLang if it is installed, the trainer."""

import os
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from fuligo.config import Config
from fuligo.config.changes import apply_changes, change_text
from fuligo.config.findings import Change, Finding, Severity
from fuligo.config.flags import MEGATRON_FLAGS
from fuligo.config.launcher import chosen_launcher
from fuligo.config.schemas import schema
from fuligo.config.validate import findings
from fuligo.errors import ConfigError
from fuligo.limits import memory_bytes
from fuligo.machine.nvidia import GPU_QUERY, Gpu, nvidia_smi, parse_devices
from fuligo.machine.packages import package_versions
from fuligo.planner.choices import apply_choices, choose
from fuligo.planner.gpus import GPUS, known_gpu
from fuligo.planner.make_plan import make_plan
from fuligo.planner.plan import Choice
from fuligo.planner.subject import read_subject
from fuligo.quantities import as_typed, count

SLOWER = "sampling with the embedded engine, which on a GPU is about 4 x slower than SGLang"


@dataclass(frozen=True, slots=True)
class Checked:
    """Config with the chosen values, and the findings about it."""

    config: Config
    findings: tuple[Finding, ...]
    choices: tuple[str, ...]
    """Chosen values with their reasons, as lines for the console."""
    warnings: tuple[str, ...] = ()
    """Warnings about the GPUs of this machine."""


def checked(config: Config, sharing: Sequence[Config] = ()) -> Checked:
    """Choose unset values for the GPUs of this machine and check the run on them. `sharing`: other runs that use the same engines.

    On a CPU, and on a GPU that the planner does not know, only the rules are checked, not memory and time; for a model that the planner
    does not know, only the rules about flags.
    """
    devices = find_devices(config)
    gpu = known_gpu(devices[0].name, devices[0].memory_bytes) if devices else None
    config, engine = with_installed_engine(config, len(devices), None if sharing else model_of_two(devices), memory_bytes())
    warnings = tuple(_occupied(config, devices))
    try:
        if gpu is not None:
            plan = make_plan(config, gpu.name, "train", sharing=sharing)
            choices = (*engine, *lines(plan.choices, config))
            return Checked(apply_choices(config, plan.choices), tuple(_refused(plan.findings, config)), choices, warnings)
        from fuligo.planner.check import check

        return Checked(config, check(read_subject(config, next(iter(GPUS)))), tuple(engine), warnings)
    except ConfigError as error:
        unplanned = () if gpu is None else (f"starting without a plan of memory and time: {error}",)
        return Checked(config, findings(config), (*engine, *unplanned), warnings)


def _occupied(config: Config, devices: Sequence[Gpu]) -> Iterator[str]:
    """Yield a warning for each GPU of the run on this machine on which other processes compute."""
    if chosen_launcher(config) == "local":
        for gpu in devices[: config.total_num_gpus]:
            if gpu.occupied_warning is not None:
                yield f"GPU {gpu.index}: {gpu.occupied_warning}"


def _refused(found: Iterable[Finding], config: Config) -> Iterator[Finding]:
    """Yield the plan's findings; --ignore-memory-plan turns errors about memory, which are estimates, into warnings."""
    for finding in found:
        if finding.severity is Severity.WARNING or not finding.id.startswith("PLAN-MEMORY"):
            yield finding
        elif config.debug.ignore_memory_plan:
            yield replace(finding, severity=Severity.WARNING)
        else:
            start = "To start anyway: --ignore-memory-plan."
            yield replace(finding, advice=f"{finding.advice} {start}" if finding.advice else start)


def chosen_for_evaluation(config: Config) -> Checked:
    """Choose unset values of the engines for the GPUs of this machine. The result has no findings: nothing is checked."""
    devices = find_devices(config)
    config, engine = with_installed_engine(config, len(devices))
    gpu = known_gpu(devices[0].name, devices[0].memory_bytes) if devices else None
    warnings = tuple(_occupied(config, devices))
    if gpu is None:
        return Checked(config, (), tuple(engine), warnings)
    try:
        subject, choices = choose(read_subject(config, gpu.name))
    except ConfigError:
        return Checked(config, (), tuple(engine), warnings)
    return Checked(subject.config, (), (*engine, *lines(choices, subject.config)), warnings)


def find_devices(config: Config) -> tuple[Gpu, ...]:
    """Return the GPUs of this machine that CUDA_VISIBLE_DEVICES leaves visible; none for a run on a CPU."""
    if config.cluster.device == "cpu":
        return ()
    devices = parse_devices(nvidia_smi(*GPU_QUERY))
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is None:
        return devices
    names = [name for name in visible.split(",") if name.strip()]
    if all(name.strip().isdigit() for name in names):
        return tuple(device for device in devices if str(device.index) in {name.strip() for name in names})
    return devices[: len(names)]  # UUIDs: the devices are assumed to be of one model


def model_of_two(devices: Sequence[Gpu]) -> str | None:
    """Return the planner's name of the first two GPUs; None if they differ, or the planner does not know them."""
    found = {known_gpu(device.name, device.memory_bytes) for device in devices[:2]}
    model = found.pop() if len(found) == 1 else None
    return None if model is None else model.name


def with_installed_engine(
    config: Config, num_gpus: int, gpu: str | None = None, host_memory_bytes: int | None = None
) -> tuple[Config, list[str]]:
    """Return the config with SGLang as engine if it is installed and no flag chooses an engine, and console lines about the choice.

    If a flag chooses SGLang, only the GPUs of its engines are chosen.

    Args:
        num_gpus: GPUs of this machine
        gpu: model of the first two of them, for the plan that decides whether trainer and engines share these; None: without this plan
        host_memory_bytes: memory for the same plan; None: that of the vendor's own servers
    """
    if not num_gpus or not config.needs_engine or chosen_launcher(config) != "local":
        return config, []
    if _has_chosen_engine(config):
        return _with_placed_engines(config, num_gpus, gpu, host_memory_bytes)
    python = config.engine.interpreter
    missing = [
        name
        for name, version in package_versions(("sglang", "sglang-router"), python, config.engine_environment.settings()).items()
        if not version
    ]
    if missing:
        wanted = " ".join(f"{name}=={schema(group).version}" for name, group in (("sglang", "sglang"), ("sglang-router", "router")))
        return config, [f"{SLOWER}; to use SGLang: {python} -m pip install {wanted}"]
    return _with_sglang(config, num_gpus, gpu, "SGLang is installed", host_memory_bytes)


def with_assumed_engine(config: Config, gpu: str, host_memory_bytes: int | None = None) -> tuple[Config, list[str]]:
    """Return the config with the engine that `fuligo train` chooses on a node with SGLang, and a note about the choice.

    Used to plan a run on other machines, whose nodes have --num-gpus-per-node GPUs of the model `gpu`. Flags that choose SGLang, and
    `host_memory_bytes`: see `with_installed_engine`.
    """
    if config.cluster.device == "cpu" or not config.needs_engine or chosen_launcher(config) != "local":
        return config, []
    num_gpus = config.cluster.num_gpus_per_node
    if _has_chosen_engine(config):
        return _with_placed_engines(config, num_gpus, gpu, host_memory_bytes)
    reason = f"assumed, as fuligo train chooses where SGLang is installed, with {count(num_gpus, 'GPU')} per node (--num-gpus-per-node)"
    return _with_sglang(config, num_gpus, gpu, reason, host_memory_bytes)


def _has_chosen_engine(config: Config) -> bool:
    return config.cluster.rollout_backend != "auto" or not config.engine_capabilities.beside_trainer


def _with_sglang(config: Config, num_gpus: int, gpu: str | None, reason: str, host_memory_bytes: int | None) -> tuple[Config, list[str]]:
    """Return the config with SGLang engines and their GPUs, and a line with the reason.

    Unless --no-colocate is given, trainer and engines share the GPUs if `num_gpus` are too few for both, and share two GPUs if, on separate
    ones, one of the two would always be idle and the plan for shared ones has no errors. The config is unchanged if SGLang would break a
    rule, or if no GPU is left for it.
    """
    changes = [] if _has_chosen_engine(config) else [Change(("cluster", "rollout_backend"), "sglang")]
    num_engine_gpus = _num_engine_gpus(config)
    two = [*changes, Change(("cluster", "colocate"), True), Change(("cluster", "actor_num_gpus_per_node"), 2)]
    if num_gpus >= 2 and gpu is not None and _would_idle(config) and _can_run(shared := apply_changes(config, two), gpu, host_memory_bytes):
        idle = f"on separate GPUs (--rollout-num-gpus {num_engine_gpus}), one of the two would always be idle"
        return shared, [f"{as_typed(change_text(change) for change in two)}: {reason}; {idle}"]
    if config.trains and not config.cluster.colocate:
        if config.num_train_gpus + num_engine_gpus <= num_gpus:
            changes.append(Change(("cluster", "rollout_num_gpus"), num_engine_gpus))
        elif config.cluster.colocate is None:
            changes.append(Change(("cluster", "colocate"), True))
        else:
            return config, [] if _has_chosen_engine(config) else [f"{SLOWER}; --no-colocate leaves no GPU for SGLang"]
    changed = apply_changes(config, changes)
    if _breaks_rules(config, changed):
        return config, []
    return changed, [f"{as_typed(change_text(change) for change in changes)}: {reason}"]


def _with_placed_engines(config: Config, num_gpus: int, gpu: str | None, host_memory_bytes: int | None) -> tuple[Config, list[str]]:
    """Return the config with GPUs for the engines that a flag chooses, placed as by `_with_sglang`, and a console line.

    The config is unchanged if a flag decides where the engines run.
    """
    flags = config.cluster
    decided = flags.colocate or flags.rollout_num_gpus is not None or config.engine.rollout_external_engine_addrs
    if decided or not config.trains or not config.engine_capabilities.releases_memory or config.num_train_gpus > num_gpus:
        return config, []
    separate, reason = config.num_train_gpus + _num_engine_gpus(config), "no flag says where the engines run"
    if separate > num_gpus:
        reason = f"trainer and engines need {separate} separate GPUs, but the machine has {num_gpus}"
    return _with_sglang(config, num_gpus, gpu, reason, host_memory_bytes)


def _num_engine_gpus(config: Config) -> int:
    """Return the default number of GPUs of engines that share none with the trainer: all in --sglang-config, else those of one engine."""
    given = [group.num_gpus for servers in config.engine.sglang_config or () for group in servers.server_groups]
    return sum(given) or config.resolved_rollout_num_gpus_per_engine


def _would_idle(config: Config) -> bool:
    """Return whether no flag places trainer and engine, and they would take turns, each on its own GPU."""
    flags = config.cluster
    given = (flags.colocate, flags.actor_num_gpus_per_node, flags.rollout_num_gpus, flags.rollout_num_gpus_per_engine)
    placed = any(value is not None for value in given) or config.num_train_gpus != 1
    return config.trains and not config.is_sft and config.rollout.async_mode == "sync" and not placed


def _can_run(config: Config, gpu: str, host_memory_bytes: int | None) -> bool:
    """Return whether the plan for GPUs of the model `gpu` has no errors.

    `host_memory_bytes` matters because a trainer that makes room for engines moves to host memory.
    """
    try:
        plan = make_plan(config, gpu, "train", host_memory_bytes=host_memory_bytes)
        return not any(finding.severity is Severity.ERROR for finding in plan.findings)
    except ConfigError:
        return False  # for example, the planner does not know the model


def _breaks_rules(config: Config, changed: Config) -> bool:
    known = {finding.id for finding in findings(config)}
    return any(finding.severity is Severity.ERROR and finding.id not in known for finding in findings(changed))


def lines(choices: tuple[Choice, ...], config: Config) -> Iterator[str]:
    """Yield a console line for each choice: the flags and the reason."""
    for choice in choices:
        yield f"{as_typed(change_text(change, config) for change in choice.changes)}: {choice.reason}"


def trainer_choice(config: Config) -> Iterator[str]:
    """Yield a console line with the flags that selected the Megatron trainer, unless --train-backend did."""
    given = config.given_options(MEGATRON_FLAGS, ["megatron"])
    if config.cluster.train_backend != "auto" or not given:
        return
    torch = " (for the torch trainer use --precision bf16)" if "--bf16" in given else ""
    shown = ", ".join(given[:5]) + (f" and {len(given) - 5} more" if len(given) > 5 else "")
    yield f"--train-backend megatron: {shown} {'is a flag' if len(given) == 1 else 'are flags'} of the Megatron trainer{torch}"
