"""Text of `--help`: all flags by group, one group, or one flag. Plain text, so that it can be paged and searched."""

import shutil
import textwrap
from collections.abc import Sequence

from fuligo.config.flag import PREFIXES, option_name
from fuligo.config.flags import Flag, Kind, did_you_mean, flags, name_problem, nearest, passthrough_flags
from fuligo.config.groups import GROUPS, group_doc
from fuligo.config.schemas import BACKENDS, Schema, schema
from fuligo.errors import ConfigError

_COLUMN = 44
"""Column in which descriptions begin."""
_PLACEHOLDERS = {
    Kind.BOOL: "true|false",
    Kind.INT: "N",
    Kind.SIZE: "N",
    Kind.FLOAT: "X",
    Kind.TEXT: "TEXT",
    Kind.CHOICE: "TEXT",
    Kind.TEXT_LIST: "TEXT ...",
    Kind.INT_LIST: "N ...",
    Kind.FLOAT_LIST: "X ...",
    Kind.JSON: "JSON",
    Kind.JSON_LIST: "JSON",
    Kind.LAYERS: "N|[N,...]",
    Kind.TOPOLOGY: "FILE",
}
_USAGE = """\
fuligo train [--config FILE] [--flag VALUE ...]

--print-config prints the final config, with every default, and starts nothing.
A YAML file holds the same flags with underscores, under their group: `rollout: {rollout_batch_size: 32}`.
Flags on the command line override the file. Help on one group or flag: fuligo train --help GROUP_OR_FLAG

Pass arguments to SGLang with --sglang-NAME, to its router with --router-NAME, and to Megatron with --NAME; in a file, write them without
prefix under `sglang`, `router` and `megatron`. `--help sglang` lists them.
"""


def asked_for_help(arguments: Sequence[str]) -> str | None:
    """Return the topic after `--help` (empty: everything), or None if the arguments do not ask for help."""
    for option in ("--help", "-h"):
        if option in arguments:
            following = arguments[arguments.index(option) + 1 :]
            return following[0].lstrip("-").replace("-", "_") if following else ""
    return None


def help_text(topic: str = "") -> str:
    """Return the help text on a topic.

    `topic`: a group, a flag with underscores, or empty for everything. Raises ConfigError if no group or flag has this name.
    """
    if not topic:
        return "\n".join([_USAGE, *(_group_text(group) for group in GROUPS)])
    if topic in GROUPS:
        return _group_text(topic)
    if topic in BACKENDS:
        backend = schema(topic)
        heading = f"{topic}: arguments passed on to {BACKENDS[topic]} (checked against {backend.package} {backend.version})."
        return "\n".join([heading, *(_flag_text(flag) for flag in passthrough_flags(topic).values())]) + "\n"
    if topic in flags():
        flag = flags()[topic]
        return f"{_flag_text(flag)}\n  in a file: `{flag.group}: {{{flag.name}: ...}}`\n"
    for group in BACKENDS:
        if (text := _argument_text(schema(group), topic)) is not None:
            return text
    near = nearest(topic, [*GROUPS, *flags(), *(flag.flat_name for group in BACKENDS for flag in passthrough_flags(group).values())])
    shown = ", ".join([*GROUPS, *BACKENDS])
    raise ConfigError(f"no group or flag is named {topic}{did_you_mean(near)}; the groups are {shown}")


def _group_text(group: str) -> str:
    return "\n".join([f"{group}: {group_doc(group)}", *(_flag_text(flag) for flag in flags().values() if flag.group == group)]) + "\n"


def _argument_text(backend: Schema, topic: str) -> str | None:
    """Return help on a pass-through argument under any of its names, or None if the backend has no such argument."""
    prefix = PREFIXES.get(backend.group, "")
    if not topic.startswith(prefix):
        return None
    given = topic.removeprefix(prefix)
    alias = backend.aliases.get(given)
    flag = backend.flags.get(alias.name if alias else given)
    problem = name_problem(backend, given)
    if flag is None:
        return f"{option_name(topic)}: {problem}\n" if given in backend.hints else None
    if problem is not None:
        return f"{_flag_text(flag)}\n  {flag.option}: {problem}\n"
    value = f" {alias.value}" if alias and alias.value is not None else ""
    also = f"  {option_name(topic)} is the same as {flag.option}{value}\n" if alias else ""
    return f"{_flag_text(flag)}\n{also}  in a file: `{backend.group}: {{{flag.name}: ...}}`\n"


def _flag_text(flag: Flag) -> str:
    heading = f"  {flag.option}" if flag.kind is Kind.BOOL else f"  {flag.option} {placeholder(flag)}"
    width = max(_COLUMN + 40, min(shutil.get_terminal_size().columns, 140))
    margin = " " * _COLUMN
    notes = f"[{details(flag)}]" if details(flag) else ""
    doc = f"{flag.doc} {notes}".strip()
    if not doc:
        return heading
    text = textwrap.fill(doc, width, initial_indent=margin, subsequent_indent=margin)
    return heading.ljust(_COLUMN) + text[_COLUMN:] if len(heading) < _COLUMN - 1 else f"{heading}\n{text}"


def placeholder(flag: Flag) -> str:
    """Return the placeholder of the value in a usage line: `N`, `X`, `TEXT`, `{auto,cpu,cuda}`."""
    if flag.choices:
        return "{" + ",".join(flag.choices) + "}"
    return _PLACEHOLDERS[flag.kind]


def details(flag: Flag) -> str:
    """Return unit, bounds and default: `tokens, >= 1, default 1024`; leave out a default that is none, empty or false."""
    default = "" if flag.default is None or flag.default is False or flag.default in ("", [], {}) else f"default {shown_default(flag)}"
    return ", ".join(part for part in (flag.unit or "", flag.bounds, default) if part)


def shown_default(flag: Flag) -> str:
    """Return the default as text; `none` for None and empty values."""
    if flag.default is None or flag.default in ([], {}):
        return "none"
    return str(flag.default).lower() if flag.kind is Kind.BOOL else str(flag.default)
