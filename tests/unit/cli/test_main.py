import importlib.util
import os
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from fuligo import cli
from fuligo.errors import ConfigError, EngineError

REPOSITORY = Path(__file__).parents[3]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch):
    """Replace `fuligo doctor` with a function."""

    def install(function) -> None:
        module = ModuleType("fuligo.cli.doctor")
        module.main = function
        monkeypatch.setitem(sys.modules, "fuligo.cli.doctor", module)

    return install


def raising(error: BaseException):
    def function(arguments: list[str]) -> int:
        raise error

    return function


@pytest.mark.parametrize("arguments", [[], ["--help"], ["-h"], ["help"]])
def test_overview_names_every_command(capsys: pytest.CaptureFixture[str], arguments: list[str]) -> None:
    assert cli.main(arguments) == 0
    shown = capsys.readouterr().out
    assert all(f"fuligo {name}" in shown for name in cli.COMMANDS)


@pytest.mark.parametrize("name", cli.COMMANDS)
def test_every_command_has_its_module(name: str) -> None:
    assert importlib.util.find_spec(f"fuligo.cli.{name.replace('-', '_')}") is not None


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["--version"]) == 0
    assert capsys.readouterr().out.startswith("fuligo 0.")


def test_a_command_gets_its_arguments_and_gives_the_exit_code(command) -> None:
    command(len)
    assert cli.main(["doctor", "--a", "b"]) == 2


@pytest.mark.parametrize(
    ("error", "code"), [(ConfigError("first", "second"), 2), (EngineError("engine 0 is gone"), 1), (KeyboardInterrupt(), 130)]
)
def test_errors_are_exit_codes_and_text_without_traceback(
    command, capsys: pytest.CaptureFixture[str], error: BaseException, code: int
) -> None:
    command(raising(error))
    assert cli.main(["doctor"]) == code
    captured = capsys.readouterr()
    assert captured.out == "" and "Traceback" not in captured.err
    assert all(part in captured.err for part in str(error).splitlines())


def test_an_error_of_ours_that_is_a_bug_keeps_its_traceback(command) -> None:
    command(raising(ZeroDivisionError()))
    with pytest.raises(ZeroDivisionError):
        cli.main(["doctor"])


def test_debugging_shows_the_traceback(command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FULIGO_DEBUG", "1")
    command(raising(ConfigError("wrong")))
    with pytest.raises(ConfigError):
        cli.main(["doctor"])


@pytest.mark.parametrize(("typed", "hint"), [("trian", "did you mean train or train-many?"), ("zzz", "the commands are quickstart, train")])
def test_an_unknown_command_is_answered_with_the_nearest(capsys: pytest.CaptureFixture[str], typed: str, hint: str) -> None:
    assert cli.main([typed]) == 2
    assert hint in capsys.readouterr().err


def test_long_texts_are_not_broken_in_a_narrow_terminal(
    command, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    path = "/a/very/long/path/" * 10 + "[with]brackets"
    command(raising(ConfigError(path)))
    cli.main(["doctor"])
    assert path in capsys.readouterr().err


@pytest.mark.parametrize("program", [["-m", "fuligo", "train"], ["train.py"]])
def test_the_ways_to_start_training_are_the_same(program: list[str]) -> None:
    done = subprocess.run(
        [sys.executable, *program, "--lr", "fast"], cwd=REPOSITORY, capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 2
    assert done.stdout == "" and done.stderr == "error: --lr: 'fast' is not valid; it must be a number >= 0 (default: 1e-06)\n"


def test_doctor_reports_this_machine(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert cli.main(["doctor"]) == 0
    shown = capsys.readouterr().out
    assert all(word in shown for word in ("Python", "torch", "cores", "memory", "working directory"))
    assert cli.main(["doctor", "--fast"]) == 2


def test_a_python_without_the_packages_is_named():
    environment = {**os.environ, "PYTHONPATH": str(Path(cli.__file__).parents[2])}
    command = [sys.executable, "-S", "-m", "fuligo", "plan"]  # -S disables site-packages.
    ended = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert ended.returncode == 2
    assert ended.stderr.startswith(f"error: {sys.executable} has no package pydantic") and "Traceback" not in ended.stderr


ENDING = """
import atexit, sys, threading, time
from fuligo import cli

class Kept:
    def __del__(self):
        print("destroyed")

kept = Kept()
atexit.register(print, "handled")

def work():
    time.sleep(0.1)
    print("worked")

if sys.argv[1:]:
    threading.Thread(target=work, daemon=sys.argv[1] == "daemon").start()
cli.main = len
cli.program(["a", "b", "c"])
"""


@pytest.mark.parametrize(
    ("thread", "printed"), [((), ["handled"]), (("waited for",), ["worked", "handled", "destroyed"]), (("daemon",), [])], ids=str
)
def test_the_process_ends_after_exit_handlers_without_destroying_objects(thread: tuple[str, ...], printed: list[str]) -> None:
    """Other threads are waited for, but for daemons, which may never end."""
    ended = subprocess.run([sys.executable, "-c", ENDING, *thread], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout.split(), ended.stderr) == (3, printed, "")


def test_ctrl_c_while_exit_handlers_run_ends_the_process_at_once() -> None:
    interrupted = "import signal\nsignal.signal(signal.SIGINT, signal.default_int_handler)\n" + ENDING.replace(
        'atexit.register(print, "handled")', 'atexit.register(print, "handled later")\natexit.register(signal.raise_signal, signal.SIGINT)'
    )
    ended = subprocess.run([sys.executable, "-c", interrupted], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert (ended.returncode, ended.stdout, ended.stderr) == (cli.INTERRUPTED, "", "")


@pytest.mark.parametrize("closed", ["1", "2"])
def test_a_closed_output_does_not_fail_the_command(closed: str) -> None:
    command = ["sh", "-c", f'exec "$0" -m fuligo --version {closed}>&-', sys.executable]
    ended = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert ended.returncode == 0
    assert (ended.stdout.split(" ")[0], ended.stderr) == ("" if closed == "1" else "fuligo", "")


def test_output_that_nobody_reads_ends_the_command_without_a_traceback() -> None:
    """As `fuligo schema | head`."""
    reading, writing = os.pipe()
    os.close(reading)
    done = subprocess.run(
        [sys.executable, "-m", "fuligo", "schema"], stdout=writing, stderr=subprocess.PIPE, text=True, timeout=240, check=False
    )
    os.close(writing)
    assert done.returncode == 1
    assert done.stderr == "error: standard output was closed by its reader (as `| head` does); stopped\n"
