"""Recorded commands: the training jobs among them (started directly, by a launcher or by `ray job submit`), and notes on the others."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import PurePosixPath

import yaml

from fuligo.config.yaml_text import load
from fuligo.errors import ConfigError

_TRAINING_MODULES = {"train": False, "train_async": True}
"""slime's training programs, and whether each trains asynchronously, while the engines generate the next rollout."""
_INTERPRETERS = re.compile(r"(python(3(\.\d+)?)?|torchrun)$")
_NO_LAUNCHERS = frozenset({"ssh", "pdsh", "scp", "rsync", "pkill", "killall", "pgrep", "git"})
"""Commands whose arguments may name a program that they do not run on this machine."""
_RUNNERS = frozenset(
    {"srun", "sbatch", "salloc", "docker", "podman", "singularity", "apptainer", "enroot", "kubectl", "mpirun", "mpiexec", "pdsh", "ssh"}
)
"""Commands that run another one in a job, in a container or on another machine. If that is a shell, its commands are not recorded."""
_RAY_SWITCHES = ("--no-wait", "--verbose")
"""Options of `ray job submit` without a value; all others take one."""


@dataclass(frozen=True, slots=True)
class Training:
    """Training job: arguments of its program, and which program it is."""

    arguments: tuple[str, ...]
    is_async: bool = False
    """True if the program is `train_async.py`."""
    is_slime: bool = True
    """True if slime's defaults apply; False for `fuligo train`."""


@dataclass(frozen=True, slots=True)
class Submission:
    """Call of `ray job submit`."""

    environment: dict[str, str]
    """`env_vars` of `--runtime-env-json`."""
    environment_file: str | None
    """Value of `--runtime-env`, a file of YAML or JSON; None if it is not given."""
    entrypoint: tuple[str, ...]


def find_training(words: Sequence[str]) -> Training | None:
    """Return the training job that a command starts; None if it starts none."""
    if PurePosixPath(words[0]).name == "fuligo":
        return Training(tuple(words[2:]), is_slime=False) if words[1:2] == ("train",) else None
    if PurePosixPath(words[0]).name in _NO_LAUNCHERS:
        return None
    start = next((index for index, word in enumerate(words) if _INTERPRETERS.match(PurePosixPath(word).name)), None)
    if start is None:
        return None
    for index, word in enumerate(words[start + 1 :], start + 1):
        rest = tuple(words[index + 1 :])
        if words[index - 1] == "-m" and word == "fuligo":
            return Training(rest[1:], is_slime=False) if rest[:1] == ("train",) else None
        module = word.rpartition(".")[2] if words[index - 1] == "-m" else PurePosixPath(word).name.removesuffix(".py")
        is_program = word.endswith(".py") or words[index - 1] == "-m"
        if is_program and module in _TRAINING_MODULES:
            return Training(rest, is_async=_TRAINING_MODULES[module])
        if word.endswith(".py"):
            return None
    return None


def find_submission(words: Sequence[str]) -> Submission | None:
    """Return the job that a command submits, None for another command. Raises ConfigError if the command is incomplete or malformed."""
    if tuple(words[:3]) != ("ray", "job", "submit"):
        return None
    rest = list(words[3:])
    environment: dict[str, str] = {}
    file = None
    while rest and rest[0].startswith("--") and rest[0] != "--":
        option, equals, value = rest.pop(0).partition("=")
        if option not in _RAY_SWITCHES and not equals:
            if not rest:
                raise ConfigError(f"cannot read `ray job submit`: {option} has no value; add one")
            value = rest.pop(0)
        if option == "--runtime-env-json":
            environment = declared_environment(value)
        elif option == "--runtime-env":
            file = value
    entrypoint = tuple(rest[1:] if rest[:1] == ["--"] else rest)
    if not entrypoint:
        raise ConfigError("cannot read `ray job submit`: there is no command after `--`; add the training command")
    return Submission(environment, file, entrypoint)


