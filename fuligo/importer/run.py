"""Run of a launch script in the sandbox, which finds the training job that the script starts."""

import json
import os
import re
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fuligo.errors import ConfigError
from fuligo.importer import sandbox
from fuligo.importer.calls import Call, Findings, Launch, read_calls
from fuligo.importer.stand_ins import RECORDED, find_commands
from fuligo.sandbox import processes

CALLERS_VARIABLES = frozenset({
    "BASE_DIR", "MASTER_ADDR", "MASTER_PORT", "HOSTFILE", "SOCKET_IFNAME", "NODE_RANK", "WORLD_SIZE", "WORKER_IP", "NNODES", "NUM_NODES",
    "NUM_GPUS", "BASE_FOLDER", "MODEL_DIR", "DATA_DIR", "MLP_WORKER_0_HOST", "MLP_SOCKET_IFNAME", "HOME", "USER",
})  # fmt: skip
"""Variables of the caller that the script sees. It sees others (keys, tokens) only if `--env` names them, because the result is printed."""

_STATE = "/run/import-script"
_SYSTEM_FOLDERS = (
    "/usr/bin", "/usr/sbin", "/usr/local/bin", "/bin", "/sbin", "/lib", "/lib64", "/usr/lib", "/proc", "/dev", "/etc", _STATE,
)  # fmt: skip
_MAX_SCRIPT_BYTES = 1_000_000
_GRACE_SECONDS = 120
_MAX_RUNS = 8
"""Number of unset variables, and of absolute paths of interpreters, after which the script is not run again to find more."""

_UNSET = re.compile(r"^(.+): line (\d+): (?:\w+: )?\$?(\w+): unbound variable$", re.MULTILINE)
_SYNTAX = re.compile(r"^(.+): line (\d+): ((?:syntax error|unexpected EOF|unexpected end).*)$", re.MULTILINE)
_INTERPRETER = re.compile(r"(?<![\w.$}~-])/[\w./+-]*/(?:python[\d.]*|torchrun|ray)(?![\w./-])")
_NOT_EXECUTED = re.compile(r"^(.+): line (\d+): (.+): Permission denied$", re.MULTILINE)
_MISSING = re.compile(r"^.+: line \d+: (.+): No such file or directory$", re.MULTILINE)
_ADVICE = (
    "Read the script, then use --trust to run it without one: python3, ray, ssh, pkill, kill, rm, mkdir and every unknown command are"
    " stand-ins that only record their arguments, but redirections and programs given by an absolute path take effect on this machine"
)
_SPACED_ASSIGNMENT = re.compile(r"^\s*(\w+)\s*(\+?=)\s*(.*)$")


class UnavailableError(ConfigError):
    """Raised if the sandbox cannot be built on this machine."""

    def __init__(self, script: Path, reason: str) -> None:
        super().__init__(f"cannot run {script.name} in a sandbox: {reason}. {_ADVICE}")
        self.reason = reason


@dataclass(frozen=True, slots=True)
class ImportedScript:
    """Training job that a launch script starts, and notes for the user."""

    launch: Launch
    notes: tuple[str, ...]
    """Notes on what was not run and what was assumed, each with its line."""
    path: Path

    def place_of(self, option: str) -> str:
        """Return the last place of an option in the script, such as `run.sh line 34`; without one, the line that starts the job."""
        word = re.compile(rf"(?<![\w-]){re.escape(option)}(?![\w-])")
        lines = self.path.read_text(encoding="utf-8", errors="replace").splitlines()
        found = [
            number for number, line in enumerate(lines, 1) if word.search(line.partition(" #")[0]) and not line.lstrip().startswith("#")
        ]
        return f"{self.path.name} line {found[-1]}" if found else self.launch.place

    def file_text(self, path: str) -> str:
        """Return the text that a file named by the job's arguments had when the job started. Raises ConfigError if it did not exist."""
        if path not in self.launch.files:
            raise ConfigError(f"{self.launch.place}: there is no file {path}; check the path, or map its directory with --map")
        return self.launch.files[path]


@dataclass(slots=True)
class _Script:
    """Script, with its arguments, what it may see, and its time limit."""

    path: Path
    arguments: tuple[str, ...]
    environment: dict[str, str]
    folders: list[tuple[str, str]]
    """Pairs (folder or file of this machine, path in the sandbox)."""
    has_nvlink: bool
    seconds: float
    sandboxed: bool = True
    stand_ins: list[str] = field(default_factory=list)
    """Absolute paths of additional stand-ins."""


