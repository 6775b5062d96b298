"""From a script to the run that it would start."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from posixpath import normpath

from fuligo.errors import ConfigError
from fuligo.importer.control import ScriptExit
from fuligo.importer.files import FileRefusedError, ScriptFiles
from fuligo.importer.interpreter import Interpreter
from fuligo.importer.limits import MAX_FILE_BYTES, Budget, LimitError
from fuligo.importer.state import CALLERS_VARIABLES, Findings, Launch, State, Streams, how_to_set


@dataclass(frozen=True, slots=True)
class ImportedScript:
    """What a launch script says."""

    launch: Launch
    notes: tuple[str, ...]
    """What was not run, and what was taken for granted, each with its line."""
    files: ScriptFiles
    directory: str
    """Where the script starts the job; relative paths begin there."""

    def file_text(self, path: str) -> str:
        """Of a file that the script would have written, or that lies in its folder.

        Raises:
            ConfigError: neither.
        """
        try:
            return self.files.read(normpath(f"{self.directory}/{path}") if not path.startswith("/") else path)
        except FileRefusedError as error:
            raise ConfigError(f"{self.launch.place}: {error}") from None


def import_script(
    script: Path,
    arguments: Sequence[str] = (),
    environment: Mapping[str, str] | None = None,
    given: Mapping[str, str] | None = None,
    root: Path | None = None,
    has_nvlink: bool = True,
) -> ImportedScript:
    """Evaluate a launch script. Starts nothing, writes nothing, contacts nobody; reads files under `root` only.

    Args:
        arguments: the script's `$1`, `$2`, ...
        environment: of the caller; only `CALLERS_VARIABLES` are taken from it.
        given: further variables that the script may see.
        root: folder whose files may be read (default: the script's).
        has_nvlink: what scripts that ask nvidia-smi are told.

    Raises:
        ConfigError: the script cannot be read, is not understood, or does not start exactly one training job.
    """
    if not script.is_file():
        raise ConfigError(f"{script}: there is no such script")
    if script.stat().st_size > MAX_FILE_BYTES:
        raise ConfigError(f"{script}: more than {MAX_FILE_BYTES:,} bytes, which is no launch script")
    allowed = {name: value for name, value in (environment or {}).items() if name in CALLERS_VARIABLES} | dict(given or {})
    state = _first_state(script, allowed, root, has_nvlink)
    state.positional = list(arguments)
    end = _evaluate(script, state)
    launches = state.findings.launches
    if not launches:
        raise ConfigError(_no_launch(script, state, end))
    if len(launches) > 1:
        raise ConfigError(
            f"{script.name} starts train.py {len(launches)} times ({', '.join(launch.place for launch in launches)}); keep one"
        )
    return ImportedScript(launches[0], tuple(state.findings.notes), state.files, state.directory)


def _first_state(script: Path, allowed: dict[str, str], root: Path | None, has_nvlink: bool) -> State:
    hosts = (Path(allowed["HOSTFILE"]).resolve(),) if allowed.get("HOSTFILE") else ()
    return State(
        files=ScriptFiles((root or script.parent).resolve(), hosts),
        budget=Budget(),
        findings=Findings(),
        directory=str(Path.cwd()),
        sources=[script],
        environment=allowed,
        has_nvlink=has_nvlink,
    )


def _evaluate(script: Path, state: State) -> ScriptExit | None:
    """Run to the end; how the script ended itself, if it did."""
    shell = Interpreter(state)
    streams = Streams(stdout=state.findings.printed)
    state.sources.clear()
    try:
        shell.source(script, script.read_bytes(), streams)
    except ScriptExit as end:
        return end
    except (LimitError, RecursionError) as error:
        text = str(error) if isinstance(error, LimitError) else "it is nested too deeply"
        raise ConfigError(f"{state.findings.place}: {text}; nothing was run") from None
    finally:
        state.sources[:] = [script]
    return None


def _no_launch(script: Path, state: State, end: ScriptExit | None) -> str:
    printed = "".join(state.findings.printed).strip().splitlines()
    where = f"ends in line {end.line} with status {end.status}" if end is not None else "ends"
    said = f"; it printed: {printed[-1][:200]}" if printed else ""
    unset = [how_to_set(name, script) for name in state.findings.tested_unset]
    return f"{script.name} {where} before it starts train.py{said}" + (f"; {unset[0]}" if unset else "")
