"""What a script can change while it is evaluated: variables, functions, a working directory, files in memory. All of it ends with it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from posixpath import normpath

from tree_sitter import Node

from fuligo.errors import ConfigError
from fuligo.importer.files import ScriptFiles
from fuligo.importer.limits import Budget

CALLERS_VARIABLES = frozenset({
    "BASE_DIR", "MASTER_ADDR", "MASTER_PORT", "HOSTFILE", "SOCKET_IFNAME", "NODE_RANK", "WORLD_SIZE", "WORKER_IP", "NNODES", "NUM_NODES",
    "NUM_GPUS", "BASE_FOLDER", "MODEL_DIR", "DATA_DIR", "MLP_WORKER_0_HOST", "MLP_SOCKET_IFNAME",
})  # fmt: skip
"""Taken from the caller's environment. Others (keys, tokens) only where `--env` names them: the result is printed."""

Value = str | list[str]


@dataclass(slots=True)
class Input:
    """Standard input: text, and how far it is read."""

    text: str = ""
    position: int = 0

    def line(self) -> str | None:
        """The next line without its end; None after the last."""
        if self.position >= len(self.text):
            return None
        end = self.text.find("\n", self.position)
        end = len(self.text) if end < 0 else end
        line, self.position = self.text[self.position : end], end + 1
        return line

    def rest(self) -> str:
        text, self.position = self.text[self.position :], len(self.text)
        return text


@dataclass(slots=True)
class Streams:
    """Where a command reads and writes."""

    stdin: Input = field(default_factory=Input)
    stdout: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Function:
    """A function of the script."""

    body: Node
    file: Path
    """In which it stands."""


@dataclass(frozen=True, slots=True)
class Launch:
    """A start of the trainer, as the script would have made it."""

    place: str
    """`run.sh line 120`."""
    arguments: tuple[str, ...]
    """After `train.py`."""
    environment: dict[str, str]
    """Declared for the job: the runtime environment of `ray job submit`, assignments before the command."""


@dataclass(slots=True)
class Findings:
    """What an evaluation leaves behind; shared by all subshells."""

    launches: list[Launch] = field(default_factory=list)
    place: str = ""
    """Of the statement that is being evaluated."""
    notes: dict[str, None] = field(default_factory=dict)
    """In order, each once: a loop over hosts would say the same for every host."""
    printed: list[str] = field(default_factory=list)
    """What the script writes to the terminal."""
    tested_unset: dict[str, None] = field(default_factory=dict)
    """Variables that the script asked for by `-z` or `-n` and that are not set."""


@dataclass(slots=True)
class State:
    """One shell, or one subshell."""

    files: ScriptFiles
    budget: Budget
    findings: Findings
    directory: str
    """Working directory; need not exist."""
    sources: list[Path]
    """The file that is being evaluated last, those that source it before."""
    environment: dict[str, str]
    """What the caller lets the script see."""
    variables: list[dict[str, Value]] = field(default_factory=lambda: [{}])
    """Globals, then the locals of each function that is being called."""
    exported: set[str] = field(default_factory=set)
    functions: dict[str, Function] = field(default_factory=dict)
    positional: list[str] = field(default_factory=list)
    options: set[str] = field(default_factory=set)
    """Of `set`: errexit, pipefail."""
    has_nvlink: bool = True
    status: int = 0
    """`$?`."""
    captures: bool = False
    """Inside of `$(...)`: what commands print is used."""
    tests: int = 0
    """Conditions being evaluated: a failure there ends nothing, also under `set -e`."""

    def fork(self) -> State:
        """A subshell: it sees everything, and its variables, functions and directory are its own."""
        return State(
            files=self.files,
            budget=self.budget,
            findings=self.findings,
            directory=self.directory,
            sources=list(self.sources),
            environment=self.environment,
            variables=[{name: list(v) if isinstance(v, list) else v for name, v in scope.items()} for scope in self.variables],
            exported=set(self.exported),
            functions=dict(self.functions),
            positional=list(self.positional),
            options=set(self.options),
            has_nvlink=self.has_nvlink,
            status=self.status,
            captures=self.captures,
            tests=self.tests,
        )

    def get(self, name: str) -> Value | None:
        """A variable's value, None where it is not set."""
        if name == "BASH_SOURCE":
            return [str(path) for path in reversed(self.sources)]
        if name == "PWD":
            return self.directory
        for scope in reversed(self.variables):
            if name in scope:
                return scope[name]
        return self.environment.get(name)

    def set(self, name: str, value: Value) -> None:
        """Assign where the variable lives, else globally."""
        scope = next((scope for scope in reversed(self.variables) if name in scope), self.variables[0])
        scope[name] = value

    def set_local(self, name: str, value: Value) -> None:
        self.variables[-1][name] = value

    def unset(self, name: str) -> None:
        for scope in self.variables:
            scope.pop(name, None)
        if name in self.environment:
            self.environment = {key: value for key, value in self.environment.items() if key != name}

    def path(self, text: str) -> str:
        """Absolute, without `..`; nothing is looked up."""
        return normpath(text if text.startswith("/") else f"{self.directory}/{text}")

    def place(self, line: int) -> str:
        """`run.sh line 12`, of the file that is being evaluated."""
        return f"{self.sources[-1].name} line {line}"

    def note(self, line: int, text: str) -> None:
        self.findings.notes[f"{self.place(line)}: {text}"] = None

    def error(self, line: int, text: str) -> ConfigError:
        """To be raised."""
        return ConfigError(f"{self.place(line)}: {text}")

    def unset_error(self, line: int, name: str) -> ConfigError:
        return self.error(line, f"{name} is not set; {how_to_set(name, self.sources[0])}")


def how_to_set(name: str, script: Path) -> str:
    """What to type so that the script sees a variable."""
    if name in CALLERS_VARIABLES:
        return f"give it: {name}=VALUE fuligo import-script {script.name}"
    return f"give it: fuligo import-script {script.name} --env {name}=VALUE"
