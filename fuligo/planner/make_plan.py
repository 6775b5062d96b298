"""Creation of a plan from a config: unset values first, then rules, then the numbers if the sizes allow a layout."""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from fuligo.config import Config
from fuligo.config.findings import Finding, Severity, errors_first
from fuligo.config.hook_syntax import hook_findings
from fuligo.config.validate import described
from fuligo.config.validate import findings as config_findings
from fuligo.errors import ConfigError
from fuligo.planner.check import check
from fuligo.planner.choices import choose
from fuligo.planner.estimate import HOST, estimate, memory_findings
from fuligo.planner.memory.activations import BF16, FP32
from fuligo.planner.plan import Disk, Plan
from fuligo.planner.roofline import assumptions
from fuligo.planner.subject import Assumed, Subject, read_subject
from fuligo.planner.suggestions import remedies

LAYOUT = "PLAN-LAYOUT"
NO_REMEDY = "Use more GPUs (--actor-num-nodes) or larger ones; no single change or pair of changes is enough."


def make_plan(
    config: Config,
    gpu_name: str,
    name: str,
    *,
    host_memory_bytes: int | None = None,
    sharing: Sequence[Config] = (),
    assumed: Assumed | None = None,
) -> Plan:
    """Plan a run on GPUs of the model `gpu_name`, a key of `gpus.GPUS`.

    Raises ConfigError if the GPU or the model's shape is unknown, with all other errors of the config.

    Args:
        host_memory_bytes: memory of each node; None: that of the vendor's own servers with this GPU.
        sharing: other runs that use the same engines, as in `Subject`.
        assumed: figures of another run; None: the planner's own assumptions.
    """
    try:
        read = read_subject(config, gpu_name, sharing=sharing, assumed=assumed)
    except ConfigError as error:
        errors = [each for each in config_findings(config) if each.severity is Severity.ERROR and each.id != "CFG-MODEL-MISSING"]
        raise ConfigError(*error.problems, *(described(each, config) for each in errors)) from None
    subject, choices = choose(read)
    model, rules = subject.architecture, check(subject)
    findings = (*rules, *hook_findings(config))
    plan = Plan(
        name=name,
        model_type=model.model_type,
        num_parameters=model.num_parameters,
        num_active_parameters=model.num_active_parameters,
        num_mtp_parameters=model.num_mtp_parameters,
        num_adapter_parameters=0 if subject.adapter is None else subject.adapter.num_parameters,
        gpu=subject.gpu.name,
        choices=choices,
        findings=errors_first(findings),
    )
    try:
        numbers = estimate(subject, host_memory_bytes)
    except ConfigError as error:
        if any(finding.severity is Severity.ERROR for finding in rules):
            return plan
        problems = (Finding(LAYOUT, Severity.ERROR, problem, ()) for problem in error.problems)
        return replace(plan, findings=errors_first((*problems, *findings)))
    found = () if numbers.fits else remedies(subject, host_memory_bytes)
    fix: dict[str, Any] = {"fix": found[0].changes} if found else {"advice": NO_REMEDY}
    memory = memory_findings(subject, numbers, host_memory_given=host_memory_bytes is not None)
    return replace(
        plan,
        findings=errors_first((*plan.findings, *(each if each.id == HOST else replace(each, **fix) for each in memory))),
        layout=numbers.layout,
        memory=numbers.memory,
        capacities=numbers.capacities,
        phases=numbers.phases,
        step_s=numbers.step_s,
        disk=disk_of_checkpoints(subject),
        suggestions=tuple(remedy.suggestion for remedy in found),
        assumptions=assumptions(subject, numbers.layout),
    )


def disk_of_checkpoints(subject: Subject) -> Disk | None:
    """Return the space of checkpoints and exports; None if the run saves none."""
    config, model = subject.config, subject.architecture
    if not config.saves:
        return None
    saved = config.trainer_capabilities.saved_bytes
    if subject.adapter is not None:
        checkpoint_bytes, export_bytes = (size * subject.adapter.num_parameters for size in (saved.adapter, FP32))
    else:
        num_parameters = model.num_parameters + subject.num_loaded_mtp_parameters
        carried = BF16 * subject.num_carried_mtp_parameters
        trained = (saved.weights + 2 * FP32) * (2 if config.trains_values else 1)
        reference = saved.reference if config.train.ref_update_interval is not None else 0
        checkpoint_bytes, export_bytes = num_parameters * (trained + reference) + carried, num_parameters * BF16 + carried
    saves, keep, exports = _num_saves(config), config.checkpoint.keep_checkpoints, config.checkpoint.save_hf
    return Disk(
        checkpoint_bytes=checkpoint_bytes,
        num_checkpoints=saves if keep is None else keep + 1 if saves is None else min(saves, keep + 1),
        export_bytes=export_bytes if exports is not None else 0,
        num_exports=0 if exports is None else saves if "{rollout_id}" in exports else 1,
    )


def _num_saves(config: Config) -> int | None:
    """Return the number of saves of a run that saves; None if it depends on the number of prompts."""
    flags, num_rollouts = config.checkpoint, config.data.num_rollout
    if flags.save_interval is None:
        return 1
    if num_rollouts is None:
        return None
    return math.ceil(num_rollouts / flags.save_interval) if flags.save_last else num_rollouts // flags.save_interval
