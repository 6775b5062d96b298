"""`fuligo plan`: rules, layout, memory and time of a job, computed on any machine without starting anything."""

import argparse
import json
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from datetime import datetime
from pathlib import Path

from fuligo.cli.chosen import find_devices, model_of_two, trainer_choice, with_assumed_engine, with_installed_engine
from fuligo.cli.megatron_arguments import unread_arguments
from fuligo.config import Config
from fuligo.config.command_line import parse, read_command_line
from fuligo.config.findings import Finding, Severity
from fuligo.config.help import asked_for_help, help_text
from fuligo.config.topology import engine_groups
from fuligo.config.validate import with_places
from fuligo.errors import ConfigError
from fuligo.limits import memory_bytes
from fuligo.models.from_flags import architecture_from_flags
from fuligo.models.hub import located
from fuligo.planner import speeds
from fuligo.planner.choices import apply_choices
from fuligo.planner.gpus import GPUS, known_gpu
from fuligo.planner.make_plan import make_plan
from fuligo.planner.plan import Plan
from fuligo.planner.sampled_groups import has_filter
from fuligo.planner.subject import Assumed
from fuligo.quantities import amount

DEFAULT_GPU = "h100-80"
STANDARD_OUTPUT = "-"
_GIB = 1024**3
_PLAIN_WIDTH = 100
"""Width of the report without a terminal."""
_USAGE = f"""\
fuligo plan [--gpu NAME] [--host-memory GIB] [--kept-share SHARE] [--accept-length TOKENS] [--json [FILE]] [--html FILE]
            [--config FILE] [--flag VALUE ...]

Reports what the job would do on a cluster: violated rules with fixes, placement of every process, memory, time of a step.
Takes the arguments of fuligo train, starts nothing, needs no GPU. Exit code: 2 if there are errors, else 0.

  --gpu NAME           GPU to plan for (default: this machine's, else {DEFAULT_GPU}): {", ".join(GPUS)}
  --host-memory GIB    memory of one node (default: that of the vendor's servers with this GPU)
  --kept-share SHARE   share of the groups that the dynamic sampling filter keeps (default: {speeds.KEPT_SHARE:g}, assumed)
  --accept-length TOKENS
                       tokens per verification with speculative decoding, from 1 (default: assumed from the drafts' depth)
  --json [FILE]        write everything as JSON to FILE, or print it instead of the report
  --html FILE          write everything as one HTML page

More: docs/plan.md; the flags of the job: fuligo train --help
"""


def main(arguments: Sequence[str]) -> int:
    """Print the plan; return 0 if the job could start, 2 if its config has errors."""
    if (topic := asked_for_help(arguments)) is not None:
        print(help_text(topic) if topic else _USAGE, end="")
        return 0
    options, job = split_options(arguments)
    assumed = Assumed(options.kept_share, options.accept_length)
    host_memory_bytes = None if options.host_memory is None else int(options.host_memory * _GIB)
    parsed = parse(job)
    config, gpu, notes = parsed.config if _is_described(parsed.config) else located(parsed.config), options.gpu, list(parsed.warnings)
    devices = find_devices(config) if gpu is None else ()
    found = known_gpu(devices[0].name, devices[0].memory_bytes) if devices else None
    if gpu is None and found is None:
        device = devices[0].name if devices else None
        reason = "this machine has no GPU" if device is None else f"this machine's GPU ({device}) is unknown to the planner"
        notes.append(f"{reason}: planned for {DEFAULT_GPU}; name yours with --gpu, such as h200-141")
    gpu = gpu or (DEFAULT_GPU if found is None else found.name)
    if found is None:
        config, engine = with_assumed_engine(config, gpu, host_memory_bytes)
    else:
        config, engine = with_installed_engine(config, len(devices), model_of_two(devices), host_memory_bytes or memory_bytes())
    notes += engine
    if found is not None and config.total_num_gpus > len(devices):
        notes.append(f"the run needs {config.total_num_gpus} GPUs like this machine's, which has {len(devices)}")
    notes += _without_effect(config, assumed)
    plan = make_plan(config, gpu, plan_name(config, job), host_memory_bytes=host_memory_bytes, assumed=assumed)
    plan = replace(plan, findings=(*_refused_at_start(plan, config), *plan.findings, *_disk_warnings(plan, config)))
    plan = replace(plan, findings=with_places(plan.findings, parsed.places))
    is_broken = any(finding.severity is Severity.ERROR for finding in plan.findings)
    if is_broken:
        notes += trainer_choice(config)  # which may be the cause
    _write(plan, apply_choices(config, plan.choices), notes, options)
    return 2 if is_broken else 0


def _is_described(config: Config) -> bool:
    """Return whether the plan needs no checkpoint, because other flags describe the model."""
    try:
        return config.model.model_config_file is not None or architecture_from_flags(config) is not None
    except ConfigError:
        return False  # incomplete MODEL_ARGS do not matter beside a config.json; without one, the plan reports them