def import_script(
    script: Path,
    arguments: Sequence[str] = (),
    *,
    environment: Mapping[str, str] | None = None,
    given: Mapping[str, str] | None = None,
    root: Path | None = None,
    maps: Mapping[str, Path] | None = None,
    has_nvlink: bool = True,
    trusted: bool = False,
    seconds: float = 20.0,
) -> ImportedScript:
    """Run a launch script under bash in a sandbox where stand-ins record its commands.

    Raises ConfigError if the script cannot be run, fails, or does not start exactly one training job.

    Args:
        arguments: the script's `$1`, `$2`, ...
        environment: variables of the caller; the script sees only `CALLERS_VARIABLES` of them.
        given: further variables that the script sees; they override those of `environment`.
        root: folder that the script sees in addition to its own.
        maps: folders that the script sees elsewhere, by path in the sandbox.
        has_nvlink: whether the `nvidia-smi` stand-in reports NVLink.
        trusted: if no sandbox can be built, run the script with stand-ins and limits only.
        seconds: time limit of each run of the script.
    """
    if not script.is_file():
        raise ConfigError(f"cannot import {script}: there is no such file; check the path")
    if script.stat().st_size > _MAX_SCRIPT_BYTES:
        raise ConfigError(f"cannot import {script}: it has more than {_MAX_SCRIPT_BYTES:,} bytes; use the launch script itself")
    allowed = {name: value for name, value in (environment or {}).items() if name in CALLERS_VARIABLES} | dict(given or {})
    folders = _folders(script, root, maps or {}, allowed.get("HOSTFILE"))
    text = script.read_bytes().decode("utf-8", errors="replace")
    if "\r\n" in text:
        problem = "it has Windows line endings, so bash reads `\\r` as part of the last word of each line"
        raise ConfigError(f"cannot import {script.name}: {problem}; convert it with sed -i 's/\\r$//' {script.name}")
    named = list(dict.fromkeys(_INTERPRETER.findall(text)))
    task = _Script(script, tuple(arguments), allowed, folders, has_nvlink, seconds, stand_ins=named)
    report = _run_all(task, trusted=trusted, has_maps=bool(maps))
    unset = _unset_variables(report, task)
    _check(report)
    records = report["records"]
    read = [Call.read(name, records[name], records.get(f"{name}.files", "")) for name in records if not name.endswith(".files")]
    findings = read_calls([call for call in read if call is not None], _environment(task, ""))
    launch = _only_launch(findings, report, task, unset)
    notes = [*findings.notes, *unset, *_missing_files(report, task)]
    if report["stopped"]:
        notes.append(f"{_end(report, task)}, after it started the job")
    return ImportedScript(launch, tuple(notes), script)


def _only_launch(findings: Findings, report: Mapping[str, Any], task: _Script, unset: Sequence[str]) -> Launch:
    """Return the training job that the script starts. `unset`: sentences on the unset variables that the script reads.

    Raises ConfigError if it starts none or several, or an argument has a Windows line ending, from a file that the script reads.
    """
    name = task.path.name
    if not findings.launches or report["stopped"] == "records":
        causes = [*unset, *(note for note in findings.notes if "taken as empty" in note)]
        if findings.runner is not None and not report["stopped"] and report["status"] == 0:
            remedy = "import a script that holds only the commands that it runs"
            causes.append(f"{findings.runner} is not run, and what it starts is not read; {remedy}")
        printed = [line for line in report["output"].splitlines() if line.strip() and not line.startswith("+")]
        said = f"; it printed: {printed[-1][:200]}" if printed else ""
        raise ConfigError(f"{_end(report, task)} before it starts train.py{said}" + (f"; {causes[-1]}" if causes else ""))
    if len(findings.launches) > 1:
        places = ", ".join(launch.place for launch in findings.launches)
        raise ConfigError(f"cannot import {name}: it starts {len(findings.launches)} training jobs ({places}); keep one")
    [launch] = findings.launches
    if word := next((word for word in launch.arguments if "\r" in word), None):
        problem = f"a file that it reads has Windows line endings, so bash read {word!r} as an argument"
        raise ConfigError(f"cannot import {name}: {problem}; convert that file with sed -i 's/\\r$//'")
    return launch


# -- one run ---------------------------------------------------------------------------------------------------------------------------


def _run_all(task: _Script, *, trusted: bool, has_maps: bool) -> dict[str, Any]:
    """Run the script until every interpreter that it names by path has a stand-in, and return the last report.

    Raises ConfigError if the script cannot be run, or no sandbox can be built and the script is not trusted or has --map.
    """
    try:
        report = _run(task)
    except UnavailableError as error:
        if not trusted:
            raise
        if has_maps:
            raise ConfigError(f"--map needs a sandbox, but {error.reason}; change the script's paths to those of this machine") from None
        task.sandboxed = False
        report = _run(task)
    while task.sandboxed and (found := _interpreters(report)) and len(task.stand_ins) < _MAX_RUNS:
        task.stand_ins += found
        report = _run(task)
    return report