def declared_environment(text: str) -> dict[str, str]:
    """Return `env_vars` of Ray's runtime environment, given as JSON or YAML. Raises ConfigError if it is malformed."""
    if not text.strip():
        return {}
    try:
        parsed = json.loads(text) if text.lstrip().startswith("{") else load(text)
    except (ValueError, RecursionError, yaml.YAMLError) as error:
        shown, said = " ".join(text.split())[:200], " ".join(str(error).split())
        raise ConfigError(f"cannot read the runtime environment {shown}: {said}; write valid JSON or YAML") from None
    variables = parsed.get("env_vars", {}) if isinstance(parsed, dict) else None
    if not isinstance(variables, dict):
        raise ConfigError("cannot read the runtime environment: its env_vars must be an object that maps names to strings")
    return {str(name): str(value) for name, value in variables.items()}


_MAX_SHOWN = 100
_SILENT = frozenset({"sleep", "pgrep", "pidof", "lsof", "fuser", "hostname", "kill", "sudo", "clear"})
"""Commands without a note, because they have no effect on the training job."""
_SHELL_VARIABLES = frozenset({"_", "SHLVL", "PWD", "OLDPWD", "BASH_ENV", "PATH", "COLUMNS", "LINES"})
_OWN_PREFIX = "IMPORT_SCRIPT_"


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a stand-in."""

    number: str
    """File name of its record."""
    place: str
    """Line of the script that makes the call, such as `run.sh line 120`."""
    words: tuple[str, ...]
    environment: dict[str, str]
    files: dict[str, str]
    """Texts of the files that its arguments name, by path."""
    is_captured: bool
    """True if standard output is a pipe."""
    is_unknown: bool
    """True if no stand-in has this name; bash's handler of unknown commands recorded it."""

    @classmethod
    def read(cls, number: str, record: str, files: str) -> Call | None:
        """Parse a record; None if its command was killed while it wrote."""
        fields = record.split("\0")
        try:
            place, captured, unknown, count, *rest = fields
            words, environment = rest[: int(count) + 1], rest[int(count) + 1 :]
        except ValueError:
            return None
        texts = files.split("\0")
        script, _, line = place.rpartition(":")
        return cls(
            number=number,
            place=f"{PurePosixPath(script).name} line {line}",
            words=tuple(words),
            environment=dict(entry.split("=", 1) for entry in environment if "=" in entry),
            files=dict(zip(texts[0::2], texts[1::2])),
            is_captured=bool(captured),
            is_unknown=bool(unknown),
        )

    @property
    def name(self) -> str:
        return self.words[0]

    @property
    def submission(self) -> str | None:
        """Number of the `ray job submit` call that runs this command; None if none does."""
        return self.environment.get(_OWN_PREFIX + "SUBMISSION")

    def __str__(self) -> str:
        line = " ".join(" ".join(self.words).split())
        return line if len(line) <= _MAX_SHOWN else line[:_MAX_SHOWN] + " ..."


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch(Training):
    """Training job that the script starts."""

    place: str
    environment: dict[str, str]
    """Variables that the script sets for the job: in its runtime environment, by `export`, or by assignments before the command."""
    files: dict[str, str]
    """Texts of the files that its arguments name, by path."""


@dataclass(slots=True)
class Findings:
    """Launches and notes of one script."""

    launches: list[Launch] = field(default_factory=list)
    notes: dict[str, None] = field(default_factory=dict)
    """Notes in order, each only once, because a loop over hosts repeats them for every host."""
    runner: str | None = None
    """Place and name of the last call of a command that may start the training out of sight; None if there is none."""

    def note(self, call: Call, text: str) -> None:
        self.notes[f"{call.place}: {text}"] = None


