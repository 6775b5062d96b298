"""Processes that import SGLang ahead of time, with a small package in its place."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from fuligo.engines.host import PortClaims
from fuligo.engines.sglang.ahead import fuligo_ahead
from fuligo.engines.sglang.server import AHEAD_VARIABLE, ServerPorts, ServerSettings

SCHEDULER = """
import gc, os, sys
COLLECTS = [gc.isenabled()]
BY_IMPORT = os.environ.get("READ_BY_IMPORT", "unset")
if BY_IMPORT == "broken":
    raise RuntimeError("no such kernel")

def run(pipe):
    import multiprocessing, resource
    started_with = open("/proc/self/environ").read().split(chr(0))
    COLLECTS.append(gc.isenabled())
    pipe.send({
        "pid": os.getpid(), "parent": os.getppid(), "by_import": BY_IMPORT, "later": os.environ.get("LATER"),
        "was_ahead": "LATER=1" not in started_with, "removed": "REMOVED" in os.environ, "wrapper": os.environ.get("WRAPPER"),
        "parent_process": multiprocessing.parent_process().pid, "files": resource.getrlimit(resource.RLIMIT_NOFILE)[0],
        "collects": COLLECTS, "has_frozen": gc.get_freeze_count() > 0,
    })
    pipe.recv()
    sys.exit(7)
"""
MAIN = f"""
import os, sys
sys.path.insert(0, {str(Path(fuligo_ahead.__file__).parent)!r})
import fuligo_ahead
fuligo_ahead.start()
import multiprocessing
from sglang.srt.managers import scheduler

if __name__ == "__main__":
    started = [process.pid for process in fuligo_ahead._ahead]
    os.environ.update(fuligo_ahead.ALWAYS_SET, LATER="1")
    os.environ.pop("REMOVED", None)
    exec(os.environ["CHANGE"])
    multiprocessing.set_start_method("spawn", force=True)
    ours, theirs = multiprocessing.Pipe()
    process = multiprocessing.Process(target=scheduler.run, args=(theirs,))
    process.start()
    theirs.close()
    told = ours.recv()
    assert told["parent"] == told["parent_process"] == os.getpid() and told["pid"] == process.pid
    assert process.is_alive() and process.exitcode is None
    ours.send("end")
    process.join()
    assert process.exitcode == 7
    print({{**told, "is_started": process.pid in started}})
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    managers = tmp_path / "sglang" / "srt" / "managers"
    managers.mkdir(parents=True)
    for directory in (tmp_path / "sglang", managers.parent, managers):
        (directory / "__init__.py").touch()
    (tmp_path / "sglang" / "launch_server.py").touch()
    (managers / "scheduler.py").write_text(SCHEDULER)
    (tmp_path / "main.py").write_text(MAIN)
    return tmp_path


def environment(package: Path, change: str, modules: str = "sglang.srt.managers.scheduler") -> dict[str, str]:
    return {**os.environ, "PYTHONPATH": str(package), "CHANGE": change, AHEAD_VARIABLE: modules, "REMOVED": "1"}