def _folders(script: Path, root: Path | None, maps: Mapping[str, Path], host_file: str | None) -> list[tuple[str, str]]:
    """Return the folders and files of this machine that the script sees: (source, path in the sandbox).

    Raises ConfigError if --root or --map does not name a folder, or would hide a system folder.
    """
    shown = [script.parent] if root is None else [root, script.parent]
    folders = [(str(folder.resolve()), os.path.normpath(folder.absolute())) for folder in shown]
    if root is not None and not root.is_dir():
        raise ConfigError(f"--root {root}: must be a folder on this machine")
    for target, source in sorted(maps.items()):
        if not Path(target).is_absolute() or not source.is_dir():
            raise ConfigError(f"--map {target}={source}: must be PATH=DIR, where PATH is absolute and DIR is a folder on this machine")
        folders.append((str(source.resolve()), os.path.normpath(target)))
    if host_file and Path(host_file).is_file():
        folders.append((str(Path(host_file).resolve()), os.path.normpath(Path(host_file).absolute())))
    for _, target in folders:
        if any(Path(system).is_relative_to(target) or Path(target).is_relative_to(system) for system in _SYSTEM_FOLDERS):
            raise ConfigError(f"cannot mount {target} in the sandbox: it is a system folder; choose another one for --root or --map")
    return sorted(dict.fromkeys(folders), key=lambda folder: folder[1])


def _environment(task: _Script, folder: str) -> dict[str, str]:
    return {"HOME": "/root", "USER": "root", "LANG": "C.UTF-8", "TERM": "dumb"} | task.environment | {"PATH": folder}


def _run(task: _Script, *options: str) -> dict[str, Any]:
    """Run the script once and return the report of `sandbox.py`."""
    if task.sandboxed:
        return _start(_job(task, _STATE, "/usr/bin", options), task)
    with tempfile.TemporaryDirectory(prefix="fuligo-import-", ignore_cleanup_errors=True) as state:
        return _start(_job(task, state, f"{state}/bin", options), task)


def _job(task: _Script, state: str, folder: str, options: Sequence[str]) -> dict[str, Any]:
    commands = find_commands(sandboxed=task.sandboxed)
    environment = _environment(task, folder) | {"BASH_ENV": f"{state}/preamble"}
    links = {f"{folder}/{name}": f"{state}/unknown" for name in commands.recorded}
    files = commands.files(state, folder, task.has_nvlink, trusted=not task.sandboxed)
    binds: list[tuple[str, str]] = []
    if task.sandboxed:
        binds += ((path, f"{folder}/{name}") for name, path in commands.tools.items())
        binds += ((os.path.realpath(path), path) for path in commands.libraries)
        links |= dict.fromkeys(task.stand_ins, f"{state}/unknown")
        files["/etc/passwd"] = f"root:x:0:0:root:{environment['HOME']}:/bin/bash\n"
    else:
        links |= {f"{folder}/{name}": path for name, path in commands.tools.items()}
        environment["TMPDIR"] = f"{state}/tmp"
        files[f"{state}/tmp/.keep"] = ""
    return {
        "sandboxed": task.sandboxed,
        "state": state,
        "bash": f"{folder}/bash",
        "argv": ["bash", *options, "--", str(task.path), *task.arguments],
        "environment": environment,
        "directory": str(Path.cwd()),
        "folders": task.folders,
        "binds": binds,
        "files": files,
        "links": links,
        "seconds": task.seconds,
    }


def _start(job: Mapping[str, Any], task: _Script) -> dict[str, Any]:
    """Run `sandbox.py` with a job; return its report. Raises ConfigError without a report; UnavailableError if no sandbox can be built."""
    command, own = processes.command(sandbox.__name__), processes.environment()
    text, deadline = json.dumps(job).encode(), task.seconds + _GRACE_SECONDS
    try:
        result = subprocess.run(command, input=text, capture_output=True, check=False, env=own, timeout=deadline)
    except subprocess.TimeoutExpired:
        raise ConfigError(f"cannot run {task.path}: its sandbox did not respond within {deadline:g} s; run the command again") from None
    try:
        report = json.loads(result.stdout)
    except ValueError:
        raise ConfigError(f"cannot run {task.path}: {result.stderr.decode(errors='replace').strip()[-500:]}") from None
    if (reason := report.get("unavailable")) is not None:
        raise UnavailableError(task.path, reason) if task.sandboxed else ConfigError(f"cannot run {task.path}: {reason}")
    return report


# -- what a run shows ------------------------------------------------------------------------------------------------------------------


