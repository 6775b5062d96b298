"""The stand-ins that work on text: which file or input they read, and where the result goes. What they do to it: `text_tools`."""

from __future__ import annotations

from fuligo.importer import text_tools
from fuligo.importer.call import Call, Shell, print_text
from fuligo.importer.files import FileRefusedError
from fuligo.importer.state import Streams
from fuligo.importer.text_tools import UsageError

FILTERS = ("awk", "grep", "wc", "tr", "cut", "head", "tail", "cat")


def run_filter(shell: Shell, call: Call, streams: Streams) -> int:
    """Its exit status.

    Raises:
        UsageError: arguments that the stand-in does not understand.
        ConfigError: a file that the script may not read.
    """
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
    print_text(shell, streams, text)
    return status


def _inputs(shell: Shell, call: Call, streams: Streams) -> tuple[list[str], str]:
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


def _file(shell: Shell, call: Call, name: str) -> str:
    try:
        return shell.state.files.read(shell.state.path(name))
    except FileRefusedError as error:
        if call.name != "awk":
            raise shell.state.error(call.line, f"`{call}`: {error}") from None
        # Only host files are read by awk, and only to start workers: a plan does not need them.
        shell.state.note(call.line, f"`{call}`: {error}; taken as empty")
        return ""
