"""Flags that leave engines at less than half of their speed, by the plan's own estimate of a rollout."""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import inf

from fuligo.config.changes import apply_changes
from fuligo.config.findings import Change, Severity
from fuligo.config.rules.rule import set_flag, unset_flag
from fuligo.config.topology import EngineGroupSpec
from fuligo.errors import ConfigError
from fuligo.planner.choices import choose, requests_wanted
from fuligo.planner.layout import make_layout
from fuligo.planner.rollout_time import rollout_phase
from fuligo.planner.rules.rule import Fix, Violation, rule
from fuligo.planner.rules.servers import option, serving_policy, set_argument, shown, where
from fuligo.planner.server_settings import has_graphs, server_settings
from fuligo.planner.subject import Subject
from fuligo.quantities import seconds

WASTED = 0.5
"""A flag is reported if a rollout without it takes at most this share of the time."""
_SWITCHES = ("disable_cuda_graph", "disable_decode_cuda_graph", "cuda_graph_backend_decode", "cuda_graph_config")
_GRAPHS = ("cuda_graph_max_bs_decode", "cuda_graph_bs_decode")


@rule("PLAN-NO-GRAPHS", *map(option, _SWITCHES), severity=Severity.WARNING)
def decoding_has_graphs(subject: Subject) -> Iterator[Violation[Fix]]:
    """Warn about decoding without CUDA graphs: the CPU then launches each kernel of a step, which is much slower."""
    for spec in _sampling(subject):
        given = [name for name in _SWITCHES if spec.arguments.get(name)]
        if not given or has_graphs(spec.arguments, "decode"):
            continue
        flags = " and ".join(option(name) if name == "cuda_graph_config" else shown(spec, name) for name in given)
        fix = _fix(subject, (*given, *_GRAPHS))
        if times := _times(subject, fix):
            yield Violation(f"{flags}{where(spec)}: decoding without CUDA graphs is slow; {times} with them", (fix,))


@rule("PLAN-FEW-REQUESTS", "--rollout-concurrency", "--sglang-max-running-requests", severity=Severity.WARNING)
def engines_run_enough_requests(subject: Subject) -> Iterator[Violation[Fix]]:
    """Warn about engines that run only a few of the requests that their memory holds, and so take longer for a rollout."""
    groups, in_flight = _sampling(subject), subject.config.resolved_rollout_concurrency
    if not groups or any(spec.arguments.get("speculative_algorithm") for spec in groups):
        return  # engines with drafts have a rule of their own
    num_engines = sum(spec.num_engines for spec in groups)
    fewest = min(groups, key=lambda spec: spec.arguments.get("max_running_requests") or inf)
    slots, share = fewest.arguments.get("max_running_requests") or inf, in_flight / num_engines
    runs, wanted = min(slots, share), -(-requests_wanted(subject) // num_engines)
    if runs >= wanted or runs > server_settings(fewest, subject.rollout_architecture, subject.gpu).graph_batch * fewest.dp_size:
        return
    fix = _fix(subject, ("max_running_requests", *_GRAPHS), unset_flag("rollout_concurrency"))
    if times := _times(subject, fix):
        limit = f"--rollout-concurrency {in_flight}" if share < slots else f"{shown(fewest, 'max_running_requests')}{where(fewest)}"
        text = f"{limit}: an engine runs at most {runs:.0f} of its {wanted} requests of a rollout at a time; {times} with more"
        yield Violation(text, (fix,))


def _sampling(subject: Subject) -> list[EngineGroupSpec]:
    """Return the groups that generate the policy's tokens on GPUs."""
    is_on_gpus = subject.config.cluster.device != "cpu"
    return [spec for spec in serving_policy(subject) if is_on_gpus and spec.worker_type != "prefill"]


def _fix(subject: Subject, arguments: Sequence[str], *unset: Change) -> Fix:
    """Return the changes to what the planner chooses without `arguments` and with the changes `unset`; empty if it cannot choose."""
    groups = _sampling(subject)
    unset = (*unset, *(set_argument(subject, spec, name, None) for spec in groups for name in arguments))
    try:
        chosen, _ = choose(replace(subject, config=apply_changes(subject.config, unset)))
    except ConfigError:
        return ()
    changes = [
        set_argument(subject, spec, name, after.arguments.get(name))
        for spec, after in zip(groups, _sampling(chosen), strict=True)
        for name in arguments
        if after.arguments.get(name) != spec.arguments.get(name)
    ]
    in_flight = chosen.config.rollout.rollout_concurrency
    if in_flight != subject.config.rollout.rollout_concurrency:
        changes.append(set_flag("rollout_concurrency", in_flight))
    return tuple(dict.fromkeys(changes))


def _times(subject: Subject, fix: Fix) -> str | None:
    """Return the time of a rollout as it is and with the fix; None unless the fix at least halves it."""
    try:
        changed = replace(subject, config=apply_changes(subject.config, fix))
        now, then = (rollout_phase(each, make_layout(each)).duration_s for each in (subject, changed))
    except ConfigError:
        return None  # the rules report the invalid sizes
    return f"a rollout takes about {seconds(now)}, {seconds(then)}" if 0 < then <= WASTED * now else None
