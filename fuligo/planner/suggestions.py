"""Suggestions of flag changes that make a run fit, tested on the whole plan and sorted by the cost of a step."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from itertools import combinations

from fuligo.config.changes import apply_changes, change_text
from fuligo.config.findings import Change, Severity
from fuligo.config.rules.rule import set_flag
from fuligo.errors import ConfigError
from fuligo.layout.megatron import layout_of
from fuligo.planner.check import violations
from fuligo.planner.choices import ADAM_ON_CPU, RECOMPUTE_ALL
from fuligo.planner.estimate import Estimate, estimate, shortfall
from fuligo.planner.lengths import longest_sample
from fuligo.planner.plan import Suggestion
from fuligo.planner.rules.servers import running, set_argument
from fuligo.planner.subject import Subject
from fuligo.quantities import gibibytes, seconds

NUM_SHOWN = 3
SMALL_CHUNK_TOKENS = 1024
"""Tokens of the logit chunk to suggest, which is still a large matrix product."""
NUM_COMBINED = 7
"""Number of kinds of changes that are tried in pairs."""
Changes = tuple[Change, ...]


@dataclass(frozen=True, slots=True)
class Remedy:
    """Changes that make the run fit."""

    changes: Changes
    suggestion: Suggestion
    gpu_seconds: float
    """Cost of one step: seconds x GPUs."""


def remedies(subject: Subject, host_memory_bytes: int | None = None) -> tuple[Remedy, ...]:
    """Return changes that make the run fit (also on the host, if its memory is given): single ones, or pairs if no single one is enough."""
    now = estimate(subject, host_memory_bytes)
    if now.fits:
        return ()
    candidates: list[Changes] = []
    if any(bar.pipeline_rank is not None and not bar.fits for bar in now.memory):
        more_nodes = (set_flag("actor_num_nodes", 2 * subject.config.cluster.actor_num_nodes),)
        candidates += [*_trainer_candidates(subject), more_nodes]
    candidates += [] if now.engines_fit else _engine_candidates(subject)
    trials = [trial for changes in candidates if (trial := _try_changes(subject, changes, host_memory_bytes))]
    if not any(trial.shortfall == 0 for trial in trials):
        best: dict[tuple[str | int, ...], _Trial] = {}  # of each kind of change
        for trial in sorted(trials, key=lambda trial: trial.shortfall):
            best.setdefault(trial.changes[0].path, trial)
        pairs = (one.changes + other.changes for one, other in combinations(list(best.values())[:NUM_COMBINED], 2))
        trials = [trial for changes in pairs if (trial := _try_changes(subject, changes, host_memory_bytes))]
    known = violated_rules(subject)
    fitting = [trial for trial in trials if trial.shortfall == 0 and not violated_rules(trial.subject) - known]
    found = [_remedy(subject, trial, now, host_memory_bytes) for trial in fitting]
    return tuple(sorted(found, key=lambda remedy: remedy.gpu_seconds)[:NUM_SHOWN])


@dataclass(frozen=True, slots=True)
class _Trial:
    """Run with some changes."""

    changes: Changes
    subject: Subject
    shortfall: float
    """Bytes by which the run exceeds its memory, as in `estimate.shortfall`."""


def _try_changes(subject: Subject, changes: Changes, host_memory_bytes: int | None) -> _Trial | None:
    """Try the changes; None if they give no valid config or layout."""
    try:
        changed = replace(subject, config=apply_changes(subject.config, changes))
        return _Trial(changes, changed, shortfall(changed, host_memory_bytes))
    except ConfigError:
        return None


def violated_rules(subject: Subject) -> frozenset[str]:
    """Return the ids of the rules with errors; a suggestion must add none."""
    return frozenset(finding.id for finding in violations(subject) if finding.severity is Severity.ERROR)


def _remedy(subject: Subject, trial: _Trial, now: Estimate, host_memory_bytes: int | None) -> Remedy:
    then = estimate(trial.subject, host_memory_bytes)
    slower = f"{then.step_s / now.step_s - 1 if now.step_s else 0.0:+.0%}"
    longer = f"{seconds(then.step_s)} instead of {seconds(now.step_s)} ({slower})"
    cost = f"a step takes {'as long as before' if slower in ('+0%', '-0%') else longer}"
    host = [bar for bar in then.memory if bar.owner == "host"]
    if host and not any(bar.owner == "host" and bar.used_bytes >= host[0].used_bytes for bar in now.memory):
        cost += f", and {gibibytes(host[0].used_bytes)} of a node's memory"
    if then.layout.num_nodes > now.layout.num_nodes:
        cost += f", on {then.layout.num_nodes} nodes instead of {now.layout.num_nodes}"
    options = tuple(change_text(change, subject.config) for change in trial.changes)
    suggestion = Suggestion(options, _fullest(now) - _fullest(then), cost)
    return Remedy(trial.changes, suggestion, then.step_s * trial.subject.config.total_num_gpus)


def _fullest(plan: Estimate) -> int:
    return max(bar.used_bytes for bar in plan.memory if bar.owner != "host")


def _trainer_candidates(subject: Subject) -> Iterator[Changes]:
    """Yield changes that may help the trainer; some may not be enough, or not possible for this run."""
    config, shape = subject.config, layout_of(subject.config)
    if config.train.log_probs_chunk_size > SMALL_CHUNK_TOKENS:
        yield (set_flag("log_probs_chunk_size", SMALL_CHUNK_TOKENS),)
    tokens = config.train.max_tokens_per_gpu
    if config.train.use_dynamic_batch_size and tokens is not None:
        longest = -(-longest_sample(config) // shape.cp)
        for fewer in (tokens // 2, tokens // 4, longest):
            if longest <= fewer < tokens:
                yield (set_flag("max_tokens_per_gpu", fewer),)
    if not subject.is_megatron:
        yield (set_flag("gradient_checkpointing", True),)
        yield (set_flag("actor_num_gpus_per_node", 2 * config.resolved_actor_num_gpus_per_node),)
        return
    if config.parallel.recompute_granularity != "full":
        yield RECOMPUTE_ALL
    if not config.optimizer.use_precision_aware_optimizer:
        yield (Change(("optimizer", "use_precision_aware_optimizer"), True),)
    if not config.optimizer.optimizer_cpu_offload:
        yield ADAM_ON_CPU
    split_sequence = () if config.parallel.sequence_parallel else (set_flag("sequence_parallel", True),)
    yield (set_flag("tensor_model_parallel_size", 2 * shape.tp), *split_sequence)
    yield (set_flag("pipeline_model_parallel_size", 2 * shape.pp),)
    yield (set_flag("context_parallel_size", 2 * shape.cp),)
    if subject.architecture.experts is not None:
        yield (set_flag("expert_model_parallel_size", 2 * shape.ep),)


def _engine_candidates(subject: Subject) -> Iterator[Changes]:
    config = subject.config
    if config.engine_capabilities.beside_trainer:
        yield (set_flag("embedded_max_total_tokens", 8 * longest_sample(config)),)
        return
    if config.trainer_stays:
        yield (set_flag("offload_train", True),)
    for percent in range(90, 25, -5):
        yield tuple(dict.fromkeys(set_argument(subject, spec, "mem_fraction_static", percent / 100) for spec in running(subject)))
    if config.sglang.get("kv_cache_dtype") is None:
        yield (Change(("sglang", "kv_cache_dtype"), "fp8_e4m3"),)
    if config.sglang.get("speculative_algorithm") is not None:
        yield tuple(Change(("sglang", name), None) for name in config.sglang if name.startswith("speculative_"))
    if config.engine.sglang_config is None:
        yield (set_flag("rollout_num_gpus_per_engine", 2 * config.resolved_rollout_num_gpus_per_engine),)
