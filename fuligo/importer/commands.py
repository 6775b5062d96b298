"""What becomes of a command: evaluated here, noted as a launch, skipped as a chore, or refused. Nothing is ever executed.

A command that is none of these is an error: what it would do cannot be known.
"""

from __future__ import annotations

from fuligo.errors import ConfigError
from fuligo.importer import chores, launches
from fuligo.importer.built_ins import BUILT_INS
from fuligo.importer.call import Call, Shell, print_text, shortened
from fuligo.importer.files import FileRefusedError
from fuligo.importer.filters import FILTERS, run_filter
from fuligo.importer.state import Launch, Streams
from fuligo.importer.syntax import parse_script
from fuligo.importer.text_tools import UsageError


def run(shell: Shell, call: Call, streams: Streams) -> int:
    """Evaluate one command; its exit status.

    Raises:
        ConfigError: it is not known here, or its arguments are not.
    """
    try:
        if call.name in BUILT_INS:
            return BUILT_INS[call.name](shell, call, streams)
        if call.name in FILTERS:
            return run_filter(shell, call, streams)
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


def _skip(shell: Shell, call: Call) -> int:
    if shell.state.captures and call.name in chores.PRINTS:
        raise shell.state.error(call.line, f"`{call}`: what it prints is used, and it is not run; write its result out")
    if call.name not in chores.SILENT:
        shell.state.note(call.line, f"`{call}` is not run")
    return 0


# -- launches and what surrounds them --------------------------------------------------------------------------------------------------


def _launch(shell: Shell, call: Call) -> bool:
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
        raise shell.state.error(call.line, f"ray job submit starts `{shortened(' '.join(words))}`, which is not train.py")
    return converter is not None


def _ssh(shell: Shell, call: Call) -> int:
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


def _nvlink(shell: Shell, call: Call, streams: Streams) -> int:
    has = shell.state.has_nvlink
    shell.state.note(
        call.line,
        f"`{call}` is not run: the machines are taken to have {'' if has else 'no '}NVLink" + (" (--no-nvlink if not)" if has else ""),
    )
    print_text(shell, streams, chores.nvlink_topology(has))
    return 0