def read_calls(calls: Iterable[Call], initial: Mapping[str, str]) -> Findings:
    """Sort the calls of a script into launches and notes.

    `initial`: the environment that the script was started with. Raises ConfigError if a submitted job is malformed, a command looks like an
    assignment or a flag, or the job is started on another machine.
    """
    findings = Findings()
    by_number = {call.number: call for call in calls}
    followed = {call.submission for call in by_number.values()}
    for call in by_number.values():
        try:
            _read(call, by_number, initial, findings, is_followed=call.number in followed)
        except ConfigError as error:
            raise ConfigError(f"{call.place}: {error}") from None
    return findings


def _read(call: Call, calls: Mapping[str, Call], initial: Mapping[str, str], findings: Findings, *, is_followed: bool) -> None:
    if call.is_unknown and len(call.words) > 1 and call.words[1].startswith(("=", "+=")):
        sign, _, value = " ".join(call.words[1:]).partition("=")
        fix = f"an assignment has no spaces around `{sign}=`; write `{call.name}{sign}={value.strip()}`"
        raise ConfigError(f"`{call}` is run as a command: {fix}")
    if call.is_unknown and call.name.startswith("--"):
        raise ConfigError(f"`{call}` is run as a command: the line before it ends without `\\`; add one, or remove these flags")
    submitted = find_submission(call.words)
    training = find_training(submitted.entrypoint if submitted else call.words)
    if (submitted and is_followed) or call.name == "sudo":
        return  # the stand-in runs its command, which is recorded too
    if training is not None:
        parent = call if submitted else calls.get(call.submission or "")
        before = parent.environment if parent else initial
        exported = {} if submitted else {name: value for name, value in call.environment.items() if before.get(name) != value}
        internal = (_OWN_PREFIX, "BASH_FUNC_")
        environment = {name: exported[name] for name in exported if name not in _SHELL_VARIABLES and not name.startswith(internal)}
        declared = find_submission(parent.words) if parent else None
        if parent and declared:
            file = declared_environment(parent.files.get(declared.environment_file, "{}")) if declared.environment_file else {}
            environment = declared.environment | file | environment
        for name, value in environment.items():
            if "${" in value:
                findings.note(call, f"{name} is {value!r}: single quotes keep ${{...}} unexpanded")
        for name in (parent or call).environment.get(_OWN_PREFIX + "UNSET", "").split():  # arrays that the calling line expands
            findings.note(call, f"{name} is not set; ${{{name}[@]}} expands to nothing")
        files = call.files | (parent.files if parent else {})
        job = (training.arguments, training.is_async, training.is_slime)
        findings.launches.append(Launch(*job, place=call.place, environment=environment, files=files))
    elif call.name in ("ssh", "pdsh") and re.search(r"\btrain(_async)?\.py\b", str(call.words)):
        raise ConfigError(f"`{call}` starts the training on another machine; import the script of one node")
    else:
        if call.name in _RUNNERS:
            findings.runner = f"{call.place}: `{call.name}`"
        _note(call, findings)


def _note(call: Call, findings: Findings) -> None:
    """Note a command that was not run and is not a training job."""
    converter = next((word for word in call.words if re.search(r"(^|/)convert_\w+\.py$", word)), None)
    if converter is not None:
        findings.note(call, f"`{call.name} ... {converter}` is not run: it converts a checkpoint, which is another job")
    elif call.words[:2] == ("nvidia-smi", "topo"):
        findings.note(call, f"`{call}` is not run: the machines are assumed to have NVLink (--no-nvlink if they have none)")
    elif call.name == "nvidia-smi" and call.is_captured:
        findings.note(call, f"`{call}` is not run: the machine is assumed to have 8 GPUs")
    elif call.name == "ssh":
        findings.note(call, f"`ssh ...` is not run: {str(call).removeprefix('ssh ')}")
    elif call.name not in _SILENT:
        output = "; the script reads its output, which is taken as empty" if call.is_captured else ""
        unknown = " (an unknown command, assumed to succeed)" if call.is_unknown else ""
        findings.note(call, f"`{call}` is not run{unknown}{output}")
