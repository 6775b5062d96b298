"""The commands that a launch script may use: built-ins and stand-ins, evaluated here. Nothing is ever executed.

A command that is neither, nor a chore, nor the launch itself, is an error: what it would do cannot be known.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from posixpath import basename, dirname, normpath
from typing import TYPE_CHECKING

from fuligo.errors import ConfigError
from fuligo.importer import chores, conditions, launches, text_tools
from fuligo.importer.files import FileRefusedError
from fuligo.importer.state import Launch, Streams
from fuligo.importer.syntax import parse_script
from fuligo.importer.text_tools import UsageError

if TYPE_CHECKING:
    from fuligo.importer.interpreter import Interpreter

_MAX_SHOWN = 100


@dataclass(frozen=True, slots=True)
class Call:
    """One command with its arguments."""

    name: str
    arguments: tuple[str, ...]
    line: int
    environment: dict[str, str]
    """Assignments in front of it: `NAME=value command`."""

    @property
    def words(self) -> list[str]:
        return [self.name, *self.arguments]

    def __str__(self) -> str:
        text = " ".join(" ".join(self.words).split())
        return text if len(text) <= _MAX_SHOWN else text[:_MAX_SHOWN] + " ..."


def run(shell: Interpreter, call: Call, streams: Streams) -> int:
    """Evaluate one command; its exit status.

    Raises:
        ConfigError: it is not known here, or its arguments are not.
    """
    try:
        if call.name in _BUILT_INS:
            return _BUILT_INS[call.name](shell, call, streams)
        if call.name in _FILTERS:
            return _filter(shell, call, streams)
    except UsageError as error:
        raise shell.state.error(call.line, f"`{call}`: {error}") from None
    if _launch(shell, call):
        return 0
    if call.name == "ssh":
        return _ssh(shell, call)
    if call.name == "nvidia-smi" and call.arguments[:2] == ("topo", "-m"):
        return _nvlink(shell, call, streams)
    if chores.is_chore(call.name, call.arguments):
        return _skip(shell, call)
    raise shell.state.error(
        call.line,
        f"`{call}` is not a command that import-script knows; nothing was run. Delete the line if no flag depends on it, "
        "or write its result out (docs/import-script.md lists the known commands)",
    )


def _skip(shell: Interpreter, call: Call) -> int:
    if shell.state.captures and call.name in chores.PRINTS:
        raise shell.state.error(call.line, f"`{call}`: what it prints is used, and it is not run; write its result out")
    if call.name not in chores.SILENT:
        shell.state.note(call.line, f"`{call}` is not run")
    return 0


# -- launches and what surrounds them --------------------------------------------------------------------------------------------------


def _launch(shell: Interpreter, call: Call) -> bool:
    """Note the start of a job instead of making it."""
    words, environment = call.words, dict(call.environment)
    if words[:3] == ["ray", "job", "submit"]:
        try:
            submitted = launches.submission(words[3:])
            environment |= submitted.environment
            if submitted.environment_file is not None:
                environment |= launches.declared_environment(shell.state.files.read(shell.state.path(submitted.environment_file)))
        except (launches.LaunchError, FileRefusedError) as error:
            raise shell.state.error(call.line, str(error)) from None
        words = list(submitted.entrypoint)
    else:
        exported = {name: shell.state.get(name) for name in sorted(shell.state.exported)}
        environment = {name: value for name, value in exported.items() if isinstance(value, str)} | environment
    for name, value in environment.items():
        if "${" in value:
            shell.state.note(call.line, f"{name} is {value!r}: single quotes keep ${{...}} as it is written")
    arguments = launches.training_arguments(words)
    if arguments is not None:
        shell.state.findings.launches.append(Launch(shell.state.place(call.line), arguments, environment))
        return True
    converter = chores.conversion(words)
    if converter is not None:
        shell.state.note(call.line, f"`{words[0]} ... {converter}` is not run: it converts a checkpoint, which is another job")
    elif call.words[:3] == ["ray", "job", "submit"]:
        raise shell.state.error(call.line, f"ray job submit starts `{' '.join(words)[:_MAX_SHOWN]}`, which is not train.py")
    return converter is not None


def _ssh(shell: Interpreter, call: Call) -> int:
    """Not run; but what it would run must be chores, too."""
    rest = list(call.arguments)
    while rest and rest[0].startswith("-"):
        option = rest.pop(0)
        if option in ("-o", "-p", "-i", "-l") and rest:
            rest.pop(0)
    if len(rest) < 2:
        raise shell.state.error(call.line, f"`{call}` opens a shell on another machine; nothing is contacted")
    remote = parse_script(" ".join(rest[1:]).encode(), f"{shell.state.place(call.line)}, the command of ssh,")
    before = len(shell.state.findings.launches)
    try:
        shell.in_subshell(lambda inner: inner.sequence(remote.children, Streams()))
    except ConfigError as error:
        raise shell.state.error(call.line, f"what ssh would run on {rest[0]}: {error}") from None
    if len(shell.state.findings.launches) > before:
        raise shell.state.error(call.line, "ssh starts the training itself; run the script of one node")
    shell.state.note(call.line, "`ssh ...` is not run: it starts workers on other machines")
    return 0


def _nvlink(shell: Interpreter, call: Call, streams: Streams) -> int:
    has = shell.state.has_nvlink
    shell.state.note(
        call.line,
        f"`{call}` is not run: the machines are taken to have {'' if has else 'no '}NVLink" + (" (--no-nvlink if not)" if has else ""),
    )
    _print(shell, streams, chores.nvlink_topology(has))
    return 0


# -- filters: text in, text out --------------------------------------------------------------------------------------------------------

_FILTERS = ("awk", "grep", "wc", "tr", "cut", "head", "tail", "cat")


def _filter(shell: Interpreter, call: Call, streams: Streams) -> int:
    arguments, text = _inputs(shell, call, streams)
    shell.state.budget.spend(len(text))
    status = 0
    match call.name:
        case "awk":
            text = text_tools.awk(arguments, text)
        case "grep":
            text, status = text_tools.grep(arguments, text, shell.state.budget)
        case "wc":
            text = text_tools.wc(arguments, text)
        case "tr":
            text = text_tools.tr(arguments, text)
        case "cut":
            text = text_tools.cut(arguments, text)
        case "head" | "tail":
            text = text_tools.ends_of(call.name, arguments, text)
        case _ if arguments:
            raise UsageError("cat is understood with files alone")
    _print(shell, streams, text)
    return status


def _inputs(shell: Interpreter, call: Call, streams: Streams) -> tuple[list[str], str]:
    """Arguments without the files at their end, and the text to work on."""
    arguments = list(call.arguments)
    program_words = {"awk": 1, "grep": 1, "tr": 9, "cut": 9}.get(call.name, 0)
    files: list[str] = []
    plain = [index for index, word in enumerate(arguments) if not word.startswith("-") or word == "-"]
    if call.name in ("awk", "grep") and "-F" in arguments[:1] and call.name == "awk":
        plain = [index for index in plain if index > 1]
    if call.name in ("head", "tail"):
        plain = [index for index in plain if not (index and arguments[index - 1] == "-n")]
    for index in reversed(plain[program_words:]):
        files.insert(0, arguments.pop(index))
    if not files:
        return arguments, streams.stdin.rest()
    return arguments, "".join(_file(shell, call, name) for name in files)


def _file(shell: Interpreter, call: Call, name: str) -> str:
    try:
        return shell.state.files.read(shell.state.path(name))
    except FileRefusedError as error:
        if call.name != "awk":
            raise shell.state.error(call.line, f"`{call}`: {error}") from None
        # Only host files are read by awk, and only to start workers: a plan does not need them.
        shell.state.note(call.line, f"`{call}`: {error}; taken as empty")
        return ""


# -- built-ins -------------------------------------------------------------------------------------------------------------------------


def _print(shell: Interpreter, streams: Streams, text: str) -> None:
    shell.state.budget.spend(len(text))
    streams.stdout.append(text)


def _echo(shell: Interpreter, call: Call, streams: Streams) -> int:
    words = list(call.arguments)
    end = "\n"
    if words[:1] == ["-n"]:
        end, words = "", words[1:]
    elif words[:1] == ["-e"]:
        words = [word.replace("\\n", "\n").replace("\\t", "\t") for word in words[1:]]
    _print(shell, streams, " ".join(words) + end)
    return 0


def _printf(shell: Interpreter, call: Call, streams: Streams) -> int:
    words = list(call.arguments)
    variable = words[1] if words[:1] == ["-v"] and len(words) > 2 else None
    words = words[2:] if variable is not None else words
    words = words[1:] if words[:1] == ["--"] else words
    if not words:
        raise UsageError("printf needs a format")
    text = text_tools.printf(words[0], words[1:], shell.state.budget)
    if variable is None:
        _print(shell, streams, text)
    else:
        shell.state.set(variable, text)
    return 0


def _seq(shell: Interpreter, call: Call, streams: Streams) -> int:
    _print(shell, streams, text_tools.seq(call.arguments, shell.state.budget))
    return 0


def _cd(shell: Interpreter, call: Call, streams: Streams) -> int:
    words = [word for word in call.arguments if word not in ("--", "-P", "-L")]
    if len(words) != 1 or words[0] == "-":
        raise UsageError("cd is understood with one directory")
    shell.state.directory = shell.state.path(words[0])
    return 0


def _pwd(shell: Interpreter, call: Call, streams: Streams) -> int:
    _print(shell, streams, shell.state.directory + "\n")
    return 0


def _path_part(shell: Interpreter, call: Call, streams: Streams) -> int:
    words = [word for word in call.arguments if word != "--"]
    if not words or len(words) > (1 if call.name == "dirname" else 2):
        raise UsageError(f"{call.name} is understood with one path")
    path = words[0].rstrip("/") or "/"
    part = dirname(path) or "." if call.name == "dirname" else basename(path)
    _print(shell, streams, (part.removesuffix(words[1]) if len(words) == 2 else part) + "\n")
    return 0


def _realpath(shell: Interpreter, call: Call, streams: Streams) -> int:
    words = [word for word in call.arguments if not word.startswith("-")]
    if len(words) != 1:
        raise UsageError(f"{call.name} is understood with one path")
    _print(shell, streams, normpath(shell.state.path(words[0])) + "\n")
    return 0


def _mktemp(shell: Interpreter, call: Call, streams: Streams) -> int:
    if any(word.startswith("-") for word in call.arguments) or len(call.arguments) > 1:
        raise UsageError("mktemp is understood with at most a template")
    _print(shell, streams, shell.state.files.temporary(call.arguments[0] if call.arguments else None) + "\n")
    return 0


def _tee(shell: Interpreter, call: Call, streams: Streams) -> int:
    text = streams.stdin.rest()
    for word in call.arguments:
        if not word.startswith("-"):
            shell.state.files.write(shell.state.path(word), text, "-a" in call.arguments)
    _print(shell, streams, text)
    return 0


def _read(shell: Interpreter, call: Call, streams: Streams) -> int:
    names = [word for word in call.arguments if word != "-r"] or ["REPLY"]
    if any(name.startswith("-") for name in names):
        raise UsageError("read is understood with -r and names")
    line = streams.stdin.line()
    if line is None:
        for name in names:
            shell.state.set(name, "")
        return 1
    separators = call.environment.get("IFS", " \t\n")
    parts = [line] if not separators else line.split(None if separators.isspace() else separators, len(names) - 1)
    for index, name in enumerate(names):
        shell.state.set(name, parts[index].strip() if index < len(parts) and separators else "".join(parts[index : index + 1]))
    return 0


def _mapfile(shell: Interpreter, call: Call, streams: Streams) -> int:
    words = [word for word in call.arguments if word != "-t"]
    if len(words) != 1:
        raise UsageError(f"{call.name} is understood with -t and one name")
    shell.state.set(words[0], streams.stdin.rest().splitlines())
    return 0


def _set(shell: Interpreter, call: Call, streams: Streams) -> int:
    words = list(call.arguments)
    if words[:1] == ["--"]:
        shell.state.positional = words[1:]
        return 0
    names = {"e": "errexit", "errexit": "errexit", "pipefail": "pipefail"}
    for index, word in enumerate(words):
        if not re.fullmatch(r"[+-][a-z]+|pipefail|errexit|nounset|xtrace", word):
            raise UsageError("set is understood with options such as -ex and -o pipefail")
        given = [word] if word[0] not in "+-" else list(word[1:])
        sign = word[0] if word[0] in "+-" else words[index - 1][0]
        for option in given:
            if option in names:
                (shell.state.options.add if sign == "-" else shell.state.options.discard)(names[option])
    return 0


def _source(shell: Interpreter, call: Call, streams: Streams) -> int:
    if not call.arguments:
        raise UsageError("source needs a file")
    path = shell.state.path(call.arguments[0])
    try:
        text = shell.state.files.read(path)
    except FileRefusedError as error:
        raise shell.state.error(call.line, f"`{call}`: {error}") from None
    return shell.source(Path(path), text.encode(), streams)


def _exit(shell: Interpreter, call: Call, streams: Streams) -> int:
    from fuligo.importer.interpreter import ScriptExit

    raise ScriptExit(_status(call, shell.state.status), call.line)


def _shift(shell: Interpreter, call: Call, streams: Streams) -> int:
    count = _status(call, 1)
    if count > len(shell.state.positional):
        return 1
    shell.state.positional = shell.state.positional[count:]
    return 0


def _status(call: Call, default: int) -> int:
    if not call.arguments:
        return default
    if not re.fullmatch(r"\d{1,3}", call.arguments[0]):
        raise UsageError(f"{call.name} takes a number up to 999")
    return int(call.arguments[0])


def _refused(shell: Interpreter, call: Call, streams: Streams) -> int:
    raise shell.state.error(call.line, f"`{call}`: {call.name} runs text as a command, which is never done; nothing was run")


_BuiltIn = Callable[["Interpreter", Call, Streams], int]
_BUILT_INS: dict[str, _BuiltIn] = {
    ":": lambda shell, call, streams: 0,
    ".": _source,
    "true": lambda shell, call, streams: 0,
    "false": lambda shell, call, streams: 1,
    "test": lambda shell, call, streams: int(not conditions.test_arguments(shell, call.line, call.arguments)),
    "basename": _path_part,
    "break": lambda shell, call, streams: shell.leave_loop(max(1, _status(call, 1)), False),
    "cd": _cd,
    "continue": lambda shell, call, streams: shell.leave_loop(max(1, _status(call, 1)), True),
    "dirname": _path_part,
    "echo": _echo,
    "eval": _refused,
    "exec": _refused,
    "exit": _exit,
    "mapfile": _mapfile,
    "mktemp": _mktemp,
    "printf": _printf,
    "pwd": _pwd,
    "read": _read,
    "readarray": _mapfile,
    "readlink": _realpath,
    "realpath": _realpath,
    "return": lambda shell, call, streams: shell.leave_function(_status(call, shell.state.status)),
    "seq": _seq,
    "set": _set,
    "shift": _shift,
    "source": _source,
    "tee": _tee,
}