def run(package: Path, change: str = "", modules: str = "sglang.srt.managers.scheduler") -> tuple[dict, str]:
    """Run a main process that starts one scheduler after `change`; return what the scheduler reports, and the other lines."""
    command = [sys.executable, str(package / "main.py")]
    done = subprocess.run(command, env=environment(package, change, modules), capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    *lines, told = done.stdout.splitlines()
    return eval(told), "\n".join(lines)


def test_a_process_continues_with_what_spawn_gives_it(package: Path) -> None:
    told, said = run(package)
    assert told["is_started"] and told["was_ahead"] and told["later"] == "1" and not told["removed"]
    assert said == ""


def test_garbage_is_collected_only_after_the_imports(package: Path) -> None:
    told, _ = run(package)
    assert told["collects"] == [False, True] and told["has_frozen"]


def test_without_the_variable_processes_are_spawned(package: Path) -> None:
    told, said = run(package, modules="")
    assert not told["is_started"] and not told["was_ahead"] and said == ""


@pytest.mark.parametrize("name", ["READ_BY_IMPORT", "CUDA_VISIBLE_DEVICES"])
def test_a_changed_variable_that_imports_read_starts_the_process_anew(package: Path, name: str) -> None:
    told, said = run(package, f"os.environ[{name!r}] = '5'")
    assert told["is_started"] and not told["was_ahead"] and told["by_import"] == ("5" if name == "READ_BY_IMPORT" else "unset")
    assert f"starting the process of sglang.srt.managers.scheduler anew: its imports have read other values of {name}" in said


def test_an_import_that_fails_ahead_is_repeated_by_spawn(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (package / "main.py").write_text(
        MAIN.replace("import multiprocessing\n", "import multiprocessing\nos.environ.pop('READ_BY_IMPORT', None)\n")
    )
    monkeypatch.setenv("READ_BY_IMPORT", "broken")
    told, said = run(package)
    assert told["is_started"] and not told["was_ahead"] and told["by_import"] == "unset"
    assert "cannot be imported before the arguments are known (no such kernel)" in said


def test_another_executable_is_used(package: Path) -> None:
    """SGLang starts schedulers through numactl on hosts with several NUMA nodes."""
    wrapper = package / "wrapper.sh"
    wrapper.write_text(f'#!/bin/sh\nWRAPPER=yes exec {sys.executable} "$@"')
    wrapper.chmod(0o755)
    told, said = run(package, f"multiprocessing.spawn.set_executable({str(wrapper)!r})")
    assert told["is_started"] and not told["was_ahead"] and told["wrapper"] == "yes"
    assert f"SGLang starts this process with {wrapper}" in said


def limit_files(package: Path, hard: int) -> None:
    """Let the main process start with a limit of 256 open files, which it can raise to `hard`."""
    limit = f"""
import resource
if __name__ == "__main__":
    fuligo_ahead.LIMITS = {{resource.RLIMIT_NOFILE: 1000}}
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, {hard}))
"""
    (package / "main.py").write_text(MAIN.replace("fuligo_ahead.start()", f"{limit}fuligo_ahead.start()"))


def test_a_process_has_the_limits_that_sglang_sets_before_it_spawns(package: Path) -> None:
    limit_files(package, 1000)
    told, said = run(package)
    assert told["is_started"] and told["was_ahead"] and told["files"] == 1000 and said == ""


def test_limits_that_cannot_be_raised_start_other_processes(package: Path) -> None:
    """Descriptors from 512 on cannot be handed over."""
    limit_files(package, 256)
    told, said = run(package)
    assert not told["is_started"] and not told["was_ahead"] and "starting another" in said


@pytest.mark.parametrize("left", ["os.environ['LD_PRELOAD'] = ''", "os.environ.pop('LD_PRELOAD', None)"])
def test_a_preloaded_memory_saver_starts_no_detokenizer_anew(package: Path, left: str) -> None:
    """Some versions of torch_memory_saver leave LD_PRELOAD empty after the schedulers have been started, others unset."""
    save_memory_saver(package, package / "torch_memory_saver")
    managers = package / "sglang" / "srt" / "managers"
    (managers / "scheduler.py").rename(managers / "detokenizer_manager.py")
    main = MAIN.replace("import scheduler", "import detokenizer_manager as scheduler")
    (package / "main.py").write_text(main.replace("fuligo_ahead.start()", "sys.argv.append('--enable-memory-saver'); fuligo_ahead.start()"))
    told, said = run(package, left, "sglang.srt.managers.detokenizer_manager")
    assert told["is_started"] and told["was_ahead"] and said == ""


def test_a_process_that_has_ended_is_replaced(package: Path) -> None:
    told, said = run(package, "os.kill(started[0], 9); os.waitid(os.P_PID, started[0], os.WEXITED | os.WNOWAIT)")
    assert not told["is_started"] and not told["was_ahead"]
    assert "starting another" in said


def test_an_unused_process_ends_with_its_main_process(package: Path) -> None:
    variables = environment(package, "print(started[0], flush=True); import time; time.sleep(600)")
    with subprocess.Popen([sys.executable, str(package / "main.py")], env=variables, stdout=subprocess.PIPE, text=True) as main:
        assert main.stdout is not None
        ahead = int(main.stdout.readline())
        os.kill(ahead, 0)
        main.send_signal(signal.SIGKILL)
        assert main.communicate(timeout=60) == ("", None), "the process closes its output when it ends"


def test_a_main_process_that_ends_does_not_wait_for_processes_that_import(package: Path) -> None:
    """Python 3.12.10 and later wait for multiprocessing's resource tracker, which ends with the last process that has its descriptor."""
    (package / "sglang" / "launch_server.py").write_text("import time; time.sleep(600)")
    ending = """
from multiprocessing import resource_tracker
resource_tracker.ensure_running()
resource_tracker.ResourceTracker.__del__ = lambda self: self._stop()
sys.exit(3)
"""
    (package / "main.py").write_text(MAIN.replace("from sglang.srt.managers import scheduler\n", ending))
    command = [sys.executable, str(package / "main.py")]
    done = subprocess.run(command, env=environment(package, ""), capture_output=True, timeout=60, check=False)
    assert done.returncode == 3, "its processes have closed their output"


def save_memory_saver(directory: Path, libraries: Path) -> None:
    """Save packages like torch and torch_memory_saver, which cannot be imported, and the saver's libraries."""
    for name in ("torch_memory_saver", "torch"):
        (directory / name).mkdir()
        (directory / name / "__init__.py").write_text("raise AssertionError('imported')")
    (directory / "torch" / "version.py").write_text("cuda = '13.0'")
    for cuda in (12, 13):
        (libraries / f"torch_memory_saver_hook_mode_preload_cu{cuda}.abi3.so").touch()


@pytest.mark.parametrize("beside", [True, False])
def test_the_memory_saver_of_torchs_cuda_version_is_preloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, beside: bool) -> None:
    directory = tmp_path if beside else tmp_path / "torch_memory_saver"
    save_memory_saver(tmp_path, directory)
    program = (
        f"import sys; sys.path[0] = {str(Path(fuligo_ahead.__file__).parent)!r}; import fuligo_ahead; print(fuligo_ahead._memory_saver())"
    )
    variables = {**os.environ, "PYTHONPATH": str(tmp_path), "LD_PRELOAD": ""}
    found = subprocess.run([sys.executable, "-c", program], env=variables, capture_output=True, text=True, check=True, timeout=60)
    assert eval(found.stdout) == {"LD_PRELOAD": str(directory / "torch_memory_saver_hook_mode_preload_cu13.abi3.so")}


def settings(tmp_path: Path, **changes: Any) -> ServerSettings:
    with PortClaims() as claims:
        given: dict = {"tp_size": 4, "pp_size": 2, "arguments": {}, "worker_type": "regular", "device": "cuda", "host": "127.0.0.1"}
        return ServerSettings("engine 0", "model", ports=ServerPorts.claim(claims), log_file=tmp_path / "log", **given | changes)


@pytest.mark.parametrize(
    ("changes", "num_schedulers", "num_detokenizers"),
    [
        ({}, 8, 1),
        ({"num_nodes": 2, "node_rank": 1}, 4, 0),
        ({"arguments": {"dp_size": 2}}, 0, 0),
        ({"arguments": {"dp_size": 1}}, 8, 1),
    ],
)
def test_an_engine_starts_the_processes_of_its_node(tmp_path: Path, changes: dict, num_schedulers: int, num_detokenizers: int) -> None:
    modules = settings(tmp_path, **changes).full_environment()[AHEAD_VARIABLE].split()
    assert modules.count("sglang.srt.managers.scheduler") == num_schedulers
    assert modules.count("sglang.srt.managers.detokenizer_manager") == num_detokenizers == len(modules) - num_schedulers
