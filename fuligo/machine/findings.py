"""Findings of `fuligo doctor` that do not depend on a config: Python, packages, devices, memory, writable directories."""

import os
import shutil
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

from fuligo.config.capabilities import ENGINE_CAPABILITIES, TRAINER_CAPABILITIES
from fuligo.config.groups.run import EngineFlags
from fuligo.environments.tools.python import PythonSettings, check_sandbox, shared_interpreters
from fuligo.errors import ConfigError
from fuligo.machine.facts import SHARED_MEMORY, Machine
from fuligo.machine.nvidia import GIB
from fuligo.machine.packages import package_version, package_versions, temporary_problem
from fuligo.quantities import count

PACKAGES = ("transformers", "safetensors", "pydantic", "pyarrow", "aiohttp", "fastapi", "uvicorn", "math-verify")
ENGINE_PACKAGES = tuple(package for engine in ENGINE_CAPABILITIES.values() for package in engine.packages)
TRAINER_PACKAGES = tuple(package for trainer in TRAINER_CAPABILITIES.values() for package in (*trainer.packages, *trainer.gpu_packages))
OPTIONAL_PACKAGES = ("tensorboard", "wandb", *TRAINER_PACKAGES, "ray")


@dataclass(frozen=True, slots=True)
class Finding:
    """Line of the report of `fuligo doctor`."""

    name: str
    value: str
    problem: str | None = None
    """Reason why a run cannot work, and the fix; None if nothing prevents it."""
    warning: str | None = None
    """Reason why a run may be slow or fail later, and the fix; None if there is none."""


def machine_findings(machine: Machine) -> list[Finding]:
    """Return the findings that need no config: Python, torch, packages, GPUs, cores, memory, directories and the sandbox."""
    supported = (3, 11) <= sys.version_info[:2] <= (3, 12)
    return [
        Finding("Python", f"{machine.python} on {machine.system}", None if supported else "use Python 3.11 or 3.12"),
        _torch(machine),
        *_packages(),
        *_devices(machine),
        Finding("cores", f"{machine.num_cores} usable"),
        Finding("memory", f"{machine.available_memory_bytes / GIB:.1f} of {machine.memory_bytes / GIB:.1f} GiB available"),
        Finding("open files", f"{machine.num_open_files} per process"),
        *_places(),
        _sandbox(),
    ]


def _torch(machine: Machine) -> Finding:
    torch = machine.torch
    if torch is None:
        return Finding("torch", "not usable", f"cannot import torch ({machine.torch_problem}); reinstall it")
    build = "CPU build" if torch.cuda is None else f"CUDA {torch.cuda}, NCCL {torch.nccl or 'none'}"
    return Finding("torch", f"{torch.version}, {build}, {count(torch.num_threads, 'thread')}")


def _packages() -> list[Finding]:
    versions = {name: package_version(name) for name in (*PACKAGES, *OPTIONAL_PACKAGES)}
    fix = "reinstall fuligo: pip install fuligo"
    needed = [Finding(name, versions[name] or "missing", None if versions[name] else fix) for name in PACKAGES]
    python = EngineFlags().interpreter  # engines may have an environment of their own
    place = "" if python == sys.executable else f" in {Path(python).parents[1]}"
    engines = {name: version and f"{version}{place}" for name, version in package_versions(ENGINE_PACKAGES, python).items()}
    optional = {name: versions[name] for name in OPTIONAL_PACKAGES} | engines
    return [*needed, *(Finding(name, found or "not installed (optional)") for name, found in optional.items())]


def _devices(machine: Machine) -> list[Finding]:
    gpus, torch = machine.gpus, machine.torch
    found = [
        Finding(f"GPU {gpu.index}", f"{gpu.name}, {gpu.memory_bytes / GIB:.0f} GiB, driver {gpu.driver}", warning=gpu.occupied_warning)
        for gpu in gpus.devices
    ]
    if not found:
        found.append(Finding("GPU", "none: runs compute on the CPU"))
    elif torch is not None and torch.num_devices < len(found):
        fix = "update the driver, which may be too old for torch's CUDA version, or check CUDA_VISIBLE_DEVICES"
        cause = "torch is a CPU build; install a CUDA build" if torch.cuda is None else fix
        found.append(Finding("CUDA devices", f"torch sees {torch.num_devices} of {len(found)}", warning=cause))
    if len(gpus.links) > 1:
        pairs = gpus.without_nvlink(len(gpus.links))
        missing = ", ".join(f"{a} and {b}" for a, b in pairs[:3]) + (f" and {count(len(pairs) - 3, 'more pair')}" if len(pairs) > 3 else "")
        found.append(Finding("NVLink", f"not between GPUs {missing}" if pairs else f"between all {len(gpus.links)} GPUs"))
    return found


def _places() -> list[Finding]:
    found = [_place("working directory", Path.cwd(), "run directories are written there: change to another, or use --run-dir")]
    problem = temporary_problem()
    found.append(Finding("temporary files", os.environ.get("TMPDIR") or "/tmp" if problem else tempfile.gettempdir(), problem))
    if SHARED_MEMORY.is_dir():
        found.append(_place("shared memory", SHARED_MEMORY, "weights are passed through it: mount it writable"))
    return found


def _sandbox() -> Finding:
    """Check the sandbox of the Python tool with an empty program; only a warning, since few runs need it."""
    settings = PythonSettings()
    try:
        check_sandbox(settings)
    except ConfigError as error:
        return Finding("sandbox", "none", warning=str(error))
    finally:
        shared_interpreters(settings).close()
    return Finding("sandbox", "programs that a model writes run isolated")


def _place(name: str, directory: Path, fix: str) -> Finding:
    problem = None
    try:
        tempfile.TemporaryFile(dir=directory).close()
    except OSError as error:
        problem = f"{error.strerror}; {fix}"
    return Finding(name, f"{directory}, {shutil.disk_usage(directory).free / GIB:.1f} GiB free", problem)
