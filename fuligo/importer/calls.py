"""Recorded commands: the training jobs among them, and notes on the others, which were not run."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from fuligo.errors import ConfigError
from fuligo.importer import launches

_MAX_SHOWN = 100
_SILENT = frozenset({"sleep", "pgrep", "pidof", "lsof", "fuser", "hostname", "kill", "sudo", "clear"})
"""Commands that are not worth a note."""
_SHELL_VARIABLES = frozenset({"_", "SHLVL", "PWD", "OLDPWD", "BASH_ENV", "PATH", "COLUMNS", "LINES"})
_OWN_PREFIX = "IMPORT_SCRIPT_"


@dataclass(frozen=True, slots=True)
class Call:
    """One call of a stand-in."""

    number: str
    """Name of its record."""
    place: str
    """`run.sh line 120`."""
    words: tuple[str, ...]
    environment: dict[str, str]
    files: dict[str, str]
    """Texts of the files that its arguments name, by path."""
    is_captured: bool
    """Standard output is a pipe."""
    is_unknown: bool
    """No stand-in of that name exists; bash's handler of unknown commands recorded it."""

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
    def unset_arrays(self) -> list[str]:
        """Names of the arrays that its line expands and that are not set."""
        return self.environment.get(_OWN_PREFIX + "UNSET", "").split()

    @property
    def submission(self) -> str | None:
        """Record of the `ray job submit` that runs it."""
        return self.environment.get(_OWN_PREFIX + "SUBMISSION")

    def __str__(self) -> str:
        line = " ".join(" ".join(self.words).split())
        return line if len(line) <= _MAX_SHOWN else line[:_MAX_SHOWN] + " ..."


@dataclass(frozen=True, slots=True)
class Launch:
    """A training job that the script starts."""

    place: str
    training: launches.Training
    environment: dict[str, str]
    """Variables declared for the job: its runtime environment, what the script exports, assignments before the command."""
    files: dict[str, str]
    """Texts of the files that its arguments name, by path."""

    @property
    def arguments(self) -> tuple[str, ...]:
        """Arguments after `train.py`."""
        return self.training.arguments


@dataclass(slots=True)
class Findings:
    """Launches and notes of one script."""

    launches: list[Launch] = field(default_factory=list)
    notes: dict[str, None] = field(default_factory=dict)
    """In order, each once: a loop over hosts says the same for every host."""

    def note(self, call: Call, text: str) -> None:
        self.notes[f"{call.place}: {text}"] = None


def read_calls(calls: Iterable[Call], initial: Mapping[str, str]) -> Findings:
    """Sort the calls of a script into launches and notes.

    Args:
        initial: the environment that the script was started with.

    Raises:
        ConfigError: a submitted job is malformed, a command looks like an assignment, or the job is started on another machine.
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
        raise ConfigError(
            f"`{call}` is run as a command: an assignment has no spaces around its sign; write `{call.name}{sign}={value.strip()}`"
        )
    submitted = launches.submission(call.words)
    training = launches.training(submitted.entrypoint if submitted else call.words)
    if (submitted and is_followed) or call.name == "sudo":
        return  # the stand-in runs its command, which is recorded too
    if training is not None:
        parent = call if submitted else calls.get(call.submission or "")
        environment = {} if submitted else _exported(call.environment, parent.environment if parent else initial)
        declared = launches.submission(parent.words) if parent else None
        if parent and declared:
            file = launches.declared_environment(parent.files.get(declared.environment_file, "{}")) if declared.environment_file else {}
            environment = declared.environment | file | environment
        for name, value in environment.items():
            if "${" in value:
                findings.note(call, f"{name} is {value!r}: single quotes keep ${{...}} as it is written")
        for name in (parent or call).unset_arrays:
            findings.note(call, f"{name} is not set; ${{{name}[@]}} gives nothing")
        findings.launches.append(Launch(call.place, training, environment, call.files | (parent.files if parent else {})))
    elif call.name in ("ssh", "pdsh") and re.search(r"\btrain(_async)?\.py\b", str(call.words)):
        raise ConfigError(f"`{call}` starts the training on another machine; import the script of one node")
    else:
        _note(call, findings)


def _exported(environment: Mapping[str, str], before: Mapping[str, str]) -> dict[str, str]:
    """Return the variables that a script exported to a command."""
    skipped = {name for name in environment if name in _SHELL_VARIABLES or name.startswith((_OWN_PREFIX, "BASH_FUNC_"))}
    return {name: value for name, value in environment.items() if name not in skipped and before.get(name) != value}


def _note(call: Call, findings: Findings) -> None:
    """Note a command that was not run and is no training job."""
    converter = launches.conversion(call.words)
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