def _without_effect(config: Config, assumed: Assumed) -> Iterator[str]:
    """Yield a note for each figure that the estimates of this job do not use."""
    if assumed.kept_share != Assumed().kept_share and not has_filter(config):
        yield "--kept-share has no effect without --dynamic-sampling-filter-path"
    if assumed.accept_length is not None and not any(spec.arguments.get("speculative_algorithm") for spec in engine_groups(config)):
        yield "--accept-length has no effect without --sglang-speculative-algorithm"


def _refused_at_start(plan: Plan, config: Config) -> Iterator[Finding]:
    """Yield an error for what `fuligo train` refuses beyond the rules: Megatron arguments without effect, faulty prompt files.

    The arguments are left out if Megatron cannot train the model, which the plan already reports.
    """
    is_torch_only = any(finding.id == "PLAN-TORCH-ONLY" for finding in plan.findings)
    for problem in () if is_torch_only else unread_arguments(config):
        yield Finding("PLAN-MEGATRON-ARGUMENTS", Severity.ERROR, problem, ())
    if any(Path(path.partition("@")[0]).is_file() for path in config.data.prompt_data):
        from fuligo.cli.data_problems import data_problems

        for problem in data_problems(config, missing_is_fine=True):
            yield Finding("PLAN-DATA", Severity.ERROR, problem, ())


def _disk_warnings(plan: Plan, config: Config) -> Iterator[Finding]:
    """Yield a warning if checkpoints do not fit on the disk; skipped if the model is not here, since the run then starts elsewhere."""
    model = config.model.hf_checkpoint
    if plan.disk is None or model is None or not Path(model).is_dir():
        return
    place = Path(config.checkpoint.save or config.run_directory(datetime.now())).absolute()
    there = next(parent for parent in (place, *place.parents) if parent.is_dir())
    free, needed = shutil.disk_usage(there).free, plan.disk.used_bytes
    if needed > free:
        text = f"checkpoints need {amount(needed)}, but {there} has only {amount(free)} free"
        advice = "Free some space, or use another --save, a larger --save-interval or a smaller --keep-checkpoints."
        yield Finding("PLAN-DISK", Severity.WARNING, text, ("--save", "--keep-checkpoints"), advice=advice)


def parser() -> argparse.ArgumentParser:
    """Build the parser of the command's own options, which may stand anywhere among the arguments of the job."""
    made = argparse.ArgumentParser("fuligo plan", add_help=False, allow_abbrev=False, exit_on_error=False)
    made.add_argument("--gpu")
    made.add_argument("--host-memory", type=_number("a number of GiB above 0, such as 2048", lambda gib: 0 < gib < float("inf")))
    made.add_argument(
        "--kept-share",
        type=_number("a share above 0 and at most 1, such as 0.6", lambda share: 0 < share <= 1),
        default=speeds.KEPT_SHARE,
    )
    made.add_argument("--accept-length", type=_number("a number of tokens from 1, such as 2.4", lambda length: 1 <= length < float("inf")))
    made.add_argument("--json", nargs="?", const=STANDARD_OUTPUT)
    made.add_argument("--html")
    return made


def split_options(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """Separate the options of `fuligo plan` from the arguments of the job; a repeated option keeps its last value.

    Raises ConfigError if an option lacks its value, or the value is not a number within its bounds.
    """
    try:
        return parser().parse_known_args(arguments)
    except argparse.ArgumentError as error:
        raise ConfigError(f"{error.argument_name} {error.message}; fuligo plan --help describes the options") from None


def _number(rule: str, fits: Callable[[float], bool]) -> Callable[[str], float]:
    """Return a function that reads a number that must follow a rule."""

    def read(text: str) -> float:
        try:
            number = float(text)
        except ValueError:
            number = float("nan")  # NaN fails every comparison with a bound
        if not fits(number):
            raise argparse.ArgumentTypeError(f"{text}: must be {rule}")
        return number

    return read


def plan_name(config: Config, job: Sequence[str]) -> str:
    """Return `--name`, else the config file's name (`glm4-9b` for `glm4-9b.yaml` and for `glm4-9b/config.yaml`), else `plan`."""
    if config.observability.name:
        return config.observability.name
    file = read_command_line(job).config_file
    if file is None:
        return "plan"
    path = Path(file)
    return path.absolute().parent.name if path.stem == "config" else path.stem


def _write(plan: Plan, config: Config, notes: Sequence[str], options: argparse.Namespace) -> None:
    files = [file for file in (options.json, options.html) if file is not None]
    if files:
        from fuligo.planner.plan import plan_document

        document = plan_document(plan, config, notes)
        if options.json is not None:
            _write_text("--json", options.json, json.dumps(document, indent=1) + "\n")
        if options.html is not None:
            from fuligo.planner.html import plan_page

            _write_text("--html", options.html, plan_page(document))
    if STANDARD_OUTPUT not in files:
        from rich.console import Console

        from fuligo.planner.report import print_report

        console = Console(highlight=False, width=None if sys.stdout.isatty() else _PLAIN_WIDTH)
        print_report(plan, config, console, notes)
        for file in files:
            console.print(f"wrote {file}", markup=False, soft_wrap=True)


def _write_text(option: str, file: str, text: str) -> None:
    if file == STANDARD_OUTPUT:
        sys.stdout.write(text)
        return
    try:
        Path(file).write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {option} {file}: {error.strerror}; choose another file") from None
