"""Built-ins of bash and small commands about names of files: what launch scripts use to put their flags together."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from posixpath import basename, dirname, normpath

from fuligo.importer import conditions, text_tools
from fuligo.importer.call import Call, Shell, print_text
from fuligo.importer.control import FunctionReturn, LoopControl, ScriptExit
from fuligo.importer.files import FileRefusedError
from fuligo.importer.state import Streams
from fuligo.importer.text_tools import UsageError


def _echo(shell: Shell, call: Call, streams: Streams) -> int:
    words = list(call.arguments)
    end = "\n"
    if words[:1] == ["-n"]:
        end, words = "", words[1:]
    elif words[:1] == ["-e"]:
        words = [word.replace("\\n", "\n").replace("\\t", "\t") for word in words[1:]]
    print_text(shell, streams, " ".join(words) + end)
    return 0


def _printf(shell: Shell, call: Call, streams: Streams) -> int:
    words = list(call.arguments)
    variable = words[1] if words[:1] == ["-v"] and len(words) > 2 else None
    words = words[2:] if variable is not None else words
    words = words[1:] if words[:1] == ["--"] else words
    if not words:
        raise UsageError("printf needs a format")
    text = text_tools.printf(words[0], words[1:], shell.state.budget)
    if variable is None:
        print_text(shell, streams, text)
    else:
        shell.state.set(variable, text)
    return 0


def _seq(shell: Shell, call: Call, streams: Streams) -> int:
    print_text(shell, streams, text_tools.seq(call.arguments, shell.state.budget))
    return 0


def _cd(shell: Shell, call: Call, streams: Streams) -> int:
    words = [word for word in call.arguments if word not in ("--", "-P", "-L")]
    if len(words) != 1 or words[0] == "-":
        raise UsageError("cd is understood with one directory")
    shell.state.directory = shell.state.path(words[0])
    return 0


def _pwd(shell: Shell, call: Call, streams: Streams) -> int:
    print_text(shell, streams, shell.state.directory + "\n")
    return 0


def _path_part(shell: Shell, call: Call, streams: Streams) -> int:
    words = [word for word in call.arguments if word != "--"]
    if not words or len(words) > (1 if call.name == "dirname" else 2):
        raise UsageError(f"{call.name} is understood with one path")
    path = words[0].rstrip("/") or "/"
    part = dirname(path) or "." if call.name == "dirname" else basename(path)
    print_text(shell, streams, (part.removesuffix(words[1]) if len(words) == 2 else part) + "\n")
    return 0


def _realpath(shell: Shell, call: Call, streams: Streams) -> int:
    words = [word for word in call.arguments if not word.startswith("-")]
    if len(words) != 1:
        raise UsageError(f"{call.name} is understood with one path")
    print_text(shell, streams, normpath(shell.state.path(words[0])) + "\n")
    return 0


def _mktemp(shell: Shell, call: Call, streams: Streams) -> int:
    if any(word.startswith("-") for word in call.arguments) or len(call.arguments) > 1:
        raise UsageError("mktemp is understood with at most a template")
    print_text(shell, streams, shell.state.files.temporary(call.arguments[0] if call.arguments else None) + "\n")
    return 0


def _tee(shell: Shell, call: Call, streams: Streams) -> int:
    text = streams.stdin.rest()
    for word in call.arguments:
        if not word.startswith("-"):
            shell.state.files.write(shell.state.path(word), text, "-a" in call.arguments)
    print_text(shell, streams, text)
    return 0


def _read(shell: Shell, call: Call, streams: Streams) -> int:
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


def _mapfile(shell: Shell, call: Call, streams: Streams) -> int:
    words = [word for word in call.arguments if word != "-t"]
    if len(words) != 1:
        raise UsageError(f"{call.name} is understood with -t and one name")
    shell.state.set(words[0], streams.stdin.rest().splitlines())
    return 0


def _set(shell: Shell, call: Call, streams: Streams) -> int:
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


def _source(shell: Shell, call: Call, streams: Streams) -> int:
    if not call.arguments:
        raise UsageError("source needs a file")
    path = shell.state.path(call.arguments[0])
    try:
        text = shell.state.files.read(path)
    except FileRefusedError as error:
        raise shell.state.error(call.line, f"`{call}`: {error}") from None
    return shell.source(Path(path), text.encode(), streams)


def _exit(shell: Shell, call: Call, streams: Streams) -> int:
    raise ScriptExit(_status(call, shell.state.status), call.line)


def _shift(shell: Shell, call: Call, streams: Streams) -> int:
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


def _break(shell: Shell, call: Call, streams: Streams) -> int:
    raise LoopControl(max(1, _status(call, 1)), goes_on=call.name == "continue")


def _return(shell: Shell, call: Call, streams: Streams) -> int:
    raise FunctionReturn(_status(call, shell.state.status))


def _test(shell: Shell, call: Call, streams: Streams) -> int:
    return int(not conditions.test_arguments(shell, call.line, call.arguments))


def _refused(shell: Shell, call: Call, streams: Streams) -> int:
    raise shell.state.error(call.line, f"`{call}`: {call.name} runs text as a command, which is never done; nothing was run")


_BuiltIn = Callable[[Shell, Call, Streams], int]
BUILT_INS: dict[str, _BuiltIn] = {
    ":": lambda shell, call, streams: 0,
    ".": _source,
    "true": lambda shell, call, streams: 0,
    "false": lambda shell, call, streams: 1,
    "test": _test,
    "basename": _path_part,
    "break": _break,
    "cd": _cd,
    "continue": _break,
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
    "return": _return,
    "seq": _seq,
    "set": _set,
    "shift": _shift,
    "source": _source,
    "tee": _tee,
}