def _interpreters(report: Mapping[str, Any]) -> list[str]:
    """Return the absolute paths that the script could not execute and that name a stand-in: `/opt/conda/bin/python`."""
    refused = [program for _, _, program in _NOT_EXECUTED.findall(report["output"])]
    missing = dict.fromkeys([*_MISSING.findall(report["output"]), *refused])
    return [path for path in missing if path.startswith("/") and re.sub(r"[\d.]+$", "", Path(path).name) in RECORDED]


def _unset_variables(report: Mapping[str, Any], task: _Script) -> list[str]:
    """Return a note for each variable that the script uses without having set it, found by runs under `bash -u`."""
    found: list[str] = []
    probe = replace(task, environment=dict(task.environment))
    while len(found) < _MAX_RUNS and not report["stopped"]:
        match = _UNSET.search(report["output"])
        if match is None and report.get("is_probe", not task.sandboxed):
            break
        if match:
            file, line, name = match.groups()
            command, is_callers = f"fuligo import-script {task.path.name}", name in CALLERS_VARIABLES
            setting = (
                f"{name}=VALUE {command}" if is_callers else f"{command} {'ARGUMENT ...' if name.isdecimal() else f'--env {name}=VALUE'}"
            )
            found.append(f"{Path(file).name} line {line}: {name} is not set and expands to nothing; set it with: {setting}")
            if name.isdecimal() or not task.sandboxed:
                break
            probe.environment[name] = ""
        report = _run(probe, "-u") | {"is_probe": True}
    return found


def _check(report: Mapping[str, Any]) -> None:
    """Raise ConfigError if bash ran the script only in part: after a syntax error, or without a file that it sources."""
    if broken := _SYNTAX.search(report["output"]):
        file, line, text = broken.groups()
        raise ConfigError(f"{Path(file).name} line {line}: bash reports: {text}{_spacing_hint(Path(file), int(line))}")
    for missing in _MISSING.finditer(report["output"]):
        if missing[1].endswith(".sh"):
            raise ConfigError(_missing_text(missing))


def _spacing_hint(file: Path, line: int) -> str:
    """Return a fix for a line with spaces around the `=` of an assignment; empty for any other line."""
    try:
        text = file.read_text(encoding="utf-8", errors="replace").splitlines()[line - 1]
    except (OSError, IndexError):
        return ""
    match = _SPACED_ASSIGNMENT.match(text)
    return f"; an assignment has no spaces around `{match[2]}`: write `{match[1]}{match[2]}{match[3]}`" if match else ""


def _missing_files(report: Mapping[str, Any], task: _Script) -> list[str]:
    """Return a note for each file that the script or its tools did not find."""
    notes = [_missing_text(missing) for missing in _MISSING.finditer(report["output"])]
    lines = [line for line in report["output"].splitlines() if "No such file or directory" in line and not _MISSING.match(line)]
    notes += [
        f"{Path(file).name} line {line}: the sandbox does not execute {program}; if it is a bash script, write `bash {program}`"
        for file, line, program in _NOT_EXECUTED.findall(report["output"])
    ]
    return notes + [f"{task.path.name} printed: {line[:200]}; use --map to show a folder of this machine at that path" for line in lines]


def _missing_text(missing: re.Match[str]) -> str:
    path = missing[1]
    if Path(path).exists():
        fix = "--root DIR, a folder that holds it and the script"
    else:
        folder = re.split(r"/(?=scripts/|examples/|models/)", path)[0] if path.startswith("/") else str(Path(path).parent)
        fix = f"--map {folder if folder != path else Path(path).parent}=DIR, where DIR is that folder on this machine"
    place = re.sub(r"^(.*): line (\d+): .*$", lambda match: f"{Path(match[1]).name} line {match[2]}", missing[0])
    return f"{place}: {path} does not exist in the sandbox; use {fix}"


def _end(report: Mapping[str, Any], task: _Script) -> str:
    """Return how the script ended, with the last line that it ran."""
    file, _, line = report["place"].partition("\n")[0].rpartition(":")
    place = f"{Path(file).name} line {line}" if file else task.path.name
    limits = {
        "time": f"does not end within {task.seconds:g} s",
        "memory": f"uses more than {sandbox.MAX_MEMORY_BYTES >> 20} MiB of memory",
        "processes": f"starts more than {sandbox.MAX_PROCESSES} processes at a time",
        "records": "calls too many commands",
    }
    if report["stopped"]:
        return f"{place}: the script {limits[report['stopped']]}"
    if report["status"] == -signal.SIGXFSZ:
        return f"{place}: the script writes more than {sandbox.MAX_FILE_BYTES >> 20} MiB"
    if report["status"] < 0:
        return f"{place}: signal {-report['status']} ends the script (endless recursion?)"
    return f"{place}: the script ends with status {report['status']}"
